"""What each program of a launch of tree_attention does: the kernel's decomposition, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vidspec_kernels.tree_attention.api import MIN_UNITS
from vidspec_kernels.tree_attention.tiles import TileShape


@dataclass(frozen=True)
class Piece:
    """Consecutive units of one item: key tiles first, then one for the nodes."""

    row_tile: int
    req_idx: int
    kv_head: int
    begin: int
    end: int
    num_units: int


def shares(
    num_queries: Sequence[int], prefix_lens: Sequence[int], group: int, num_kv_heads: int, tile: TileShape,
    num_row_tiles: int, grid: int,
) -> list[list[Piece]]:  # fmt: skip
    """Return what each program of a launch does, in order; programs without work are left out."""
    items = [
        (row_tile, req_idx, kv_head, 1 + math.ceil(prefix_len / tile.block_keys))
        for row_tile in range(num_row_tiles)
        for req_idx, (count, prefix_len) in enumerate(zip(num_queries, prefix_lens, strict=True))
        if count * group > row_tile * tile.block_rows
        for kv_head in range(num_kv_heads)
    ]
    total = sum(num_units for *_, num_units in items)
    num_programs = min(grid, max(total // MIN_UNITS, len(items)))
    if num_programs > num_row_tiles:
        num_programs -= num_programs % num_row_tiles
    found: list[list[Piece]] = [[] for _ in range(num_programs)]
    program, item_begin = 0, 0
    for row_tile, req_idx, kv_head, num_units in items:
        unit, item_end = item_begin, item_begin + num_units
        while unit < item_end:
            end = min(item_end, total * (program + 1) // num_programs)
            found[program].append(Piece(row_tile, req_idx, kv_head, unit - item_begin, end - item_begin, num_units))
            unit = end
            program += unit == total * (program + 1) // num_programs
        item_begin = item_end
    return found
