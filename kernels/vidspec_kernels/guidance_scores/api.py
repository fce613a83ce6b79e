"""guidance_scores: attention weight that text queries give each key of a paged cache, summed over queries and heads.

The weights are never held: on the GPU two passes over key tiles (softmax statistics of every row, then column sums), or
the second alone where the model's own attention returns the statistics; on the CPU strips of rows of bounded size.
Each element of the result has one owner: equal inputs give equal bits.
"""

import torch
import triton
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launcher, use_triton
from vidspec_kernels.float8 import FP8, NO_SCALES, Scales, check_scales, readable, widens
from vidspec_kernels.guidance_scores.reference import _guidance_scores_torch
from vidspec_kernels.guidance_scores.triton import _guidance_scores_kernel, _row_stats_kernel
from vidspec_kernels.limits import device_limits

_BLOCK_ROWS = 64
# Three-pass tf32 products need more registers and shared memory a row.
_BLOCK_ROWS_WIDE = 32
_BLOCK_KEYS = 64
# The first pass splits the keys, so that a few text queries over a long video still fill the GPU.
_KEYS_PER_SPLIT = 512
_MAX_SPLITS = 64
_LOG2E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)


def guidance_scores(
    query: Tensor, key_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, query_pos: Tensor, out: Tensor,
    out_row: Tensor, num_keys: Tensor, scale: float, *, lse: Tensor | None = None,
    max_queries_per_req: int | None = None, scales: Scales = NO_SCALES, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Add to `out` the softmax attention weight that each key receives, summed over the guiding queries and all heads.

    SpecVLM's guidance (eq. 4-5), for one layer and one chunk of the prompt: out[out_row[r], j] += sum over the queries
    i of request r and the heads h of softmax_j(scale * q_ih . k_jh), over all keys 0..query_pos[i], video or not.
    Layers and chunks accumulate; the caller zeroes `out` and divides by layers * heads * queries for the mean.

    Args:
        query: float32, bfloat16, float16 or float8_e4m3fn [num_queries, num_heads, head_dim], any strides: the guiding
            text queries only, after rotary embedding, requests in order.
        key_cache: One of these [num_blocks, block_size, num_kv_heads, head_dim], any strides (a permuted view is fine).
            Nothing outside a request's keys 0..query_pos is used, whatever it holds.
        block_table: int32 [num_reqs, max_blocks], unit stride in its rows; covers every query_pos.
        query_start_loc: int32 [num_reqs + 1], first query row of each request; a request may have none.
        query_pos: int32 [num_queries] >= 0, index of each query in its sequence; it sees keys 0..query_pos.
        out: In and out, float32 [num_out_rows, max_keys], unit stride in its rows.
        out_row: int32 or int64 [num_reqs], accumulator row of each request; two requests with queries may not share
            one. Those of requests without queries are not read.
        num_keys: int32 [num_reqs]; only keys below it (and below max_keys) are written, which changes no weight.
        scale: Factor of the logits, as in the model's attention.
        lse: float32 [num_queries, num_heads], any strides: log of the sum of exp(scale * q . k) over a row's keys, as
            fused attention computes it on its way. Saves the GPU the pass that finds it.
        max_queries_per_req: Host-known bound of a request's queries, which makes the grid smaller; num_queries if None.
        scales: What queries and keys are to be multiplied by, a float32 [num_kv_heads] of any stride each; None is 1.
            The third, of values, is not read.
        impl: The kernels never synchronise with the host; the torch path reads the lengths.
    """
    num_queries, num_heads, head_dim = query.shape
    device = query.device
    num_reqs = block_table.shape[0]
    assert query.dtype in _DTYPES and key_cache.dtype in _DTYPES, f"query {query.dtype}, key_cache {key_cache.dtype}"
    assert key_cache.ndim == 4 and key_cache.device == device, f"key_cache: {list(key_cache.shape)}"
    assert key_cache.shape[3] == head_dim, f"key_cache: head_dim {key_cache.shape[3]}, query's is {head_dim}"
    assert num_heads % key_cache.shape[2] == 0, f"key_cache: {key_cache.shape[2]} KV heads for {num_heads} heads"
    assert out_row.dtype in (torch.int32, torch.int64), f"out_row: expected int32 or int64, got {out_row.dtype}"
    check(
        device, block_table=(block_table, torch.int32, 0, 0), query_pos=(query_pos, torch.int32, num_queries),
        query_start_loc=(query_start_loc, torch.int32, num_reqs + 1), out=(out, torch.float32, 0, 0),
        out_row=(out_row, out_row.dtype, num_reqs), num_keys=(num_keys, torch.int32, num_reqs),
    )  # fmt: skip
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.device == device, f"lse: {lse.dtype} on {lse.device}"
        assert lse.shape == (num_queries, num_heads), f"lse: {list(lse.shape)} for {num_queries} queries"
    check_scales(device, scales, key_cache.shape[2])
    if num_queries == 0 or num_reqs == 0 or out.shape[1] == 0:
        return
    if query.dtype == FP8:
        query = query.to(torch.float16)  # exactly
    launch = _launch if use_triton(impl, device) else _guidance_scores_torch
    launch(
        query, key_cache, block_table, query_start_loc, query_pos, out, out_row, num_keys, scale, lse,
        max_queries_per_req or num_queries, scales[:2],
    )  # fmt: skip


def _launch(
    query: Tensor, key_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, query_pos: Tensor, out: Tensor,
    out_row: Tensor, num_keys: Tensor, scale: float, lse: Tensor | None, max_queries_per_req: int,
    scales: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Launch both passes, or the second alone; the grids come from shapes alone."""
    _, num_heads, head_dim = query.shape
    num_reqs = block_table.shape[0]
    _, block_size, num_kv_heads, _ = key_cache.shape
    widen = widens(query, key_cache)
    key_cache = readable(key_cache)
    block_dim = max(16, triton.next_power_of_2(head_dim))
    inputs = (
        query, *query.stride(), key_cache, *key_cache.stride(), block_table, block_table.stride(0),
        query_start_loc, query_pos,
    )  # fmt: skip
    tiles = {
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "BLOCK_ROWS": _BLOCK_ROWS_WIDE if widen else _BLOCK_ROWS,
        "BLOCK_KEYS": _BLOCK_KEYS,
        "WIDEN": widen,
        # Padded heads are masked, which takes registers that a third stage has not left.
        "num_stages": 2 if widen or head_dim != block_dim else 3,
    }
    if device_limits(query.device).capability >= 120:
        tiles["maxnreg"] = 224  # left to itself the assembler spills, to fit a third program
    factors = sum(((part, 0 if part is None else part.stride(0)) for part in scales), ())
    scale_log2 = scale * _LOG2E
    shift, factor = lse, None
    if shift is None:
        shift, factor = _row_stats(
            query, key_cache, block_table, inputs, factors, scale_log2, max_queries_per_req, tiles
        )
    launcher(_guidance_scores_kernel, (triton.cdiv(out.shape[1], _BLOCK_KEYS), num_reqs), query.device)(
        *inputs, shift, *shift.stride(), factor, out, out.stride(0), out_row, num_keys, *factors,
        num_heads, num_kv_heads, block_size, scale_log2, out.shape[1], **tiles,
    )  # fmt: skip


def _row_stats(
    query: Tensor, key_cache: Tensor, block_table: Tensor, inputs: tuple, factors: tuple, scale_log2: float,
    max_queries_per_req: int, tiles: dict[str, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return maxima of the rows' logits times log2 e, and 1 / sums: float32 [num_queries, num_heads] each."""
    num_queries, num_heads, _ = query.shape
    num_reqs, max_blocks = block_table.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_splits = min(triton.cdiv(max_blocks * block_size, _KEYS_PER_SPLIT), _MAX_SPLITS)
    num_row_tiles = triton.cdiv(max_queries_per_req * tiles["GROUP"], tiles["BLOCK_ROWS"])
    row_max = torch.empty(num_splits, num_queries, num_heads, dtype=torch.float32, device=query.device)
    row_sum = torch.empty_like(row_max)
    launcher(_row_stats_kernel, (num_reqs * num_row_tiles, num_kv_heads, num_splits), query.device)(
        *inputs, row_max, row_sum, row_max.stride(0), *factors, num_heads, num_row_tiles, num_splits, block_size,
        scale_log2, **tiles,
    )  # fmt: skip
    # Splits without keys hold (-inf, 0) and add nothing.
    top = row_max.amax(dim=0)
    return top, (row_sum * torch.exp2(row_max - top)).sum(dim=0).reciprocal_()
