"""How a launch of `visual_relevance` deals its work to programs."""

import functools
from dataclasses import dataclass

import torch
import triton

from vidspec_kernels.limits import DeviceLimits, shared_bytes_per_program

# Queries that one program takes: a tree of 64 nodes and its root, rounded up; where the largest values of a query are
# many, what leaves registers for them.
_MOST_QUERIES = 80
_MOST_QUERIES_LONG_TOP = 32
_LONG_TOP = 32
_MIN_BLOCK_QUERIES = 16
# Stored rows of a tile. Larger tiles load the queries less often; Ada has no shared memory for them, and beside many
# queries Ampere no registers. A row's cosines do not depend on the choice: both are products of the same instruction.
_BLOCK_KEYS = 128
_BLOCK_KEYS_SHORT = 64
# Up to so many queries, two programs of four warps share a multiprocessor; with more, one of eight has it.
_FEW_QUERIES = 32
# A line of 128 bytes; products of float32 without tensor cores need many more registers a row.
_BLOCK_DIM = 64
_BLOCK_DIM_WIDE = 32
_MIN_STAGES = 3
_MAX_STAGES = 5
# Of shared memory, for what is selected from and what Blackwell waits on.
_SCRATCH_BYTES = 4096 + 64
# Partial results of a query are merged in one pass: so many of the default top_n, of 16 entries each.
_MAX_SPLITS = 256
_LEAST_SHARE = 64
# Batches are ragged: splits for all requests as if one of them had all the video, up to so many waves of programs.
_MAX_WAVES = 8


@dataclass(frozen=True)
class _Tile:
    """How a launch deals its work to programs."""

    constants: dict[str, int | bool | None]  # Of the kernel
    options: dict[str, int]  # Of the compiler
    num_groups: int  # Programs that share the queries of a request, each over all of its stored rows
    programs_per_sm: int  # How many programs a multiprocessor holds


def _num_splits(num_reqs: int, max_entries: int, num_slots: int) -> int:
    """Return the shares of each request's rows, for the longest video: it may be the only one."""
    by_rows = min(triton.cdiv(max_entries, _LEAST_SHARE), _MAX_SPLITS, num_slots)
    return max(1, min(by_rows, _MAX_WAVES * num_slots // num_reqs))


def _query_blocks(num_queries: int) -> tuple[int, int | None]:
    """Return the logarithms of two powers of two, or of one, that together are the queries as a multiple of 16."""
    padded = triton.cdiv(max(num_queries, 1), _MIN_BLOCK_QUERIES) * _MIN_BLOCK_QUERIES
    first = padded.bit_length() - 1
    rest = padded - 2**first
    return first, (rest - 1).bit_length() if rest else None


@functools.cache
def _tile(
    query_dtype: torch.dtype, store_dtype: torch.dtype, max_queries: int, log_top: int, limits: DeviceLimits,
    widen: bool,
) -> _Tile:  # fmt: skip
    """Return the tiles of a launch: the same for videos of any length; `widen` as `float8.widens` says."""
    most = _MOST_QUERIES_LONG_TOP if 2**log_top > _LONG_TOP else _MOST_QUERIES
    num_queries = max_queries if max_queries <= most else _MOST_QUERIES_LONG_TOP
    log_queries, log_more = _query_blocks(num_queries)
    padded = 2**log_queries + (0 if log_more is None else 2**log_more)
    is_few = padded <= _FEW_QUERIES
    block_dim = _BLOCK_DIM_WIDE if widen else _BLOCK_DIM

    def stages(num_programs: int, block_keys: int) -> int:
        stage_bytes = block_dim * (block_keys * store_dtype.itemsize + padded * query_dtype.itemsize)
        return min((shared_bytes_per_program(limits, num_programs) - _SCRATCH_BYTES) // stage_bytes, _MAX_STAGES)

    has_room = stages(2, _BLOCK_KEYS) >= _MIN_STAGES if is_few else limits.capability >= 90
    block_keys = _BLOCK_KEYS if has_room or 2**log_top > _BLOCK_KEYS_SHORT else _BLOCK_KEYS_SHORT
    programs_per_sm = 2 if is_few and stages(2, block_keys) >= _MIN_STAGES else 1
    constants = {
        "LOG_QUERIES": log_queries, "LOG_MORE": log_more, "LOG_KEYS": block_keys.bit_length() - 1, "LOG_TOP": log_top,
        "BLOCK_DIM": block_dim, "WIDEN": widen,
    }  # fmt: skip
    options = {"num_stages": stages(programs_per_sm, block_keys), "num_warps": 4 if is_few else 8}
    return _Tile(constants, options, triton.cdiv(max(max_queries, 1), padded), programs_per_sm)
