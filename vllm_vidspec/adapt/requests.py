"""Requests: what the controller knows of each request, in arrays by slot; Batch: those of a step; numpy only."""

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Requests of a step."""

    slots: np.ndarray  # `[n]` int64
    place: tuple[int, int]  # Class of its size (1, 2, 3 to 4, 5 to 8, ...) and of its mean context (powers of two)
    context: np.ndarray  # `[n]` thousands of tokens that the target has of each
    total: float  # Their sum
    draft_context: np.ndarray  # `[n]` the same of the draft
    answer_tokens: np.ndarray  # `[n]` that each answer is expected to have at last


class Requests:
    """Those of one engine.

    Attributes:
        start_s: `[num_slots]` seconds in which the draft has read the prompt so far.
        tokens: `[num_slots]` tokens of the answer.
        verify_steps: `[num_slots]` steps that verified drafts of it.
        verify_tokens: `[num_slots]` tokens that these gave.
        probe_left: `[num_slots]` verify steps left of a probe; 0 for no probe, `OVER` for one that is over.
        is_read: `[num_slots]` bool: whether drafts of it were verified: what the draft reads from then on is text that
            came while it rested.
        may_draft: `[num_slots]` bool: whether it is drafted for, where that pays.
        is_drafted: `[num_slots]` bool: whether the last decision drafts for it.
    """

    OVER = -1  # where the batch of such a probe rests, nothing is drafted for it any more

    def __init__(self, num_slots: int):
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]
        # Contexts: thousands of tokens.
        self._context, self._draft_context, self.start_s, self._answer_tokens = np.zeros((4, num_slots))
        self.tokens, self.verify_steps, self.verify_tokens, self.probe_left = np.zeros((4, num_slots), np.int64)
        self.is_read, self.may_draft, self.is_drafted = np.zeros((3, num_slots), dtype=bool)

    def __iter__(self):
        return iter(self._slots)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._slots

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    def slot(self, req_id: str) -> int:
        """Return the slot of a request, -1 if nobody has taken it in."""
        return self._slots.get(req_id, -1)

    def slots(self, req_ids: Iterable[str]) -> np.ndarray:
        """Return `[n]` int64 slots, -1 where nobody has taken the request in."""
        return np.fromiter(map(self._slots.get, req_ids, repeat(-1)), dtype=np.int64)

    def begin(self, req_id: str, num_tokens: int, num_draft_tokens: int, answer_tokens: float) -> int:
        """Give a request a slot, and return it.

        Args:
            req_id: Its id, a new one.
            num_tokens: Of its prompt.
            num_draft_tokens: Of its prompt as the draft sees it.
            answer_tokens: That its answer is expected to have.
        """
        slot = self._slots[req_id] = self._free.pop()
        self._context[slot], self._draft_context[slot] = num_tokens / 1e3, num_draft_tokens / 1e3
        self._answer_tokens[slot] = answer_tokens
        for of_slots in (self.start_s, self.tokens, self.verify_steps, self.verify_tokens, self.probe_left):
            of_slots[slot] = 0
        self.is_drafted[slot], self.is_read[slot] = True, False
        return slot

    def end(self, req_id: str) -> int:
        """Take a request's slot back; what is known of it stands there until the next one gets it."""
        self._free.append(slot := self._slots.pop(req_id))
        return slot

    def started(self, req_ids: Iterable[str], seconds: float) -> bool:
        """Share the time in which the draft has read prompts, or parts of them: a short one beside long is not dear.
        Who has read its own catches up after a rest, and has no share. Return whether anybody had.
        """
        slots = self.slots(req_ids)
        slots = slots[(slots >= 0) & ~self.is_read[slots]]
        read = self._context[slots]
        self.start_s[slots] += seconds * read / max(float(read.sum()), 1e-9)
        return len(slots) > 0

    def batch(self, slots: np.ndarray) -> Batch:
        """Return a batch of requests, given `[n]` slots; one of them may be there several times."""
        gained = 1e-3 * self.tokens[slots]
        context, num_reqs = self._context[slots] + gained, len(slots)
        total = float(context.sum())
        place = max(0, num_reqs - 1).bit_length(), (int(1e3 * total / max(num_reqs, 1)) // 256).bit_length()
        return Batch(slots, place, context, total, self._draft_context[slots] + gained, self._answer_tokens[slots])
