"""RequestRows: the one owner of what each persistent row is doing.

A request enters with `add` and leaves with `remove`: one call each, whatever it was (finished, aborted, preempted, or
about to be added again). Every table that knows something of a row registers here, and hears of both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True, eq=False)
class NewRequest:
    """A request that has got a row: new, or back after a preemption."""

    req_id: str
    req_state_idx: int
    token_ids: list[int]  # prompt, and after a preemption the output so far
    features: list[Any]  # vLLM's multimodal features in prompt order; copies that keep the pixels
    sampling: Any  # vLLM's `SamplingParams`; None for a request that samples nothing
    adapter: str = ""  # name of its LoRA adapter, "" for none
    cache_salt: str = ""  # whose it is, where an operator keeps tenants apart; "" for all others'
    has_embeds: bool = False  # whether the prompt is one of embeddings, whose `token_ids` mean nothing
    prune_variant: int = 0  # by which of `PruneKnobs.variants` its prompt is pruned
    is_admitted: bool = True  # whether the draft is to read it; requests of a paused class are not

    @property
    def is_structured(self) -> bool:
        return self.sampling is not None and self.sampling.structured_outputs is not None


@dataclass(eq=False)
class Request:
    """The record of a request that the draft has not begun with: what it is, and what it waits for."""

    new: NewRequest
    pending: Any = None  # its scores on their way to the host (`PendingScores`), while they are
    guided: Any = None  # what guides its pruning (`Guided`), once that is here
    message: Any = None  # what the drafter gets of it (`PrefillMessage`), once the pool was full
    num_attempts: int = 0  # how often it has found the pool full


class RowTable(Protocol):
    """What knows something of persistent rows."""

    def add(self, request: NewRequest) -> None:
        """Take a request in that has just got its row."""
        return

    def remove(self, req_state_idx: int) -> None:
        """Forget a row, whose request has ended or lost it; harmless where nothing is known of it."""

    def active_rows(self) -> Iterable[int]:
        """Return the rows of which it holds something that `remove` gives back; a row may come twice."""
        return ()


class Phase(IntEnum):
    """What a row is doing; a bit each, so that one operation asks for several."""

    UNSEEN = 1  # the target's prefill is under way, or its scores are on their way to the host
    PREFILLING = 2  # the draft reads its prompt
    DRAFTING = 4
    SKIPPED = 8  # it runs without speculation, for good
    WAITING_FOR_BLOCKS = 16  # the draft's pool has no room for its prompt yet
    PREFILL_STALLED = 32  # the draft has read some of it, and finds no room to go on
    PAUSED = 64  # a drafter in a process of its own follows it, and this step takes no drafts for it


class DraftBatch(NamedTuple):
    """Who of a batch is drafted for: one object, compared by `is`, while neither the batch nor any row has changed."""

    rows_np: np.ndarray  # [num_reqs] persistent rows of the batch
    places_np: np.ndarray  # [n] int64 places in the batch of the requests that are drafted for
    drafted_np: np.ndarray  # [n] their persistent rows
    is_drafted: np.ndarray  # [num_reqs] bool: the same as a mask

    @property
    def is_whole(self) -> bool:
        return len(self.places_np) == len(self.rows_np)


class RequestRows:
    """What every persistent row is doing, and what its draft in flight is."""

    def __init__(self, max_num_reqs: int, device: torch.device):
        self._phase = np.full(max_num_reqs, Phase.UNSEEN, dtype=np.int8)
        self.phase = self._phase.view()  # [max_num_reqs]; `enter` and `skip` write
        self.phase.flags.writeable = False
        self.skip_reason: list[str | None] = [None] * max_num_reqs  # why a row is SKIPPED
        # [max_num_reqs] whether a row's scheduled drafts are real (vLLM pads), and on the host, which knows earlier
        self.has_draft = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self.has_draft_np = np.zeros(max_num_reqs, dtype=bool)
        self.is_tree = np.zeros(max_num_reqs, dtype=bool)  # [max_num_reqs] shape of the draft in flight
        # Rows of the last step's trees and their nodes, which the device knows; None for chains.
        self._tree_nodes: tuple[np.ndarray, torch.Tensor] | None = None
        # By row, the requests that the draft has not begun with, in order: UNSEEN or WAITING_FOR_BLOCKS.
        self.unstarted: dict[int, Request] = {}
        self._tables: list[RowTable] = []
        self._drafting_tables: list[Any] = []
        self._draft_batch: DraftBatch | None = None  # of the last step; None once a row has changed
        self._is_drafting: bool | None = None  # whether any row is; None once a row has changed
        self._published: DraftBatch | None = None  # whose drafts are in flight, all of them and no others of its batch
        self.in_flight: frozenset[str] = frozenset()  # the same by request id
        self.num_skips = 0  # requests that were ever skipped

    def register(self, *tables: RowTable, drafting: Iterable[Any] = ()) -> None:
        """Tell tables of every row's ends, in this order; `drafting` ones `remove` a row that is skipped, too."""
        self._tables.extend(tables)
        self._drafting_tables.extend(drafting)

    # ---- both ends of a request's life -----------------------------------------------------------------------------

    def add(self, request: NewRequest) -> None:
        self._draft_batch = None
        self.unstarted[request.req_state_idx] = Request(request)
        for table in self._tables:
            table.add(request)

    def remove(self, req_state_idx: int) -> None:
        self.unstarted.pop(req_state_idx, None)
        for table in self._tables:
            table.remove(req_state_idx)
        self._forget_draft(req_state_idx)
        self.enter(req_state_idx, Phase.UNSEEN)
        self.skip_reason[req_state_idx] = None

    def num_active(self) -> int:
        """Return of how many rows any table holds something: 0 when nothing runs, or something has leaked."""
        return len({*self.unstarted, *(row for table in self._tables for row in table.active_rows())})

    # ---- in between ------------------------------------------------------------------------------------------------

    def are_in(self, idx_mapping_np: np.ndarray, *phases: Phase) -> np.ndarray:
        """Return `[n]` bool: which of `[n]` rows are in one of these phases."""
        return self._phase[idx_mapping_np] & sum(phases) != 0

    def any_in(self, *phases: Phase) -> bool:
        return bool((self._phase & sum(phases)).any())

    @property
    def is_drafting(self) -> bool:
        """Whether any row is DRAFTING, asked in every step."""
        if self._is_drafting is None:
            self._is_drafting = self.any_in(Phase.DRAFTING)
        return self._is_drafting

    def draft_batch(self, idx_mapping_np: np.ndarray, is_done: np.ndarray) -> DraftBatch:
        """Return which of a step's requests are drafted for: the last step's answer where that has not changed."""
        last, is_done_all = self._draft_batch, bool(is_done.all())
        # Their bytes: a tenth of what numpy's own comparison takes.
        if last is not None and is_done_all and last.rows_np.tobytes() == idx_mapping_np.tobytes():
            return last
        is_drafted = is_done & self.are_in(idx_mapping_np, Phase.DRAFTING)
        places_np = np.flatnonzero(is_drafted)
        found = DraftBatch(idx_mapping_np.copy(), places_np, idx_mapping_np[places_np], is_drafted)
        # A prefill that goes on changes no row, and does change the answer.
        self._draft_batch = found if is_done_all else None
        return found

    def enter(self, rows: int | Sequence[int] | np.ndarray, phase: Phase) -> None:
        self._phase[rows], self._draft_batch, self._is_drafting = phase, None, None

    def start(self, req_state_idx: int, phase: Phase) -> None:
        self.unstarted.pop(req_state_idx, None)
        self.enter(req_state_idx, phase)

    def defer(self, req_state_idx: int, request: Request) -> None:
        """Let a request wait for blocks of the draft's pool, behind those that wait already."""
        self.unstarted.pop(req_state_idx, None)
        self.unstarted[req_state_idx] = request
        self.enter(req_state_idx, Phase.WAITING_FOR_BLOCKS)

    def skip(self, req_state_idx: int, reason: str) -> None:
        """Let a row's request go on without speculation, for good; what serves drafts has nothing of it any more."""
        self.unstarted.pop(req_state_idx, None)
        for table in self._drafting_tables:
            table.remove(req_state_idx)
        self._forget_draft(req_state_idx)
        self.enter(req_state_idx, Phase.SKIPPED)
        self.skip_reason[req_state_idx] = reason
        self.num_skips += 1

    def publish(
        self, idx_mapping: torch.Tensor, req_ids: Sequence[str], draft_batch: DraftBatch, num_nodes: torch.Tensor | None
    ) -> None:
        """Note which of a step's requests have a draft in flight from here on; of trees `[n]` nodes, on the device."""
        if draft_batch is not self._published:
            self._published, rows_np, is_drafted = draft_batch, draft_batch.rows_np, draft_batch.is_drafted
            self.in_flight = frozenset(req_ids[place] for place in draft_batch.places_np.tolist())
            if (self.has_draft_np[rows_np] != is_drafted).any():  # seldom: the usual step uploads nothing
                self.has_draft_np[rows_np] = is_drafted
                self.has_draft[idx_mapping] = async_tensor_h2d(is_drafted, device=self.has_draft.device)
        self._tree_nodes = None if num_nodes is None else (draft_batch.drafted_np, num_nodes)

    def was_drafted(self, draft_batch: DraftBatch) -> np.ndarray | bool:
        """Return `[n]` bool: the rows of a draft_batch whose drafts are in flight; True for all."""
        return True if draft_batch is self._published else self.has_draft_np[draft_batch.drafted_np]

    def num_drafts(self, num_speculative_tokens: int) -> np.ndarray:
        """Return `[max_num_reqs]` draft tokens in flight, of trees as many as they have nodes; waits for the device."""
        counts = np.where(self.has_draft_np, num_speculative_tokens, 0)
        if self._tree_nodes is not None:
            idx_mapping_np, num_nodes = self._tree_nodes
            counts[idx_mapping_np] = num_nodes.cpu().numpy()
        return counts

    def _forget_draft(self, req_state_idx: int) -> None:
        self.is_tree[req_state_idx] = False
        if self.has_draft_np[req_state_idx]:
            # vLLM may pad the row's next request with placeholders for drafts, which are no drafts.
            self.has_draft_np[req_state_idx] = False
            self.has_draft[req_state_idx : req_state_idx + 1].zero_()
