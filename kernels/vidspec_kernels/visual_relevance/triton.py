"""The kernels of `visual_relevance`: the largest products of shares of a request's rows, their merge, and the mean."""

import triton
import triton.language as tl

from vidspec_kernels.bitonic import largest, merge_groups


@triton.jit
def _share(num_keys, num_splits, LEAST: tl.constexpr):
    """Return how many stored rows each split of a request takes: the same number, however many there are."""
    return tl.maximum(tl.cdiv(num_keys, num_splits), LEAST)


@triton.jit
def _better(best, acc, valid, top_n, LOG_QUERIES: tl.constexpr, LOG_KEYS: tl.constexpr, LOG_TOP: tl.constexpr):
    """Return the largest of `best` [queries, top] and of a tile's products [keys, queries], in order."""
    products = tl.trans(tl.where(valid[:, None], acc, float("-inf")))
    # Later tiles seldom hold a value that counts.
    least = tl.min(tl.where((tl.arange(0, 2**LOG_TOP) < top_n)[None, :], best, float("inf")), axis=1)
    if tl.max((products > least[:, None]).to(tl.int32)) > 0:
        cube = tl.reshape(products, [2] * (LOG_QUERIES + LOG_KEYS))
        found = largest(cube, LOG_QUERIES + LOG_KEYS, LOG_KEYS, LOG_TOP, 0, False)
        both = tl.maximum(tl.reshape(best, [2] * (LOG_QUERIES + LOG_TOP)), found)
        best = tl.reshape(merge_groups(both, LOG_QUERIES + LOG_TOP, LOG_TOP, 1), [2**LOG_QUERIES, 2**LOG_TOP])
    return best


@triton.jit
def _multiply(acc, k, query_ptrs, mask, WIDEN: tl.constexpr):
    """Add the products of stored rows [keys, dims] and queries [queries, dims] to `acc` [keys, queries]."""
    q = tl.load(query_ptrs, mask=mask, other=0.0)
    if WIDEN:
        return tl.dot(k.to(tl.float32), tl.trans(q).to(tl.float32), acc, input_precision="ieee")
    return tl.dot(k.to(q.dtype), tl.trans(q), acc)


