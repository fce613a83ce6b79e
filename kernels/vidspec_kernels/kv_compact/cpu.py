"""Loop of `kv_compact`."""

import numpy as np
from torch import Tensor

from vidspec_kernels.compiled import compiled
from vidspec_kernels.kv_compact.api import CacheList


@compiled("int32[:, :], int64[:], int32[:], int32[:, :], int32[:], int64[:], int64, int64[:, :]", "int64")
def _find_moves(block_table, rows, starts, path, num_accepted, path_rows, block_size, moves):
    """Write block and offset of each entry that moves and of where it goes, by columns; return how many there are."""
    num_moves = 0
    for r in range(len(rows)):
        row, p = rows[r], path_rows[r] if len(path_rows) > 0 else r
        for j in range(1, min(num_accepted[p] + 1, path.shape[1])):
            source, target = starts[r] + path[p, j], starts[r] + j
            if source == target or source >= block_table.shape[1] * block_size:
                continue
            moves[0, num_moves], moves[1, num_moves] = block_table[row, source // block_size], source % block_size
            moves[2, num_moves], moves[3, num_moves] = block_table[row, target // block_size], target % block_size
            num_moves += 1
    return num_moves


def kv_compact(
    caches: CacheList, block_table: Tensor, rows: Tensor, starts: Tensor, path: Tensor, num_accepted: Tensor,
    path_rows: Tensor | None,
) -> None:  # fmt: skip
    """Do what `kv_compact` does, a view at a time."""
    moves = np.empty((4, len(rows) * (path.shape[1] - 1)), dtype=np.int64)
    num_moves = _find_moves(block_table, rows, starts, path, num_accepted, path_rows, caches.block_size, moves)
    if num_moves == 0:
        return
    block, offset, new_block, new_offset = moves[:, :num_moves]
    for group in caches.groups:
        for view in group.arrays:
            view[new_block, new_offset] = view[block, offset]  # the right side is gathered first
