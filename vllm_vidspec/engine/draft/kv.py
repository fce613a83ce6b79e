"""DraftKVPool: the paged KV memory of the draft, its block tables and who owns which block."""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

NULL_BLOCK = 0  # never handed out; tokens whose KV is already there write here


class DraftKVPool:
    """Allocates blocks to persistent rows; every rank of a tensor-parallel group makes the same calls in the same
    order.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.
        max_num_reqs: Persistent rows.
        max_slots: Most KV entries that one row may hold.
        device: Where the block table lives.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_reqs: int, max_slots: int, device: torch.device):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_blocks = -(-max_slots // block_size)
        # [max_num_reqs, max_blocks] int32
        self._table = StagedWriteTensor((max_num_reqs, self.max_blocks), dtype=torch.int32, device=device)
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._blocks: list[list[int]] = [[] for _ in range(max_num_reqs)]
        self._capacity = np.zeros(max_num_reqs, dtype=np.int64)  # [max_num_reqs] slots that the row's blocks hold

    @property
    def table(self) -> torch.Tensor:
        """`[max_num_reqs, max_blocks]` int32 block table on the device."""
        return self._table.gpu

    @property
    def num_used_blocks(self) -> int:
        """Blocks owned by rows."""
        return self.num_blocks - 1 - len(self._free)

    def reserve(self, rows: np.ndarray, num_slots: np.ndarray) -> np.ndarray:
        """Make every row hold at least so many slots; rows are visited only when they need another block.

        The device knows after `apply`.

        Args:
            rows: `[n]` int persistent rows.
            num_slots: `[n]` int slots wanted in all.

        Returns:
            `[n]` bool, False where the pool or the row's table is full; such a row keeps what it had.
        """
        fits = np.ones(len(rows), dtype=bool)
        for i in np.flatnonzero(num_slots > self._capacity[rows]):
            fits[i] = self._extend(int(rows[i]), int(num_slots[i]))
        return fits

    def apply(self) -> None:
        """Send what was reserved to the device; once a step, as the buffers it travels through are that many."""
        self._table.apply_write()

    def _extend(self, row: int, num_slots: int) -> bool:
        blocks = self._blocks[row]
        missing = -(-num_slots // self.block_size) - len(blocks)
        if missing > len(self._free) or len(blocks) + missing > self.max_blocks:
            return False
        new = [self._free.pop() for _ in range(missing)]
        self._table.stage_write(row, len(blocks), new)
        blocks.extend(new)
        self._capacity[row] = len(blocks) * self.block_size
        return True

    def release(self, row: int) -> None:
        """Give a row's blocks back."""
        self._free.extend(reversed(self._blocks[row]))
        self._blocks[row] = []
        self._capacity[row] = 0

    def slots(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return the physical slots of one segment per row, concatenated.

        Args:
            rows: `[n]` persistent rows.
            starts: `[n]` first KV entry of each segment.
            lengths: `[n]` entries of each segment.

        Returns:
            `[sum(lengths)]` int64 on the device.
        """
        lengths_np = np.asarray(lengths)
        ends = np.cumsum(lengths_np)
        entry_np = np.arange(ends[-1]) + np.repeat(np.asarray(starts) - (ends - lengths_np), lengths_np)
        row = async_tensor_h2d(np.repeat(np.asarray(rows), lengths_np), device=self.table.device)
        entry = async_tensor_h2d(entry_np, device=self.table.device)
        block = self.table[row, entry // self.block_size].to(torch.int64)
        return block * self.block_size + entry % self.block_size
