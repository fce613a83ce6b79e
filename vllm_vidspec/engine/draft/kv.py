"""DraftKV: the draft's paged KV memory. Here are its blocks, its block tables, what was fed into it, and its rollback.

The text of a request is numbered by the target: logical token t. The draft never sees `num_dropped` of the prompt's
visual tokens, so past the pruned prompt token t is KV entry t - num_dropped of its row, and draft node i of a step is
entry root + i, the root being the last committed token.

**Rollback is the committed length.** Nothing is ever erased. Each step begins from the length that the target has
committed: entries past it, the drafts that it rejected, are stale, no mask reaches them, and the step's own forwards
write over them. Two things are left to do for what was accepted, both on the device and without a wait:

- accepted nodes of a tree may lie apart, so `kv_compact` moves them together behind the last step's root. Nodes that
  were not fed move garbage, which the first forward of the step replaces;
- an accepted draft that was proposed but never fed (the end of a chain, a leaf of a tree) has no entry yet. `fed` says
  which nodes have, and the step's first forward feeds the committed text's last two tokens: the older one's copy goes
  to the null block where its entry stands (`begin_step`).

A request that ends gives its blocks back in `remove`; the next owner writes before it reads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vidspec_kernels import CacheList

# A row that needs a block gets so many more, while half of the pool is free; all rows' are an eighth of it at most.
_MOST_AHEAD, _AHEAD_SHARE = 16, 8
UNBOUNDED = 1 << 60  # entries of a row that nothing limits
NULL_BLOCK = 0  # never handed out; tokens whose KV is already there write here


class DraftKV:
    """Blocks and tables of every persistent row; ranks make the same calls in the same order."""

    feeds_again = True  # whether the entry of an accepted draft may be missing: nothing but the draft writes here

    def __init__(
        self,
        num_blocks: int,  # blocks of the pool, the null block included
        block_size: int,
        max_num_reqs: int,
        max_slots: int,  # most KV entries that one row may hold
        device: torch.device,
        caches: CacheList | None = None,  # the draft's layers'; None of chains, whose accepted nodes lie together
    ):
        self.num_blocks, self.block_size, self.caches = num_blocks, block_size, caches
        self.max_blocks = -(-max_slots // block_size)
        self._ahead = min(_MOST_AHEAD, num_blocks // (_AHEAD_SHARE * max_num_reqs))
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._blocks: list[list[int]] = [[] for _ in range(max_num_reqs)]
        self.capacity_np = np.zeros(max_num_reqs, dtype=np.int64)  # [max_num_reqs] entries that the row's blocks hold
        # Written on the host, read on the device after `apply`; rows that do not draft keep whatever they had.
        self._block_tables = StagedWriteTensor((max_num_reqs, self.max_blocks), dtype=torch.int32, device=device)
        self._num_dropped = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)
        self._pos_delta = StagedWriteTensor(max_num_reqs, dtype=torch.int64, device=device)
        self.block_tables = self._block_tables.gpu  # [max_num_reqs, max_blocks] int32
        self.num_dropped = self._num_dropped.gpu  # [max_num_reqs] int32 visual tokens that the draft does not see
        self.pos_delta = self._pos_delta.gpu  # [max_num_reqs] int64 rope position minus logical position of the text
        self.num_dropped_np = np.zeros(max_num_reqs, dtype=np.int64)  # the same two on the host; `add` writes both
        self.pos_delta_np = np.zeros(max_num_reqs, dtype=np.int64)
        # [max_num_reqs + 1] nodes of the last drafts whose entries stand, bit j - 1 node j; the last row is padding's
        self.fed = torch.zeros(max_num_reqs + 1, dtype=torch.int64, device=device)

    @property
    def num_slots(self) -> int:
        """Entries of the whole pool: what one row could have at most."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def add(self, req_state_idx: int, num_dropped: int, pos_delta: int) -> None:
        """Write the integers of a request that begins; the device knows after `apply`."""
        self.num_dropped_np[req_state_idx] = num_dropped
        self.pos_delta_np[req_state_idx] = pos_delta
        self._num_dropped.stage_write_elem(req_state_idx, num_dropped)
        self._pos_delta.stage_write_elem(req_state_idx, pos_delta)

    def reserve(self, idx_mapping_np: np.ndarray, num_slots: np.ndarray) -> np.ndarray:
        """Make `[n]` rows hold `[n]` entries each; return `[n]` bool, False where the pool or a row's table is full."""
        fits = np.ones(len(idx_mapping_np), dtype=bool)
        for i in np.flatnonzero(num_slots > self.capacity_np[idx_mapping_np]):
            fits[i] = self._extend(int(idx_mapping_np[i]), int(num_slots[i]))
        return fits

    def _extend(self, req_state_idx: int, num_slots: int) -> bool:
        blocks = self._blocks[req_state_idx]
        missing = -(-num_slots // self.block_size) - len(blocks)
        if missing > len(self._free) or len(blocks) + missing > self.max_blocks:
            return False
        if len(self._free) - missing > self.num_blocks // 2:
            missing = min(missing + self._ahead, self.max_blocks - len(blocks))
        new = [self._free.pop() for _ in range(missing)]
        self._block_tables.stage_write(req_state_idx, len(blocks), new)
        blocks.extend(new)
        self.capacity_np[req_state_idx] = len(blocks) * self.block_size
        return True

    def apply(self) -> None:
        """Send what was staged to the device; once a step, as the buffers it travels through are that many."""
        for staged in (self._block_tables, self._num_dropped, self._pos_delta):
            staged.apply_write()

    def remove(self, req_state_idx: int) -> None:
        """Give a row's blocks back, and forget which drafts were fed: the row's next request has had none."""
        self._free.extend(reversed(self._blocks[req_state_idx]))
        self._blocks[req_state_idx] = []
        self.capacity_np[req_state_idx] = 0
        self.fed[req_state_idx : req_state_idx + 1].zero_()

    def slots(self, idx_mapping: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return the physical slots `[sum(lengths)]` int64 of a segment of entries per persistent row, concatenated."""
        lengths_np = np.asarray(lengths)
        ends = np.cumsum(lengths_np)
        entry_np = np.arange(ends[-1]) + np.repeat(np.asarray(starts) - (ends - lengths_np), lengths_np)
        row = async_tensor_h2d(np.repeat(np.asarray(idx_mapping), lengths_np), device=self.fed.device)
        entry = async_tensor_h2d(entry_np, device=self.fed.device)
        block = self.block_tables[row, entry // self.block_size].to(torch.int64)
        return block * self.block_size + entry % self.block_size
