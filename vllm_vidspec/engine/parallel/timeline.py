"""What target and drafter did when: kept while a tool watches, on the clock that both share (CLOCK_MONOTONIC)."""

import time
from collections import deque
from enum import IntEnum
from typing import Any

from vllm_vidspec.parallel import NUM_EVENTS, Tables

LANES = ("target", "drafter")


class EventKind(IntEnum):
    """What took the time."""

    PREFILL = 0
    DECODE = 1
    VISION = 2
    DRAFT = 3
    WAIT = 4


def _event(lane: str, kind: int, start_s: float, end_s: float, num_reqs: int, num_tokens: int) -> dict[str, Any]:
    return {
        "lane": lane,
        "kind": EventKind(int(kind)).name.lower(),
        "start_s": float(start_s),
        "end_s": float(end_s),
        "num_reqs": int(num_reqs),
        "num_tokens": int(num_tokens),
    }


class Timeline:
    """The target's process keeps its own events, and of a drafter in it."""

    def __init__(self) -> None:
        self.is_on = False
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)

    def watch(self, on: bool) -> list[dict[str, Any]]:
        kept = list(self._events)
        self._events.clear()
        self.is_on = on
        return kept

    def note(
        self, lane: str, kind: EventKind, start_s: float, num_reqs: int, num_tokens: int, end_s: float | None = None
    ) -> None:
        """Keep what began at `start_s` and ended at `end_s`, now if None, while somebody watches."""
        if self.is_on:
            end_s = time.monotonic() if end_s is None else end_s
            self._events.append(_event(lane, kind, start_s, end_s, num_reqs, num_tokens))


def note_in(tables: Tables, kind: EventKind, start_s: float, num_reqs: int, num_tokens: int) -> None:
    """Keep what the drafter's process began at `start_s` and ends now, if anybody watches."""
    if tables.watching[0]:
        count = int(tables.num_events[0])
        tables.events[count % NUM_EVENTS] = (kind, start_s, time.monotonic(), num_reqs, num_tokens)
        tables.num_events[0] = count + 1


def watch_tables(tables: Tables, on: bool) -> list[dict[str, Any]]:
    """Return the drafter's events since watching began, the last NUM_EVENTS of them at most; go on watching or not."""
    count = int(tables.num_events[0]) if tables.watching[0] else 0
    places = [i % NUM_EVENTS for i in range(max(0, count - NUM_EVENTS), count)]
    events = [_event("drafter", *tables.events[place]) for place in places]
    tables.watching[0] = tables.num_events[0] = 0
    tables.watching[0] = int(on)
    return events
