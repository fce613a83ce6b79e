"""How `tree_attention` tiles its work: what fits into a program's shared memory and registers."""

import functools
from dataclasses import dataclass

import triton

from vidspec_kernels.limits import DeviceLimits, shared_bytes_per_program

# Rows of a tile: with more than 64, one program takes a multiprocessor and reads a key for twice as many. That pays
# where products outrun the second-level cache, on Hopper and the large Blackwells, unless tiles of 64 pad fewer rows;
# elsewhere the padding of a last tile costs more than reading again.
_MAX_BLOCK_ROWS = 128
_SHARED_BLOCK_ROWS = 64
_WIDE_TILES = range(90, 120)  # compute capabilities
# Products of float32 without tensor cores need many more registers a row.
_MAX_BLOCK_ROWS_WIDE = 16
# Loads through a table take two stages a tile: of K and V three tiles are held, two of them under way.
_NUM_STAGES = 5
_TILES_HELD = 3
# Of a program, beside its tiles: reductions over warps.
_SCRATCH_BYTES = 1024
_WAIT_BYTES = 64
# Of a tile of nodes: at most the bits of an int32.
_BLOCK_NODES = 32
_PROGRAMS_PER_SM = 2


def _padded(head_size: int) -> int:
    return max(16, triton.next_power_of_2(head_size))


@dataclass(frozen=True)
class TileShape:
    """What a program works on at a time, and with what.

    Attributes:
        block_rows: Rows of a tile: heads of a KV head, of queries of one request.
        block_keys: Keys of a tile.
        block_nodes: Nodes of one.
        num_stages: Of the loops over both.
        num_warps: Of a program.
        programs_per_sm: That a multiprocessor is to hold.
    """

    block_rows: int
    block_keys: int
    block_nodes: int
    num_stages: int
    num_warps: int
    programs_per_sm: int


@functools.cache
def tile_shape(num_rows: int, head_size: int, widen: bool, reads_prefix: bool, limits: DeviceLimits) -> TileShape:
    """Return the tiles for `num_rows` rows of a request and KV head, of products in float32 (`widen`) or half."""
    line_bytes = _padded(head_size) * (4 if widen else 2)
    block_rows = max(16, triton.next_power_of_2(num_rows))
    if widen:
        block_rows = min(block_rows, _MAX_BLOCK_ROWS_WIDE)
    elif line_bytes > 256 or limits.capability not in _WIDE_TILES or -num_rows % _MAX_BLOCK_ROWS >= _SHARED_BLOCK_ROWS:
        block_rows = min(block_rows, _SHARED_BLOCK_ROWS)
    else:
        block_rows = min(block_rows, _MAX_BLOCK_ROWS)
    is_alone = block_rows > _SHARED_BLOCK_ROWS or (block_rows == _SHARED_BLOCK_ROWS and line_bytes > 256)
    programs_per_sm = 1 if is_alone else _PROGRAMS_PER_SM
    block_keys = _tile(block_rows, line_bytes, shared_bytes_per_program(limits, programs_per_sm))
    num_stages, block_nodes = _NUM_STAGES, min(block_keys, _BLOCK_NODES)
    if reads_prefix:
        num_stages, block_nodes = _pipeline(block_rows, line_bytes, block_keys, programs_per_sm, limits)
    return TileShape(block_rows, block_keys, block_nodes, num_stages, 8 if widen or is_alone else 4, programs_per_sm)


def _tile(block_rows: int, line_bytes: int, shared_bytes: int) -> int:
    """Return the keys of a tile: the most that a program holds, of lines of one padded head, and its scratch."""
    fitting = (keys for keys in (64, 32) if _held_bytes(block_rows, line_bytes, keys) <= shared_bytes)
    return next(fitting, 16)


def _held_bytes(block_rows: int, line_bytes: int, block_keys: int) -> int:
    """Return the shared memory of a program."""
    return (block_rows + 2 * _TILES_HELD * block_keys) * line_bytes + _SCRATCH_BYTES


def _pipeline(
    block_rows: int, line_bytes: int, block_keys: int, programs_per_sm: int, limits: DeviceLimits
) -> tuple[int, int]:
    """Return the stages of the loops and the nodes of a tile."""
    shared_bytes = shared_bytes_per_program(limits, programs_per_sm)
    # Blackwell's products take a few bytes more, to wait on, and more registers.
    waits = _WAIT_BYTES if limits.capability >= 100 else 0
    if _held_bytes(block_rows, line_bytes, block_keys) + waits > shared_bytes:
        return _NUM_STAGES - 1, min(block_keys, _BLOCK_NODES // 2)
    return _NUM_STAGES, min(block_keys, _BLOCK_NODES)
