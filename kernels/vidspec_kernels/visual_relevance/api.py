"""visual_relevance: the largest cosines between text rows and the stored video rows of their request, and their mean.

One pass over a paged store of unit rows (flash-decoding style: a request's tiles are dealt to many programs), the
largest values kept in registers; the cosines themselves are never held. Each element of the result has one owner and
depends on values alone, not on an order of summation over tiles: equal inputs give equal bits.
"""

import torch
from torch import Tensor

from vidspec_kernels.arrays import check, check_contiguous
from vidspec_kernels.dispatch import Impl, launcher, on_host, use_triton
from vidspec_kernels.float8 import FP8_CAPABILITY, widens
from vidspec_kernels.limits import device_limits
from vidspec_kernels.visual_relevance.reference import _merge_relevance_torch, visual_relevance_reference
from vidspec_kernels.visual_relevance.store import _QUERY_DTYPES, _STORE_DTYPES, storage_scale
from vidspec_kernels.visual_relevance.tiles import _LEAST_SHARE, _num_splits, _tile
from vidspec_kernels.visual_relevance.triton import (
    _merge_relevance_kernel,
    _merge_splits_kernel,
    _visual_relevance_kernel,
)  # fmt: skip

MAX_TOP_N = 128
MAX_QUERIES = 128
_MERGE_ENTRIES = 4096
_MERGE_DIM = 1024
_BLOCK_REQS = 256


def visual_relevance(
    queries: Tensor, cu_num_logits: Tensor, rows: Tensor, store: Tensor, block_fill: Tensor, block_table: Tensor,
    num_blocks: Tensor, top_n: int, max_queries: int, max_blocks: int, impl: Impl = "auto",
) -> Tensor:  # fmt: skip
    """Return each text row's largest cosines with the video tokens of its request.

    LVSpec's visual relevance (eq. 7-8) is the mean of the top_n largest: `merge_relevance` of this, or of the results
    of several shards where each holds a part of every request's video tokens.

    Args:
        queries: float32, bfloat16 or float16 [num_rows, d], unit stride in d: final-layer states of the target, not
            normalised; a row of zeros has cosines 0.
        cu_num_logits: int32 [R + 1], first row of each request; at most max_queries rows a request, some may have none.
        rows: int64 [R], persistent row (`req_state_idx`) of each batch row.
        store: float32, bfloat16, float16 or float8_e4m3fn [num_store_blocks, block_rows, d], contiguous, block_rows a
            power of two: unit rows times `storage_scale`, as `store_states` writes them.
        block_fill: int32 [num_store_blocks], valid rows of each block, its first ones. Nothing of the others is used,
            whatever they hold.
        block_table: int32 [max_reqs, >= max_blocks], blocks of each persistent row; unit stride in its rows.
        num_blocks: int32 [max_reqs], how many; 0 for a request without video. Of the table nothing else is used.
        top_n: N, 1 to 128.
        max_queries: Host-known bound of the rows of a request, up to 128.
        max_blocks: Host-known bound of `num_blocks` over this batch; sets the grid.
        impl: Neither path synchronises with the host.

    Returns:
        float32 [num_rows, top_n], descending, -inf where there are fewer video tokens and in rows of no request.

    Raises:
        ValueError: The store is float8_e4m3fn on a GPU of a compute capability below 8.9.
    """
    _check(queries, cu_num_logits, rows, store, block_fill, block_table, num_blocks, top_n, max_queries, max_blocks)
    if queries.shape[0] == 0 or rows.shape[0] == 0 or max_queries == 0 or max_blocks == 0:
        return queries.new_full((queries.shape[0], top_n), float("-inf"), dtype=torch.float32)
    run = _launch
    if not use_triton(impl, queries.device):
        run = on_host(impl, queries.device, "visual_relevance", visual_relevance_reference)
    return run(queries, cu_num_logits, rows, store, block_fill, block_table, num_blocks, top_n, max_queries, max_blocks)


