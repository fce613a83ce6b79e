"""WaitingRoom: requests that found the draft's KV pool full. They go on when there is room.

Requests whose prompt did not fit hold no blocks; those that outgrew theirs keep them, and go on reading where they
were. Where all that could draft wait, none will free blocks: then the one that holds the most gives up for good.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from vllm_vidspec.engine.draft.drafter import no_room_for
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.messages import PrefillMessage
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import Phase, Request, RequestRows

MOST_BYTES = 1 << 30  # of pixels that the host keeps for prompts whose turn has not come
_MOST_ATTEMPTS = 16  # of one request: a pool that is always nearly full is not worth more


class WaitingRoom:
    """The rules of who waits: in `RequestRows`, `WAITING_FOR_BLOCKS` without any, or `PREFILL_STALLED` with some."""

    def __init__(self, requests: RequestRows, counters: Counters):
        self._requests, self._counters = requests, counters
        self._num_free = 0  # blocks, when a request was last deferred

    def _deferred(self) -> list[Request]:
        """Return who waits without blocks, the first that came first."""
        phase = self._requests.phase
        return [it for row, it in self._requests.unstarted.items() if phase[row] == Phase.WAITING_FOR_BLOCKS]

    def defer(self, request: Request, kv: DraftKV) -> bool:
        """Let a request wait that has found no room for its prompt; return False if it must do without drafts."""
        message: PrefillMessage = request.message
        request.num_attempts += 1
        self._num_free = kv.num_free_blocks
        if request.num_attempts == 1:
            self._counters.skip("pool_full", message.req_id, no_room_for(message))
        kept = sum(pixel_bytes(other.message.features) for other in self._deferred())
        if request.num_attempts > _MOST_ATTEMPTS or kept + pixel_bytes(message.features) > MOST_BYTES:
            return False
        self._requests.defer(message.req_state_idx, request)
        return True

    def pop_ready(self, rows_np: np.ndarray, kv: DraftKV) -> list[Request]:
        """Return the deferred requests of `[n]` rows that may try again, if blocks have come free since; they leave."""
        if kv.num_free_blocks <= self._num_free or not (deferred := self._deferred()):
            return []
        self._num_free = kv.num_free_blocks
        present = set(rows_np.tolist())
        ready = [request.new.req_state_idx for request in deferred if request.new.req_state_idx in present]
        return [self._requests.unstarted.pop(row) for row in ready]

    def hold(self, req_state_idx: int) -> None:
        """Let a request wait with its blocks, which it has outgrown."""
        if self._requests.phase[req_state_idx] == Phase.PREFILL_STALLED:
            return
        self._requests.enter(req_state_idx, Phase.PREFILL_STALLED)
        self._counters.add("waiting_drafts")

    def resume(self, rows_np: np.ndarray) -> None:
        """Put `[n]` rows that were stalled, and have found room, back into the queue."""
        if len(rows_np):
            self._requests.enter(rows_np, Phase.PREFILLING)
            self._counters.add("resumed_drafts", len(rows_np))

    def largest_of_all(self, rows_np: np.ndarray, kv: DraftKV) -> int | None:
        """Return the stalled row of `[n]` that has the most blocks, where none of the others drafts; else None."""
        stalled = rows_np[self._requests.are_in(rows_np, Phase.PREFILL_STALLED)]
        if not len(stalled) or self._requests.any_in(Phase.PREFILLING, Phase.DRAFTING):
            return None
        return int(stalled[kv.capacity_np[stalled].argmax()])


def pixel_bytes(features: Iterable[Any]) -> int:
    """Return the bytes of what vLLM's multimodal features of a prompt hold."""
    return sum(
        _size(element.data) for feature in features for element in (feature.data or {}).values() if element is not None
    )


def _size(data: Any) -> int:
    if isinstance(data, list | tuple):
        return sum(map(_size, data))
    return getattr(data, "nbytes", 0)
