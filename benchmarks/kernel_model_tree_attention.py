"""What a launch of tree_attention costs by its own decomposition: bytes, products, programs, and the time they predict.

`kernel_model.py` prints its tables. `shares` is the kernel's decomposition in plain Python, which tests compare with
the tiles that the interpreted kernel takes.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vidspec_kernels.limits import DeviceLimits
from vidspec_kernels.tree_attention.api import DIRECT_PARTS, MIN_UNITS
from vidspec_kernels.tree_attention.tiles import TileShape, tile_shape
from vidspec_tools.gpus import ARCHITECTURES, GPUS


@dataclass(frozen=True)
class Card:
    """A GPU: its limits, and peaks per second.

    Attributes:
        limits: What a launch is made for.
        memory: Bytes of its memory, peak.
        cache: Bytes out of the second-level cache, all multiprocessors together.
        products: Floating-point operations of half-precision products, dense, peak.
        exponentials: Of all multiprocessors together.
    """

    limits: DeviceLimits
    memory: float
    cache: float
    products: float
    exponentials: float


CARDS = {
    gpu.arch: Card(
        DeviceLimits(card.num_sms, card.shared_kb * 1024, card.program_kb * 1024, gpu.arch),
        gpu.bandwidth,
        card.cache,
        gpu.flops,
        card.num_sms * 16 * card.clock,
    )
    for gpu in (GPUS[name] for name in ("a100", "l40s", "h100", "b200"))
    for card in (ARCHITECTURES[gpu.arch],)
}
# Of a peak, what a kernel that does nothing else reaches: copies, and the best attention kernels written in Triton.
MEMORY_REACHED, PRODUCTS_REACHED = 0.9, 0.6
# Seconds: a launch from a graph until its programs run; loads that wait for each other before an item's first key (the
# lengths, the item's, its table, its keys); an arrival of a part (its stores, an atomic operation, the next loads).
LAUNCH, FIRST_KEY, ARRIVAL = 1.5e-6, 2.0e-6, 1.8e-6
# Bytes a second that one multiprocessor takes from the second-level cache.
CACHE_OF_ONE = 100e9


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
    """Return what each program of a launch does, in order; programs without work are left out.

    Args:
        num_queries: Of each request.
        prefix_lens: KV entries of each, within the table.
        group: Query heads of a KV head.
        num_kv_heads: Of the layer.
        tile: Of the launch.
        num_row_tiles: Of the request with the most rows that there may be.
        grid: Programs of the launch.
    """
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


def merge_seconds(num_parts: int, part_bytes: int) -> float:
    """Return how long the merge of an item's parts takes after the last of them."""
    levels = [num_parts]
    if num_parts > DIRECT_PARTS:
        fan_in = math.ceil(math.sqrt(num_parts))
        levels = [fan_in, math.ceil(num_parts / fan_in)]
    return sum(ARRIVAL + count * part_bytes / CACHE_OF_ONE for count in levels)


def predict(
    context: int | Sequence[int], batch: int, num_queries: int, num_heads: int, num_kv_heads: int, head_size: int,
    arch: int = 90, tile: TileShape | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the model of one launch in bfloat16 from a graph.

    Args:
        context: KV entries of each request, of all or by request.
        batch: Requests.
        num_queries: Rows of each, the root among them.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Of both.
        arch: A key of CARDS.
        tile: Another than the launch would take.

    Returns:
        `programs` and `tile` of the launch; `floor_us`, the larger of two times at peak rates, of the bytes (keys and
        values once, queries and outputs) and of the products (real rows only), and in `floor_by` which; `predicted_us`.
    """
    card, group = CARDS[arch], num_heads // num_kv_heads
    lens = [context] * batch if isinstance(context, int) else list(context)
    tile = tile or tile_shape(num_queries * group, head_size, False, True, card.limits)
    num_row_tiles = math.ceil(num_queries * group / tile.block_rows)
    grid = tile.programs_per_sm * card.limits.num_sms
    found = shares([num_queries] * batch, lens, group, num_kv_heads, tile, num_row_tiles, grid)

    entries = sum(length + num_queries for length in lens)
    num_bytes = 2 * head_size * (2 * num_kv_heads * entries + 2 * batch * num_queries * num_heads)
    flops = 4 * head_size * num_heads * num_queries * entries
    by_memory, by_products = num_bytes / card.memory, flops / card.products

    # A unit on one multiprocessor: row tiles that are read at the same time share what comes from memory.
    line_bytes, num_sms = 2 * head_size, card.limits.num_sms
    unit_bytes = 2 * tile.block_keys * line_bytes
    unit = max(
        unit_bytes / num_row_tiles / (MEMORY_REACHED * card.memory / num_sms),
        unit_bytes / (card.cache / num_sms),
        4 * tile.block_rows * tile.block_keys * head_size / (PRODUCTS_REACHED * card.products / num_sms),
        tile.block_rows * tile.block_keys / (card.exponentials / num_sms),
    )
    parts: dict[tuple[int, int, int], int] = {}
    for piece in itertools.chain.from_iterable(found):
        if piece.end - piece.begin < piece.num_units:
            item = (piece.row_tile, piece.req_idx, piece.kv_head)
            parts[item] = parts.get(item, 0) + 1
    heaviest = max(sum(piece.end - piece.begin for piece in pieces) for pieces in found)
    most_pieces = max(map(len, found))
    # Programs that share a multiprocessor hide each other's waits, but for the first.
    per_sm = max(1, math.ceil(len(found) / num_sms))
    waits = FIRST_KEY * (1 + (most_pieces - 1) / per_sm)
    # Of a row tile only the real rows are written and read.
    part_bytes = [
        4 * head_size * min(num_queries * group - row_tile * tile.block_rows, tile.block_rows)
        for row_tile in range(num_row_tiles)
    ]
    merge = max((merge_seconds(count, part_bytes[item[0]]) for item, count in parts.items()), default=0.0)
    predicted = LAUNCH + waits + heaviest * per_sm * unit + merge
    return {
        "programs": len(found),
        "tile": f"{tile.block_rows}x{tile.block_keys}",
        "floor_us": 1e6 * max(by_memory, by_products),
        "floor_by": "memory" if by_memory >= by_products else "tensor",
        "predicted_us": 1e6 * predicted,
    }
