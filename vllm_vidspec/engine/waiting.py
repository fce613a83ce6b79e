"""WaitingRoom: requests whose draft found the KV pool full. It is not the last word: they go on when there is room.

Two kinds wait. Who found no room for its prompt holds nothing, and its prompt is kept, pixels and all; who outgrew its
blocks keeps them, and goes on reading where it was. Where all that could draft waits for room, nobody will make any:
then the one that holds the most gives up for good. Every decision follows from the pool, so ranks take the same ones.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from vllm_vidspec.engine.draft.drafter import no_room_for
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.messages import PrefillMessage
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import Phase, RequestRows

_MOST_BYTES = 1 << 30  # of kept prompts' pixels, on the host
_MOST_TRIES = 16  # of one request: a pool that is always nearly full is not worth more


class WaitingRoom:
    """By persistent row.

    Args:
        requests: Whose phases say who waits: `OUTSIDE` without blocks, `HELD` with them.
        counters: Told who waits and who goes on.
    """

    def __init__(self, requests: RequestRows, counters: Counters):
        self._requests, self._counters = requests, counters
        self._outside: OrderedDict[int, PrefillMessage] = OrderedDict()
        self._tries: dict[int, int] = {}
        self._num_free = 0  # blocks, when somebody was last turned away

    def turn_away(self, message: PrefillMessage, kv: DraftKV) -> bool:
        """Let a request wait that has found no room for its prompt; return False if it must do without drafts."""
        row = message.req_state_idx
        self._tries[row] = self._tries.get(row, 0) + 1
        self._num_free = kv.num_free_blocks
        held = sum(map(_num_bytes, self._outside.values()))
        if self._tries[row] == 1:
            self._counters.skip("pool_full", message.req_id, no_room_for(message))
        if self._tries[row] > _MOST_TRIES or held + _num_bytes(message) > _MOST_BYTES:
            return False
        self._outside[row] = message
        self._requests.enter(row, Phase.OUTSIDE)
        return True

    @property
    def has_callers(self) -> bool:
        """Whether anybody waits outside."""
        return bool(self._outside)

    def call_in(self, rows_np: np.ndarray, kv: DraftKV) -> list[PrefillMessage]:
        """Return the requests of a step, `[n]` rows, that may try again, the first that came first; they leave."""
        if not self._outside or kv.num_free_blocks <= self._num_free:
            return []
        self._num_free = kv.num_free_blocks
        present = set(rows_np.tolist())
        return [self._outside.pop(row) for row in list(self._outside) if row in present]

    def is_in(self, req_state_idx: int) -> None:
        """Take note of a request that has been let in; it may have waited outside."""
        if self._tries.pop(req_state_idx, 0):
            self._counters.add("resumed_drafts")

    def hold(self, req_state_idx: int) -> None:
        """Let a request wait with its blocks, which it has outgrown."""
        if self._requests.phase[req_state_idx] == Phase.HELD:
            return
        self._requests.enter(req_state_idx, Phase.HELD)
        self._counters.add("waiting_drafts")

    def go_on(self, rows_np: np.ndarray) -> None:
        """Put `[n]` rows that were held, and have found room, back in line."""
        if len(rows_np):
            self._requests.enter(rows_np, Phase.PREFILLING)
            self._counters.add("resumed_drafts", len(rows_np))

    def largest_of_all(self, rows_np: np.ndarray, kv: DraftKV) -> int | None:
        """Return the held row of `[n]` that has the most blocks, where none of the others drafts; else None."""
        held = rows_np[self._requests.are_in(rows_np, Phase.HELD)]
        if not len(held) or self._requests.any_in(Phase.PREFILLING, Phase.DRAFTING):
            return None
        return int(held[kv.capacity_np[held].argmax()])

    def held(self) -> Iterable[int]:
        """Return the rows whose prompts are kept here."""
        return self._outside.keys()

    def forget(self, req_state_idx: int) -> None:
        """Forget a row."""
        self._outside.pop(req_state_idx, None)
        self._tries.pop(req_state_idx, None)


def _num_bytes(message: PrefillMessage) -> int:
    """Return what a prompt's images and videos take on the host."""
    return sum(_size(element.data) for feature in message.features for element in (feature.data or {}).values())


def _size(data: Any) -> int:
    """Return the bytes of a tensor, or of tensors in lists."""
    if isinstance(data, list | tuple):
        return sum(map(_size, data))
    return getattr(data, "nbytes", 0)