def _check(
    queries: Tensor, cu_num_logits: Tensor, rows: Tensor, store: Tensor, block_fill: Tensor, block_table: Tensor,
    num_blocks: Tensor, top_n: int, max_queries: int, max_blocks: int,
) -> None:  # fmt: skip
    device, num_reqs = queries.device, rows.shape[0]
    assert queries.dtype in _QUERY_DTYPES, f"queries: {queries.dtype}"
    assert store.dtype in _STORE_DTYPES, f"store: {store.dtype}"
    check(
        device, queries=(queries, queries.dtype, 0, 0), rows=(rows, torch.int64, 0),
        cu_num_logits=(cu_num_logits, torch.int32, [num_reqs + 1]), num_blocks=(num_blocks, torch.int32, 0),
        block_fill=(block_fill, torch.int32, store.shape[0]),
        block_table=(block_table, torch.int32, [num_blocks.shape[0]], 0),
    )  # fmt: skip
    check_contiguous(device, store=(store, store.dtype, 0, 1, [queries.shape[1]]))
    block_rows = store.shape[1]
    assert block_rows & (block_rows - 1) == 0, f"store: blocks of {block_rows} rows"
    assert 0 <= max_blocks <= block_table.shape[1], f"max_blocks {max_blocks}, block_table: {list(block_table.shape)}"
    assert 1 <= top_n <= MAX_TOP_N, f"top_n {top_n}"
    assert 0 <= max_queries <= MAX_QUERIES, f"max_queries {max_queries}"


def _launch(
    queries: Tensor, cu_num_logits: Tensor, rows: Tensor, store: Tensor, block_fill: Tensor, block_table: Tensor,
    num_blocks: Tensor, top_n: int, max_queries: int, max_blocks: int,
) -> Tensor:  # fmt: skip
    """Launch both kernels; the grids come from shapes and bounds alone."""
    limits = device_limits(queries.device)
    if store.dtype == torch.float8_e4m3fn and limits.capability < FP8_CAPABILITY:
        raise ValueError("a float8 store needs compute capability 8.9 (Ada) or later: store bfloat16")
    (num_rows, hidden_size), num_reqs, block_rows = queries.shape, rows.shape[0], store.shape[1]
    # Two at least: a single entry would be a tensor without axes.
    log_top = max(1, (top_n - 1).bit_length())
    tile = _tile(queries.dtype, store.dtype, max_queries, log_top, limits, widens(queries, store))
    num_slots = tile.programs_per_sm * limits.num_sms
    num_splits = _num_splits(num_reqs * tile.num_groups, max_blocks * block_rows, num_slots)
    part = queries.new_empty(num_rows, num_splits, 2**log_top, dtype=torch.float32)
    out = queries.new_empty(num_rows, top_n, dtype=torch.float32)
    shared = {"HIDDEN": hidden_size, "BLOCK_ROWS": block_rows, "LEAST_SHARE": _LEAST_SHARE}
    launcher(_visual_relevance_kernel, (num_reqs * tile.num_groups, num_splits), queries.device)(
        queries, queries.stride(0), cu_num_logits, rows, store, block_fill, block_table, block_table.stride(0),
        num_blocks, part, max_queries, top_n, NUM_GROUPS=tile.num_groups, **shared, **tile.constants, **tile.options,
    )  # fmt: skip
    launcher(_merge_splits_kernel, (num_rows,), queries.device)(
        part, queries, queries.stride(0), cu_num_logits, rows, num_blocks, out,
        1 / storage_scale(store.dtype, hidden_size), num_reqs, num_splits, max_queries, top_n, **shared,
        LOG_TOP=log_top, LOG_ENTRIES=_MERGE_ENTRIES.bit_length() - 1, BLOCK_DIM=_MERGE_DIM, BLOCK_REQS=_BLOCK_REQS,
        num_warps=8,
    )  # fmt: skip
    return out


def merge_relevance(partials: Tensor, impl: Impl = "auto") -> Tensor:
    """Return the visual relevance of each row: the mean of the top_n largest cosines over all shards (eq. 7-8).

    Args:
        partials: float32 [num_shards, num_rows, top_n], unit stride in a row, results of `visual_relevance` on disjoint
            parts of the video tokens: descending, -inf where there are none.
        impl: Neither path synchronises with the host.

    Returns:
        float32 [num_rows]; the mean of all there are where they are fewer than top_n, 0 where there is none, NaN where
        a shard has NaN. The sum runs over descending values, so equal cosines give equal bits however they are dealt to
        shards.
    """
    check(partials.device, partials=(partials, torch.float32, 1, 0, 1))
    num_shards, num_rows, top_n = partials.shape
    if not use_triton(impl, partials.device):
        return _merge_relevance_torch(partials)
    out = partials.new_empty(num_rows)
    if num_rows:
        log_top = max(1, (top_n - 1).bit_length())
        log_entries = log_top + (num_shards - 1).bit_length()
        launcher(_merge_relevance_kernel, (num_rows,), partials.device)(
            partials, partials.stride(0), partials.stride(1), out, top_n, NUM_SHARDS=num_shards,
            LOG_ENTRIES=log_entries, LOG_TOP=log_top, num_warps=1 if log_entries <= 6 else 4,
        )  # fmt: skip
    return out
