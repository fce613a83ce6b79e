"""TargetKV: the KV of a draft that is the target, in the target's own cache. Here are its tables, and what is copied.

A row's table holds, in this order: the target's blocks of the prompt of which the draft sees all tokens; blocks of our
own, behind those that the scheduler knows, with copies of the other tokens that it sees; the target's blocks from the
prompt's last on. A copy is made once, in whole blocks, so that past the prompt token t is entry t - num_dropped.

The target's verify steps write everything since the prompt. A draft's nodes go into the slots that vLLM holds for them
behind the root, and are overwritten as they are verified. Where there are none, at the end of the context, they go to
the null block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_vidspec.engine.draft.kv import NULL_BLOCK, UNBOUNDED, DraftKV
from vllm_vidspec.engine.kv_views import Reader

READER = Reader("copying what the draft sees", "name a draft model")


class TargetBlocks(NamedTuple):
    """What of the target's cache the draft may write, and all that it may read."""

    own: range  # ids of the blocks behind those that the scheduler knows
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer keys and values; see `kv_views.cache_views`


class TargetKV(DraftKV):
    """See `DraftKV`; its pool is what is copied into, and a row's other blocks are the scheduler's."""

    feeds_again = False

    def __init__(self, blocks: TargetBlocks, block_size: int, max_num_reqs: int, max_slots: int, device: torch.device):
        super().__init__(len(blocks.own) + 1, block_size, max_num_reqs, max_slots, device)
        self._free = list(reversed(blocks.own))
        self._layers = [part for pair in blocks.caches for part in pair]
        # By row the ids of its table: until `take` the target's own, all of them.
        self._tables: dict[int, list[int]] = {}
        self._changed: dict[int, int] = {}  # by row from which column on the device does not know its table

    @property
    def num_slots(self) -> int:
        return UNBOUNDED

    def append(self, req_state_idx: int, block_ids: Sequence[int], overwrite: bool) -> None:
        """Take note of blocks that the scheduler has given a row: its first if `overwrite`, else its next."""
        if overwrite:
            self._tables[req_state_idx] = list(block_ids)
        elif (table := self._tables.get(req_state_idx)) is not None:
            if self.capacity_np[req_state_idx]:
                self._changed.setdefault(req_state_idx, len(table))
            table.extend(block_ids)

    def take(self, req_state_idx: int, keep: np.ndarray) -> bool:
        """Let a row's draft see those of its prompt's first tokens that `[n * block_size]` bool says, a multiple of
        `block_size`, and all tokens after them; return False where the pool is full.
        """
        size, table = self.block_size, self._tables[req_state_idx]
        is_whole = np.logical_and.reduce(keep.reshape(-1, size), axis=1)
        first = np.array(table[: len(is_whole)], dtype=np.int64)
        copied = np.flatnonzero(keep & ~is_whole.repeat(size))
        num_own = len(copied) // size
        if num_own > len(self._free):
            return False
        own = self._blocks[req_state_idx] = [self._free.pop() for _ in range(num_own)]
        self._copy(first[copied // size], copied % size, np.repeat(own, size), np.arange(len(copied)) % size)
        self._tables[req_state_idx] = [*first[is_whole].tolist(), *own, *table[len(is_whole) :]]
        self._changed[req_state_idx], self.capacity_np[req_state_idx] = 0, UNBOUNDED
        return True

    def _copy(self, *places: np.ndarray) -> None:
        """Copy entries, given `[n]` blocks and places in them, of the sources and of the copies."""
        if not len(places[0]):
            return
        source_block, source, block, place = async_tensor_h2d(np.stack(places), device=self.fed.device)
        for part in self._layers:
            part = part if part.itemsize > 1 else part.view(torch.uint8)  # float8 is copied as bytes
            part[block, place] = part[source_block, source]

    def reserve(self, idx_mapping_np: np.ndarray, num_slots: np.ndarray) -> np.ndarray:
        """Return `[n]` bool, True: the scheduler has reserved what there is to reserve."""
        return np.ones(len(idx_mapping_np), dtype=bool)

    def apply(self) -> None:
        for row, start in self._changed.items():
            table = self._tables[row][start:]
            # The columns of a table that begins are another request's: what has no block goes to the null block.
            padding = 0 if start else self.max_blocks - len(table)
            self._block_tables.stage_write(row, start, table + [NULL_BLOCK] * padding)
        self._changed.clear()
        super().apply()

    def remove(self, req_state_idx: int) -> None:
        super().remove(req_state_idx)
        self._tables.pop(req_state_idx, None)
        self._changed.pop(req_state_idx, None)
