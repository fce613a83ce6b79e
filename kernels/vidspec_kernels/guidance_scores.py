"""guidance_scores: attention weight that text queries give each key of a paged cache, summed over queries and heads.

The weights are never held: on the GPU two passes over key tiles (softmax statistics of every row, then column sums), or
the second alone where the model's own attention tells the statistics; on the CPU strips of whole rows of bounded size.
Each element of the result has one owner: equal inputs give equal bits.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, check_vector, device_limits, launcher, use_triton

_BLOCK_ROWS = 64
# Three-pass tf32 products need more registers and shared memory a row.
_BLOCK_ROWS_WIDE = 32
_BLOCK_KEYS = 64
# The first pass splits the keys, so that a few text queries over a long video still fill the GPU.
_KEYS_PER_SPLIT = 512
_MAX_SPLITS = 64
# float32 entries of one strip on the CPU, 8 MB of logits and as much of weights: shorter strips make slower products.
_STRIP_ENTRIES = 2**21
_LOG2E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _key_tile(
    block_table_ptr, key_cache_ptr, block_stride, slot_stride, dim_stride, block_size, keys, key_mask, dims, dim_mask
):
    """Load keys of one KV head as [dims, keys]; nothing of the table or the cache is read outside `key_mask`."""
    # int64 before the product: a block's offset passes 2**31 in a large pool.
    block = tl.load(block_table_ptr + keys // block_size, mask=key_mask, other=0).to(tl.int64)
    offset = block * block_stride + (keys % block_size).to(tl.int64) * slot_stride
    mask = key_mask[None, :] & dim_mask[:, None]
    return tl.load(key_cache_ptr + offset[None, :] + dims[:, None] * dim_stride, mask=mask, other=0.0)


@triton.jit
def _row_tile(query_ptr, query_stride, head_stride, dim_stride, query, head, row_mask, dims, dim_mask):
    """Load queries as [rows, dims]."""
    offset = query.to(tl.int64) * query_stride + head * head_stride
    mask = row_mask[:, None] & dim_mask[None, :]
    return tl.load(query_ptr + offset[:, None] + dims[None, :] * dim_stride, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["stats_split_stride", "num_row_tiles", "num_splits"])
def _row_stats_kernel(
    # [num_queries, num_heads, HEAD_DIM]
    query_ptr,
    query_stride,
    query_head_stride,
    query_dim_stride,
    # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    key_cache_ptr,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    key_dim_stride,
    # [num_reqs, max_blocks]
    block_table_ptr,
    block_table_stride,
    # [num_reqs + 1]
    query_start_loc_ptr,
    # [num_queries]
    query_pos_ptr,
    # [num_splits, num_queries, num_heads]
    row_max_ptr,
    row_sum_ptr,
    stats_split_stride,
    num_heads,
    num_row_tiles,
    num_splits,
    block_size,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Maximum and sum of exp2(logit - maximum) of BLOCK_ROWS (query, head) rows over one split of the keys."""
    req_idx = tl.program_id(0) // num_row_tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(query_start_loc_ptr + req_idx)
    num_rows = (tl.load(query_start_loc_ptr + req_idx + 1) - start) * GROUP
    first_row = (tl.program_id(0) % num_row_tiles) * BLOCK_ROWS
    if first_row >= num_rows:
        return

    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_DIM
    # A KV head's rows are its GROUP heads of one query, then those of the next.
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    query = start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    pos = tl.load(query_pos_ptr + query, mask=row_mask, other=-1)
    q = _row_tile(
        query_ptr, query_stride, query_head_stride, query_dim_stride, query, head, row_mask, dims, dim_mask
    )  # fmt: skip

    num_seen = tl.max(pos, axis=0) + 1
    keys_per_split = tl.cdiv(tl.cdiv(num_seen, BLOCK_KEYS), num_splits) * BLOCK_KEYS
    key_start = split * keys_per_split
    key_end = tl.minimum(key_start + keys_per_split, num_seen)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for first_key in range(key_start, key_end, BLOCK_KEYS):
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        k = _key_tile(
            block_table_ptr + req_idx.to(tl.int64) * block_table_stride,
            key_cache_ptr + kv_head * key_head_stride, key_block_stride, key_slot_stride, key_dim_stride,
            block_size, keys, keys < key_end, dims, dim_mask,
        )  # fmt: skip
        if WIDEN:
            logits = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="tf32x3")
        else:
            logits = tl.dot(q, k)
        # A causal limit by selection: whatever lies behind it, NaN included, is not used.
        seen = (keys[None, :] <= pos[:, None]) & (keys[None, :] < key_end)
        logits = tl.where(seen, logits * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        # Rows that have seen no key yet keep -inf; the shift only has to be finite for them.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(logits - shift[:, None]), axis=1)
        row_max = new_max
    offset = split.to(tl.int64) * stats_split_stride + query.to(tl.int64) * num_heads + head
    tl.store(row_max_ptr + offset, row_max, mask=row_mask)
    tl.store(row_sum_ptr + offset, row_sum, mask=row_mask)


@triton.jit(do_not_specialize=["out_stride", "max_keys", "row_shift_head_stride"])
def _guidance_scores_kernel(
    # [num_queries, num_heads, HEAD_DIM]
    query_ptr,
    query_stride,
    query_head_stride,
    query_dim_stride,
    # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    key_cache_ptr,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    key_dim_stride,
    # [num_reqs, max_blocks]
    block_table_ptr,
    block_table_stride,
    # [num_reqs + 1]
    query_start_loc_ptr,
    # [num_queries]
    query_pos_ptr,
    # [num_queries, num_heads]: maxima of logits times log2 e, or where there is no factor log-sum-exps
    row_shift_ptr,
    row_shift_stride,
    row_shift_head_stride,
    # [num_queries, num_heads], query weight / sum; or None
    row_factor_ptr,
    # [num_queries] factors where there are no others; or None
    query_weight_ptr,
    # [num_out_rows, max_keys]
    out_ptr,
    out_stride,
    # [num_reqs]
    out_row_ptr,
    # [num_reqs]
    num_keys_ptr,
    num_heads,
    num_kv_heads,
    block_size,
    scale_log2,
    max_keys,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sum of the weights of one request's rows, for BLOCK_KEYS keys that no other program writes."""
    req_idx = tl.program_id(1)
    first_key = tl.program_id(0) * BLOCK_KEYS
    start = tl.load(query_start_loc_ptr + req_idx)
    end = tl.load(query_start_loc_ptr + req_idx + 1)
    num_keys = tl.minimum(tl.load(num_keys_ptr + req_idx), max_keys)
    if (start == end) | (first_key >= num_keys):
        return
    # Keys behind the last query may not be in the cache yet: they are neither read nor written.
    last_pos = tl.full([BLOCK_ROWS], -1, tl.int32)
    for first_query in range(start, end, BLOCK_ROWS):
        query = first_query + tl.arange(0, BLOCK_ROWS)
        last_pos = tl.maximum(last_pos, tl.load(query_pos_ptr + query, mask=query < end, other=-1))
    num_keys = tl.minimum(num_keys, tl.max(last_pos, axis=0) + 1)
    if first_key >= num_keys:
        return

    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_DIM
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    key_mask = keys < num_keys
    num_rows = (end - start) * GROUP
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    for kv_head in range(num_kv_heads):
        k = _key_tile(
            block_table_ptr + req_idx.to(tl.int64) * block_table_stride,
            key_cache_ptr + kv_head * key_head_stride, key_block_stride, key_slot_stride, key_dim_stride,
            block_size, keys, key_mask, dims, dim_mask,
        )  # fmt: skip
        for first_row in range(0, num_rows, BLOCK_ROWS):
            row = first_row + tl.arange(0, BLOCK_ROWS)
            row_mask = row < num_rows
            query = start + row // GROUP
            head = kv_head * GROUP + row % GROUP
            pos = tl.load(query_pos_ptr + query, mask=row_mask, other=-1)
            q = _row_tile(
                query_ptr, query_stride, query_head_stride, query_dim_stride, query, head, row_mask, dims, dim_mask
            )  # fmt: skip
            shift_ptrs = row_shift_ptr + query.to(tl.int64) * row_shift_stride + head * row_shift_head_stride
            shift = tl.load(shift_ptrs, mask=row_mask, other=0.0)
            if row_factor_ptr is None:
                shift *= 1.4426950408889634
            if WIDEN:
                logits = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="tf32x3")
            else:
                logits = tl.dot(q, k)
            seen = keys[None, :] <= pos[:, None]
            weights = tl.exp2(tl.where(seen, logits * scale_log2 - shift[:, None], float("-inf")))
            if row_factor_ptr is not None:
                factor = tl.load(row_factor_ptr + query.to(tl.int64) * num_heads + head, mask=row_mask, other=0.0)
                weights *= factor[:, None]
            elif query_weight_ptr is not None:
                weights *= tl.load(query_weight_ptr + query, mask=row_mask, other=0.0)[:, None]
            total += tl.sum(weights, axis=0)
    out_ptrs = out_ptr + tl.load(out_row_ptr + req_idx).to(tl.int64) * out_stride + keys
    tl.store(out_ptrs, tl.load(out_ptrs, mask=key_mask, other=0.0) + total, mask=key_mask)


def guidance_scores(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    query_pos: Tensor,
    out: Tensor,
    out_row: Tensor,
    num_keys: Tensor,
    scale: float,
    *,
    query_weight: Tensor | None = None,
    lse: Tensor | None = None,
    max_queries_per_req: int | None = None,
    impl: Impl = "auto",
) -> None:
    """Add to `out` the softmax attention weight that each key receives, summed over the guiding queries and all heads.

    SpecVLM's guidance (eq. 4-5), for one layer and one chunk of the prompt: out[out_row[r], j] += sum over the queries
    i of request r and the heads h of softmax_j(scale * q_ih . k_jh), over all keys 0..query_pos[i], video or not.
    Layers and chunks accumulate; the caller zeroes `out` and divides by layers * heads * queries for the mean.

    Args:
        query: float32, bfloat16 or float16 [num_queries, num_heads, head_dim], any strides: the guiding text queries
            only, after rotary embedding, requests in order.
        key_cache: float [num_blocks, block_size, num_kv_heads, head_dim], any strides (a permuted view is fine).
            Nothing outside a request's keys 0..query_pos is used, whatever it holds.
        block_table: int32 [num_reqs, max_blocks], unit stride in its rows; covers every query_pos.
        query_start_loc: int32 [num_reqs + 1], first query row of each request; a request may have none.
        query_pos: int32 [num_queries] >= 0, index of each query in its sequence; it sees keys 0..query_pos.
        out: In and out, float32 [num_out_rows, max_keys], unit stride in its rows.
        out_row: int32 or int64 [num_reqs], accumulator row of each request; two requests with queries may not share
            one. Those of requests without queries are not read.
        num_keys: int32 [num_reqs]; only keys below it (and below max_keys) are written, which changes no weight.
        scale: Factor of the logits, as in the model's attention.
        query_weight: float32 [num_queries], factor of each query's weights; 1 where None.
        lse: float32 [num_queries, num_heads], any strides: log of the sum of exp(scale * q . k) over a row's keys, as
            fused attention computes it on its way. Saves the GPU the pass that finds it.
        max_queries_per_req: Host-known bound of a request's queries, which makes the grid smaller; num_queries if None.
        impl: See `dispatch.use_triton`. The kernels never synchronise with the host; the torch path reads the lengths.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    num_queries, num_heads, head_dim = query.shape
    device = query.device
    num_reqs = block_table.shape[0]
    assert query.dtype in _DTYPES and key_cache.dtype in _DTYPES, f"query {query.dtype}, key_cache {key_cache.dtype}"
    assert key_cache.ndim == 4 and key_cache.device == device, f"key_cache: {list(key_cache.shape)}"
    assert key_cache.shape[3] == head_dim, f"key_cache: head_dim {key_cache.shape[3]}, query's is {head_dim}"
    assert num_heads % key_cache.shape[2] == 0, f"key_cache: {key_cache.shape[2]} KV heads for {num_heads} heads"
    assert block_table.dtype == torch.int32 and block_table.device == device and block_table.ndim == 2, "block_table"
    assert block_table.shape[1] <= 1 or block_table.stride(1) == 1, "block_table: expected unit stride in a row"
    check_vector("query_start_loc", query_start_loc, torch.int32, device, num_reqs + 1)
    check_vector("query_pos", query_pos, torch.int32, device, num_queries)
    assert out.dtype == torch.float32 and out.device == device and out.ndim == 2, "out"
    assert out.shape[1] <= 1 or out.stride(1) == 1, "out: expected unit stride in a row"
    assert out_row.dtype in (torch.int32, torch.int64), f"out_row: expected int32 or int64, got {out_row.dtype}"
    check_vector("out_row", out_row, out_row.dtype, device, num_reqs)
    check_vector("num_keys", num_keys, torch.int32, device, num_reqs)
    if query_weight is not None:
        check_vector("query_weight", query_weight, torch.float32, device, num_queries)
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.device == device, f"lse: {lse.dtype} on {lse.device}"
        assert lse.shape == (num_queries, num_heads), f"lse: {list(lse.shape)} for {num_queries} queries"
    if num_queries == 0 or num_reqs == 0 or out.shape[1] == 0:
        return
    launch = _launch if use_triton(impl, device) else _guidance_scores_torch
    launch(
        query, key_cache, block_table, query_start_loc, query_pos, out, out_row, num_keys, scale, query_weight, lse,
        max_queries_per_req or num_queries,
    )  # fmt: skip


def _launch(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    query_pos: Tensor,
    out: Tensor,
    out_row: Tensor,
    num_keys: Tensor,
    scale: float,
    query_weight: Tensor | None,
    lse: Tensor | None,
    max_queries_per_req: int,
) -> None:
    """Launch both passes, or the second alone; the grids come from shapes alone."""
    _, num_heads, head_dim = query.shape
    num_reqs = block_table.shape[0]
    _, block_size, num_kv_heads, _ = key_cache.shape
    # Products of float32, or of two dtypes, keep float32's precision. bfloat16 is widened where a CPU tensor shows that
    # this is the interpreter, whose dot multiplies bfloat16's bit patterns as integers.
    interpreted_bf16 = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    widen = query.dtype == torch.float32 or query.dtype != key_cache.dtype or interpreted_bf16
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
    scale_log2 = scale * _LOG2E
    shift, factor = lse, None
    if shift is None:
        shift, factor = _row_stats(query, key_cache, block_table, inputs, scale_log2, max_queries_per_req, tiles)
        if query_weight is not None:
            factor *= query_weight[: len(query), None]
            query_weight = None
    launcher(_guidance_scores_kernel, (triton.cdiv(out.shape[1], _BLOCK_KEYS), num_reqs), query.device)(
        *inputs, shift, *shift.stride(), factor, query_weight, out, out.stride(0), out_row, num_keys, num_heads,
        num_kv_heads, block_size, scale_log2, out.shape[1], **tiles,
    )  # fmt: skip


def _row_stats(
    query: Tensor, key_cache: Tensor, block_table: Tensor, inputs: tuple, scale_log2: float, max_queries_per_req: int,
    tiles: dict[str, int],
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
        *inputs, row_max, row_sum, row_max.stride(0), num_heads, num_row_tiles, num_splits, block_size, scale_log2,
        **tiles,
    )  # fmt: skip
    # Splits without keys hold (-inf, 0) and add nothing.
    top = row_max.amax(dim=0)
    return top, (row_sum * torch.exp2(row_max - top)).sum(dim=0).reciprocal_()


def _guidance_scores_torch(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    query_pos: Tensor,
    out: Tensor,
    out_row: Tensor,
    num_keys: Tensor,
    scale: float,
    query_weight: Tensor | None,
    lse: Tensor | None,
    max_queries_per_req: int,
) -> None:
    """Do the same with matrix products over strips of whole rows: each logit is computed once, not twice.

    Holds one KV head's keys in float32 and two strips of _STRIP_ENTRIES (or one row, if that is longer).
    """
    head_dim = query.shape[2]
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = query.shape[1] // num_kv_heads
    bounds = query_start_loc.tolist()
    for req_idx, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        pos = query_pos[start:end].repeat_interleave(group)  # [rows]: a query's heads, then the next query's
        first_limit, num_seen = int(pos.min()) + 1, int(pos.max()) + 1
        num_written = min(int(num_keys[req_idx]), out.shape[1], num_seen)
        if num_written <= 0:
            continue
        hidden = torch.arange(first_limit, num_seen, device=pos.device) > pos[:, None]  # [rows, num_seen - first_limit]
        blocks = block_table[req_idx, : triton.cdiv(num_seen, block_size)]
        sums = out[out_row[req_idx], :num_written]
        factor = query.new_ones(len(pos), dtype=torch.float32)
        if query_weight is not None:
            factor = query_weight[start:end].repeat_interleave(group)
        strip = max(1, min(_STRIP_ENTRIES // num_seen, len(pos)))
        logits = query.new_empty(strip, num_seen, dtype=torch.float32)
        weights = torch.empty_like(logits)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            # [head_dim, keys]: of a cache that holds blocks as [head_dim, block_size], this order copies fastest.
            keys = key_cache[:, :, kv_head].transpose(1, 2).index_select(0, blocks).permute(1, 0, 2)
            keys = keys.reshape(head_dim, -1)[:, :num_seen].to(torch.float32)
            rows = query[start:end, heads].reshape(-1, head_dim)
            rows = rows.to(torch.float32) * scale
            for top in range(0, len(pos), strip):
                size = min(strip, len(pos) - top)
                torch.mm(rows[top : top + size], keys, out=logits[:size])
                logits[:size, first_limit:].masked_fill_(hidden[top : top + size], float("-inf"))
                if lse is None:
                    torch.softmax(logits[:size], dim=1, out=weights[:size])
                else:
                    shift = lse[start:end, heads].reshape(-1, 1)[top : top + size]
                    torch.exp(logits[:size] - shift, out=weights[:size])
                sums += factor[top : top + size] @ weights[:size, :num_written]


def guidance_scores_reference(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    query_pos: Tensor,
    out: Tensor,
    out_row: Tensor,
    num_keys: Tensor,
    scale: float,
    *,
    query_weight: Tensor | None = None,
) -> None:
    """Do what `guidance_scores` does, holding every weight: the specification. Computes in the inputs' dtype."""
    group = query.shape[1] // key_cache.shape[2]
    for req_idx in range(block_table.shape[0]):
        chosen = slice(int(query_start_loc[req_idx]), int(query_start_loc[req_idx + 1]))
        pos = query_pos[chosen]
        if len(pos) == 0:
            continue
        index = torch.arange(int(pos.max()) + 1, device=query.device)  # [keys]
        block = block_table[req_idx].to(torch.int64)[index // key_cache.shape[1]]
        keys = key_cache[block, index % key_cache.shape[1]].repeat_interleave(group, dim=1)  # [keys, num_heads, D]
        logits = torch.einsum("qhd,khd->qhk", query[chosen], keys) * scale
        logits = logits.masked_fill(index > pos[:, None, None], float("-inf"))
        weights = logits.softmax(dim=-1)  # [queries, num_heads, keys]
        if query_weight is not None:
            weights = weights * query_weight[chosen, None, None]
        size = min(int(num_keys[req_idx]), out.shape[1], len(index))
        out[out_row[req_idx], :size] += weights.sum(dim=(0, 1))[:size]