@triton.jit(
    do_not_specialize=["max_queries", "top_n"], do_not_specialize_on_alignment=["cu_num_logits_ptr", "rows_ptr"]
)
def _visual_relevance_kernel(
    queries_ptr, queries_stride,  # [num_rows, HIDDEN]
    cu_num_logits_ptr,  # [R + 1]
    rows_ptr,  # [R]
    store_ptr,  # [num_store_blocks, BLOCK_ROWS, HIDDEN], contiguous
    block_fill_ptr,  # [num_store_blocks]
    block_table_ptr, block_table_stride,  # [max_reqs, >= max_blocks]
    num_blocks_ptr,  # [max_reqs]
    part_ptr,  # [num_rows, num_splits, 2 ** LOG_TOP]
    max_queries, top_n,
    HIDDEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, LEAST_SHARE: tl.constexpr, LOG_QUERIES: tl.constexpr,
    LOG_MORE: tl.constexpr, LOG_KEYS: tl.constexpr, LOG_TOP: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Largest products of a group of one request's queries with one share of its stored rows, not yet cosines.

    Queries are 2 ** LOG_QUERIES and, where LOG_MORE is not None, 2 ** LOG_MORE more.
    """
    BLOCK_KEYS: tl.constexpr = 2**LOG_KEYS
    TOP: tl.constexpr = 2**LOG_TOP
    HAS_MORE: tl.constexpr = LOG_MORE is not None
    LOG_REST: tl.constexpr = LOG_MORE if HAS_MORE else 0
    req_idx = tl.program_id(0) // NUM_GROUPS
    group_start = tl.program_id(0) % NUM_GROUPS * (2**LOG_QUERIES + HAS_MORE * 2**LOG_REST)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    start = tl.load(cu_num_logits_ptr + req_idx)
    num_queries = tl.minimum(tl.load(cu_num_logits_ptr + req_idx + 1) - start, max_queries) - group_start
    start += group_start
    req_state_idx = tl.load(rows_ptr + req_idx)
    num_keys = tl.load(num_blocks_ptr + req_state_idx) * BLOCK_ROWS
    share = _share(num_keys, num_splits, LEAST_SHARE)
    first = split * share
    last = tl.minimum(first + share, num_keys)
    if (num_queries <= 0) | (first >= last):
        return
    block_table_ptr += req_state_idx * block_table_stride

    dims = tl.arange(0, BLOCK_DIM)
    query = tl.arange(0, 2**LOG_QUERIES)
    more = 2**LOG_QUERIES + tl.arange(0, 2**LOG_REST)
    query_ptrs = queries_ptr + (start + query).to(tl.int64)[:, None] * queries_stride + dims[None, :]
    more_ptrs = queries_ptr + (start + more).to(tl.int64)[:, None] * queries_stride + dims[None, :]
    best = tl.full([2**LOG_QUERIES, TOP], float("-inf"), tl.float32)
    best_more = tl.full([2**LOG_REST, TOP], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_KEYS, 2**LOG_QUERIES], tl.float32)
    acc_more = tl.zeros([BLOCK_KEYS, 2**LOG_REST], tl.float32)
    valid = tl.zeros([BLOCK_KEYS], tl.int1)
    key_ptrs = store_ptr + tl.zeros([BLOCK_KEYS], tl.int64)[:, None] + dims[None, :]
    # One loop over tiles and their chunks: copies of the next tile are on their way while one is selected from.
    NUM_CHUNKS: tl.constexpr = (HIDDEN + BLOCK_DIM - 1) // BLOCK_DIM
    for step in range(tl.cdiv(last - first, BLOCK_KEYS) * NUM_CHUNKS):
        chunk = step % NUM_CHUNKS
        if chunk == 0:
            entry = first + step // NUM_CHUNKS * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            listed = entry < last
            block = tl.load(block_table_ptr + entry // BLOCK_ROWS, mask=listed, other=0)
            # Of a block that is not full the rest is from an earlier request: neither read nor counted.
            valid = entry % BLOCK_ROWS < tl.load(block_fill_ptr + block, mask=listed, other=0)
            # int64 before the product: a row's offset passes 2**31 in a large store.
            row = block.to(tl.int64) * BLOCK_ROWS + entry % BLOCK_ROWS
            key_ptrs = store_ptr + row[:, None] * HIDDEN + dims[None, :]
        dim = chunk * BLOCK_DIM
        key_mask = valid[:, None]
        query_mask = (query < num_queries)[:, None]
        more_mask = (more < num_queries)[:, None]
        if HIDDEN % BLOCK_DIM != 0:
            inside = (dim + dims < HIDDEN)[None, :]
            key_mask, query_mask, more_mask = key_mask & inside, query_mask & inside, more_mask & inside
        # Stored rows are the side of 64 that tensor cores need; there are far fewer queries.
        k = tl.load(key_ptrs + dim, mask=key_mask, other=0.0)
        acc = _multiply(acc, k, query_ptrs + dim, query_mask, WIDEN)
        if HAS_MORE:
            acc_more = _multiply(acc_more, k, more_ptrs + dim, more_mask, WIDEN)
        if chunk == NUM_CHUNKS - 1:
            best = _better(best, acc, valid, top_n, LOG_QUERIES, LOG_KEYS, LOG_TOP)
            acc = tl.zeros([BLOCK_KEYS, 2**LOG_QUERIES], tl.float32)
            if HAS_MORE:
                best_more = _better(best_more, acc_more, valid, top_n, LOG_REST, LOG_KEYS, LOG_TOP)
                acc_more = tl.zeros([BLOCK_KEYS, 2**LOG_REST], tl.float32)
    # Every second one the other way round: the merge takes them in pairs.
    column = tl.arange(0, TOP)
    goal = split.to(tl.int64) * TOP + tl.where(split % 2 == 0, column, TOP - 1 - column)
    row_stride = num_splits.to(tl.int64) * TOP
    part_ptrs = part_ptr + (start + query)[:, None] * row_stride + goal[None, :]
    tl.store(part_ptrs, best, mask=(query < num_queries)[:, None])
    if HAS_MORE:
        part_ptrs = part_ptr + (start + more)[:, None] * row_stride + goal[None, :]
        tl.store(part_ptrs, best_more, mask=(more < num_queries)[:, None])


@triton.jit(
    do_not_specialize=["num_reqs", "num_splits", "max_queries", "top_n"],
    do_not_specialize_on_alignment=["cu_num_logits_ptr", "rows_ptr"],
)
def _merge_splits_kernel(
    part_ptr,  # [num_rows, num_splits, 2 ** LOG_TOP]
    queries_ptr, queries_stride,  # [num_rows, HIDDEN]
    cu_num_logits_ptr,  # [R + 1]
    rows_ptr,  # [R]
    num_blocks_ptr,  # [max_reqs]
    out_ptr,  # [num_rows, top_n]
    unscale, num_reqs, num_splits, max_queries, top_n,
    HIDDEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, LEAST_SHARE: tl.constexpr, LOG_TOP: tl.constexpr,
    LOG_ENTRIES: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_REQS: tl.constexpr,
):  # fmt: skip
    """Merge one query's partial results and turn products into cosines; a row of no request gets -inf."""
    TOP: tl.constexpr = 2**LOG_TOP
    ENTRIES: tl.constexpr = 2**LOG_ENTRIES
    row = tl.program_id(0)
    req_idx = 0
    for first_req in range(0, num_reqs, BLOCK_REQS):
        req = first_req + tl.arange(0, BLOCK_REQS)
        end = tl.load(cu_num_logits_ptr + 1 + req, mask=req < num_reqs, other=2147483647)
        req_idx += tl.sum((end <= row).to(tl.int32))
    in_batch = req_idx < num_reqs
    start = tl.load(cu_num_logits_ptr + req_idx)
    req_state_idx = tl.load(rows_ptr + req_idx, mask=in_batch, other=0)
    num_keys = tl.load(num_blocks_ptr + req_state_idx) * BLOCK_ROWS
    in_batch = in_batch & (row >= start) & (row - start < max_queries)
    # Programs without stored rows wrote nothing.
    num_entries = tl.where(in_batch, tl.cdiv(num_keys, _share(num_keys, num_splits, LEAST_SHARE)), 0) * TOP
    part_ptr += row.to(tl.int64) * num_splits * TOP
    best = tl.full([2] * LOG_TOP, float("-inf"), tl.float32)
    for first in range(0, num_entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        products = tl.load(part_ptr + entry, mask=entry < num_entries, other=float("-inf"))
        found = largest(tl.reshape(products, [2] * LOG_ENTRIES), LOG_ENTRIES, LOG_ENTRIES, LOG_TOP, 0, True)
        best = merge_groups(tl.maximum(best, found), LOG_TOP, LOG_TOP, 1)

    queries_ptr += row.to(tl.int64) * queries_stride
    square = tl.zeros([BLOCK_DIM], tl.float32)
    for dim in range(0, HIDDEN, BLOCK_DIM):
        dims = dim + tl.arange(0, BLOCK_DIM)
        q = tl.load(queries_ptr + dims, mask=dims < HIDDEN, other=0.0).to(tl.float32)
        square += q * q
    norm = tl.sqrt(tl.sum(square))
    # A row of zeros has products 0, and keeps them.
    factor = unscale / tl.where(norm > 0.0, norm, 1.0)
    column = tl.arange(0, TOP)
    tl.store(out_ptr + row.to(tl.int64) * top_n + column, tl.reshape(best, [TOP]) * factor, mask=column < top_n)


@triton.jit(do_not_specialize=["shard_stride", "top_n"])
def _merge_relevance_kernel(
    partials_ptr, shard_stride, row_stride,  # [NUM_SHARDS, num_rows, top_n], unit stride in top_n
    out_ptr,  # [num_rows]
    top_n,
    NUM_SHARDS: tl.constexpr, LOG_ENTRIES: tl.constexpr, LOG_TOP: tl.constexpr,
):  # fmt: skip
    """Mean of one row's largest cosines over all shards, in descending order; NaN where there is one."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, 2**LOG_ENTRIES)
    shard, column = entry >> LOG_TOP, entry & (2**LOG_TOP - 1)
    inside = (shard < NUM_SHARDS) & (column < top_n)
    value = tl.load(partials_ptr + shard * shard_stride + row * row_stride + column, inside, float("-inf"))
    is_nan = value != value
    cube = tl.reshape(tl.where(is_nan, float("-inf"), value), [2] * LOG_ENTRIES)
    top = tl.reshape(largest(cube, LOG_ENTRIES, LOG_ENTRIES, LOG_TOP, 1, False), [2**LOG_TOP])
    exists = (tl.arange(0, 2**LOG_TOP) < top_n) & (top != float("-inf"))
    mean = tl.sum(tl.where(exists, top, 0.0)) / tl.maximum(tl.sum(exists.to(tl.int32)), 1)
    tl.store(out_ptr + row, tl.where(tl.max(is_nan.to(tl.int32)) > 0, float("nan"), mean))
