"""The kernels of `guidance_scores`: softmax statistics of every row, then column sums."""

import triton
import triton.language as tl

from vidspec_kernels.float8 import as_float, scaled


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


_STRIDES, _SCALES = ("query_scale_stride", "key_scale_stride"), ["query_scale_ptr", "key_scale_ptr"]


@triton.jit(
    do_not_specialize=["stats_split_stride", "num_row_tiles", "num_splits", *_STRIDES],
    do_not_specialize_on_alignment=_SCALES,
)
def _row_stats_kernel(
    query_ptr, query_stride, query_head_stride, query_dim_stride,  # [num_queries, num_heads, HEAD_DIM]
    # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    key_cache_ptr, key_block_stride, key_slot_stride, key_head_stride, key_dim_stride,
    block_table_ptr, block_table_stride,  # [num_reqs, max_blocks]
    query_start_loc_ptr,  # [num_reqs + 1]
    query_pos_ptr,  # [num_queries]
    row_max_ptr, row_sum_ptr, stats_split_stride,  # [num_splits, num_queries, num_heads]
    # [num_kv_heads] each, or None
    query_scale_ptr, query_scale_stride, key_scale_ptr, key_scale_stride,
    num_heads, num_row_tiles, num_splits, block_size, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
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

    scale_log2 = scaled(scale_log2, query_scale_ptr, query_scale_stride, kv_head)
    scale_log2 = scaled(scale_log2, key_scale_ptr, key_scale_stride, kv_head)
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
        if not WIDEN:
            k = as_float(k, q.dtype)
        if WIDEN:
            logits = tl.dot(q.to(tl.float32), as_float(k, tl.float32), input_precision="tf32x3")
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


@triton.jit(
    do_not_specialize=["out_stride", "max_keys", "row_shift_head_stride", *_STRIDES],
    do_not_specialize_on_alignment=_SCALES,
)
def _guidance_scores_kernel(
    query_ptr, query_stride, query_head_stride, query_dim_stride,  # [num_queries, num_heads, HEAD_DIM]
    # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    key_cache_ptr, key_block_stride, key_slot_stride, key_head_stride, key_dim_stride,
    block_table_ptr, block_table_stride,  # [num_reqs, max_blocks]
    query_start_loc_ptr,  # [num_reqs + 1]
    query_pos_ptr,  # [num_queries]
    # [num_queries, num_heads]: maxima of logits times log2 e, or where there is no factor log-sum-exps
    row_shift_ptr, row_shift_stride, row_shift_head_stride,
    row_factor_ptr,  # [num_queries, num_heads], 1 / sum; or None
    out_ptr, out_stride,  # [num_out_rows, max_keys]
    out_row_ptr, num_keys_ptr,  # [num_reqs]
    # [num_kv_heads] each, or None
    query_scale_ptr, query_scale_stride, key_scale_ptr, key_scale_stride,
    num_heads, num_kv_heads, block_size, scale_log2, max_keys,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
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
        if not WIDEN:
            k = as_float(k, query_ptr.dtype.element_ty)
        head_scale_log2 = scaled(scale_log2, query_scale_ptr, query_scale_stride, kv_head)
        head_scale_log2 = scaled(head_scale_log2, key_scale_ptr, key_scale_stride, kv_head)
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
                logits = tl.dot(q.to(tl.float32), as_float(k, tl.float32), input_precision="tf32x3")
            else:
                logits = tl.dot(q, k)
            seen = keys[None, :] <= pos[:, None]
            weights = tl.exp2(tl.where(seen, logits * head_scale_log2 - shift[:, None], float("-inf")))
            if row_factor_ptr is not None:
                factor = tl.load(row_factor_ptr + query.to(tl.int64) * num_heads + head, mask=row_mask, other=0.0)
                weights *= factor[:, None]
            total += tl.sum(weights, axis=0)
    out_ptrs = out_ptr + tl.load(out_row_ptr + req_idx).to(tl.int64) * out_stride + keys
    tl.store(out_ptrs, tl.load(out_ptrs, mask=key_mask, other=0.0) + total, mask=key_mask)
