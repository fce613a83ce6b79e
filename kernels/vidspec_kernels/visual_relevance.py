"""visual_relevance: the largest cosines between text rows and the stored video rows of their request, and their mean.

One pass over a paged store of unit rows (flash-decoding style: a request's tiles are dealt to many programs), the
largest values kept in registers; the cosines themselves are never held. Each element of the result has one owner and
depends on values alone, not on an order of summation over tiles: equal inputs give equal bits.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.bitonic import largest, merge_groups
from vidspec_kernels.dispatch import (
    DeviceLimits,
    Impl,
    array_module,
    as_array,
    check_vector,
    device_limits,
    launcher,
    on_host,
    shared_bytes_per_program,
    use_triton,
)

MAX_TOP_N = 128
MAX_QUERIES = 128
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
_MERGE_ENTRIES = 4096
_MERGE_DIM = 1024
_BLOCK_REQS = 256
# float32 copies of store_states.
_CHUNK_ROWS = 1024
# float32 elements of stored rows that the reference holds at once: they stay near the core.
STRIP_ENTRIES = 2**20
_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORE_DTYPES = (*_QUERY_DTYPES, torch.float8_e4m3fn)
_FP8_MAX = 448.0
_FP8_CAPABILITY = 89


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
    # [num_rows, HIDDEN]
    queries_ptr,
    queries_stride,
    # [R + 1]
    cu_num_logits_ptr,
    # [R]
    rows_ptr,
    # [num_store_blocks, BLOCK_ROWS, HIDDEN], contiguous
    store_ptr,
    # [num_store_blocks]
    block_fill_ptr,
    # [max_reqs, >= max_blocks]
    block_table_ptr,
    block_table_stride,
    # [max_reqs]
    num_blocks_ptr,
    # [num_rows, num_splits, 2 ** LOG_TOP]
    part_ptr,
    max_queries,
    top_n,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    LOG_QUERIES: tl.constexpr,
    LOG_MORE: tl.constexpr,
    LOG_KEYS: tl.constexpr,
    LOG_TOP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
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
    # [num_rows, num_splits, 2 ** LOG_TOP]
    part_ptr,
    # [num_rows, HIDDEN]
    queries_ptr,
    queries_stride,
    # [R + 1]
    cu_num_logits_ptr,
    # [R]
    rows_ptr,
    # [max_reqs]
    num_blocks_ptr,
    # [num_rows, top_n]
    out_ptr,
    unscale,
    num_reqs,
    num_splits,
    max_queries,
    top_n,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    LOG_TOP: tl.constexpr,
    LOG_ENTRIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
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
    # [NUM_SHARDS, num_rows, top_n], unit stride in top_n
    partials_ptr,
    shard_stride,
    row_stride,
    # [num_rows]
    out_ptr,
    top_n,
    NUM_SHARDS: tl.constexpr,
    LOG_ENTRIES: tl.constexpr,
    LOG_TOP: tl.constexpr,
):
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


def storage_scale(dtype: torch.dtype, hidden_size: int) -> float:
    """Return the factor by which a store of this dtype holds unit rows.

    Args:
        dtype: float32, bfloat16, float16 or float8_e4m3fn.
        hidden_size: Elements of a row.

    Returns:
        1, but sqrt(hidden_size) for float8_e4m3fn: the elements of a unit row are about 1 / sqrt(hidden_size), below
        that format's normal range, and times it about 1; none can exceed it.

    Raises:
        AssertionError: The dtype is another one, or a row's largest possible element exceeds float8_e4m3fn's range.
    """
    assert dtype in _STORE_DTYPES, f"store dtype {dtype}"
    if dtype != torch.float8_e4m3fn:
        return 1.0
    scale = math.sqrt(hidden_size)
    assert scale <= _FP8_MAX, f"hidden_size {hidden_size}: sqrt exceeds {_FP8_MAX}"
    return scale


def store_states(states: Tensor, source: Tensor, slots: Tensor, store: Tensor) -> None:
    """Write chosen rows, normalised in float32 and times `storage_scale`, to slots of the store.

    Args:
        states: float [T, d], hidden states of one forward; not changed.
        source: int64 [n], the rows to store.
        slots: int64 [n], row of `store.view(-1, d)` that each goes to; no two may be equal.
        store: Out, float32, bfloat16, float16 or float8_e4m3fn [num_store_blocks, block_rows, d], contiguous. A row of
            zeros stays zeros. Other rows are left alone.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    hidden_size, device = states.shape[1], states.device
    scale = storage_scale(store.dtype, hidden_size)
    assert store.ndim == 3 and store.shape[2] == hidden_size, f"store: {list(store.shape)} for rows of {hidden_size}"
    assert store.is_contiguous() and store.device == device, f"store: expected contiguous on {device}"
    check_vector("source", source, torch.int64, device)
    check_vector("slots", slots, torch.int64, device)
    assert source.shape == slots.shape, f"source: {source.shape[0]} entries, slots: {slots.shape[0]}"
    lines = _bytes_of_fp8(store).view(-1, hidden_size)
    for chosen, goal in zip(source.split(_CHUNK_ROWS), slots.split(_CHUNK_ROWS), strict=True):
        lines.index_copy_(0, goal, _bytes_of_fp8((_unit(states[chosen]) * scale).to(store.dtype)))


def _bytes_of_fp8(tensor: Tensor) -> Tensor:
    """Return float8 as bytes, which every index operation of every device takes; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _unit(rows: Tensor) -> Tensor:
    """Return rows over their norms in float32, zeros for zeros."""
    wide = rows.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * torch.where(norm > 0, 1 / norm, 0.0)


def visual_relevance(
    queries: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    store: Tensor,
    block_fill: Tensor,
    block_table: Tensor,
    num_blocks: Tensor,
    top_n: int,
    max_queries: int,
    max_blocks: int,
    impl: Impl = "auto",
) -> Tensor:
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
        impl: See `dispatch.use_triton`. Neither path synchronises with the host.

    Returns:
        float32 [num_rows, top_n], descending, -inf where there are fewer video tokens and in rows of no request.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
        ValueError: The store is float8_e4m3fn on a GPU of a compute capability below 8.9.
    """
    _check(queries, cu_num_logits, rows, store, block_fill, block_table, num_blocks, top_n, max_queries, max_blocks)
    if queries.shape[0] == 0 or rows.shape[0] == 0 or max_queries == 0 or max_blocks == 0:
        return queries.new_full((queries.shape[0], top_n), float("-inf"), dtype=torch.float32)
    run = _launch if use_triton(impl, queries.device) else on_host(impl, queries.device, visual_relevance_reference)
    return run(queries, cu_num_logits, rows, store, block_fill, block_table, num_blocks, top_n, max_queries, max_blocks)


def _check(
    queries: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    store: Tensor,
    block_fill: Tensor,
    block_table: Tensor,
    num_blocks: Tensor,
    top_n: int,
    max_queries: int,
    max_blocks: int,
) -> None:
    """Assert what `visual_relevance` says of its arguments."""
    device, num_reqs = queries.device, rows.shape[0]
    assert queries.dtype in _QUERY_DTYPES and queries.ndim == 2, f"queries: {queries.dtype} {list(queries.shape)}"
    assert queries.numel() == 0 or queries.shape[1] == 1 or queries.stride(1) == 1, (
        "queries: expected unit stride in a row"
    )
    check_vector("rows", rows, torch.int64, device)
    check_vector("cu_num_logits", cu_num_logits, torch.int32, device)
    assert cu_num_logits.shape[0] == num_reqs + 1, f"cu_num_logits: {cu_num_logits.shape[0]} entries, rows: {num_reqs}"
    assert store.dtype in _STORE_DTYPES and store.ndim == 3, f"store: {store.dtype} {list(store.shape)}"
    assert store.shape[2] == queries.shape[1], f"store: rows of {store.shape[2]}, queries of {queries.shape[1]}"
    block_rows = store.shape[1]
    assert block_rows > 0 and block_rows & (block_rows - 1) == 0, f"store: blocks of {block_rows} rows"
    assert store.is_contiguous() and store.device == device, f"store: expected contiguous on {device}"
    check_vector("block_fill", block_fill, torch.int32, device, store.shape[0])
    check_vector("num_blocks", num_blocks, torch.int32, device)
    assert block_table.dtype == torch.int32 and block_table.device == device and block_table.ndim == 2, "block_table"
    assert block_table.shape[0] == num_blocks.shape[0], f"block_table: {block_table.shape[0]} rows"
    assert block_table.shape[1] <= 1 or block_table.stride(1) == 1, "block_table: expected unit stride in a row"
    assert 0 <= max_blocks <= block_table.shape[1], f"max_blocks {max_blocks}, block_table: {list(block_table.shape)}"
    assert 1 <= top_n <= MAX_TOP_N, f"top_n {top_n}"
    assert 0 <= max_queries <= MAX_QUERIES, f"max_queries {max_queries}"


@dataclass(frozen=True)
class _Tile:
    """How a launch deals its work to programs.

    Attributes:
        constants: Of the kernel.
        options: Of the compiler.
        num_groups: Programs that share the queries of a request, each over all of its stored rows.
        programs_per_sm: How many programs a multiprocessor holds.
    """

    constants: dict[str, int | bool | None]
    options: dict[str, int]
    num_groups: int
    programs_per_sm: int


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
    interpreted: bool,
) -> _Tile:  # fmt: skip
    """Return the tiles of a launch: the same for videos of any length."""
    # Products of float32, or of two dtypes, keep float32's precision, but float8 becomes any of them exactly. bfloat16
    # is widened in the interpreter, whose dot multiplies bfloat16's bit patterns as integers.
    mixed = store_dtype not in (query_dtype, torch.float8_e4m3fn)
    widen = query_dtype == torch.float32 or mixed or (interpreted and query_dtype == torch.bfloat16)
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


def _launch(
    queries: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    store: Tensor,
    block_fill: Tensor,
    block_table: Tensor,
    num_blocks: Tensor,
    top_n: int,
    max_queries: int,
    max_blocks: int,
) -> Tensor:
    """Launch both kernels; the grids come from shapes and bounds alone."""
    limits = device_limits(queries.device)
    if store.dtype == torch.float8_e4m3fn and limits.capability < _FP8_CAPABILITY:
        raise ValueError("a float8 store needs compute capability 8.9 (Ada) or later: store bfloat16")
    (num_rows, hidden_size), num_reqs, block_rows = queries.shape, rows.shape[0], store.shape[1]
    # Two at least: a single entry would be a tensor without axes.
    log_top = max(1, (top_n - 1).bit_length())
    tile = _tile(queries.dtype, store.dtype, max_queries, log_top, limits, queries.device.type == "cpu")
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


def visual_relevance_reference(
    queries: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    store: Tensor,
    block_fill: Tensor,
    block_table: Tensor,
    num_blocks: Tensor,
    top_n: int,
    max_queries: int,
    max_blocks: int,
) -> Tensor:
    """Do what `visual_relevance` does, by batched products of whole requests, padded: the specification.

    Same arguments and result; indices in numpy or torch. Holds cosines and a float32 copy of the stored rows of as many
    requests as have STRIP_ENTRIES elements, or of one.
    """
    xp = array_module(queries.device)
    (num_rows, hidden_size), num_reqs, block_rows = queries.shape, rows.shape[0], store.shape[1]
    row, column, slot = (as_array(torch.arange(n, device=queries.device)) for n in (num_rows, max_blocks, block_rows))
    bounds, state_row = as_array(cu_num_logits), as_array(rows)
    req_idx = xp.searchsorted(bounds[1:], row, side="right")  # R for rows of no request
    local = row - bounds[req_idx]
    inside = (req_idx < num_reqs) & (local >= 0) & (local < max_queries)  # [num_rows]
    # The last entry takes the rows of no request.
    at = torch.as_tensor(xp.where(inside, req_idx * max_queries + local, num_reqs * max_queries))
    units = queries.new_zeros(num_reqs * max_queries + 1, hidden_size, dtype=torch.float32)
    units.index_copy_(0, at, _unit(queries))
    units = units[:-1].view(num_reqs, max_queries, hidden_size)

    listed = column < as_array(num_blocks)[state_row][:, None]  # [R, max_blocks]
    blocks = xp.where(listed, as_array(block_table)[state_row][:, :max_blocks], 0)
    fill = xp.where(listed, as_array(block_fill)[blocks], 0)
    invalid = torch.as_tensor(slot >= fill[:, :, None]).view(num_reqs, 1, -1)  # [R, 1, max_blocks * block_rows]
    blocks = torch.as_tensor(blocks)
    top = queries.new_full((num_reqs * max_queries + 1, top_n), float("-inf"), dtype=torch.float32)
    num_keys = max_blocks * block_rows
    size = min(top_n, num_keys)
    strips = top[:-1].view(num_reqs, max_queries, top_n)
    per_strip = max(1, STRIP_ENTRIES // (num_keys * hidden_size))
    for first in range(0, num_reqs, per_strip):
        chosen = slice(first, first + per_strip)
        keys = _bytes_of_fp8(store).index_select(0, blocks[chosen].reshape(-1)).view(store.dtype)
        keys = keys.to(torch.float32).view(-1, num_keys, hidden_size)
        cosines = torch.bmm(units[chosen], keys.transpose(1, 2))
        # By selection: whatever is stored behind a block's valid rows, NaN included, is not used.
        cosines.masked_fill_(invalid[chosen], float("-inf"))
        strips[chosen, :, :size] = cosines.topk(size, dim=2).values
    scale = storage_scale(store.dtype, hidden_size)
    return top.index_select(0, at) if scale == 1 else top.index_select(0, at) / scale


def merge_relevance(partials: Tensor, impl: Impl = "auto") -> Tensor:
    """Return the visual relevance of each row: the mean of the top_n largest cosines over all shards (eq. 7-8).

    Args:
        partials: float32 [num_shards, num_rows, top_n], unit stride in a row, results of `visual_relevance` on disjoint
            parts of the video tokens: descending, -inf where there are none.
        impl: See `dispatch.use_triton`. Neither path synchronises with the host.

    Returns:
        float32 [num_rows]; the mean of all there are where they are fewer than top_n, 0 where there is none, NaN where
        a shard has NaN. The sum runs over descending values, so equal cosines give equal bits however they are dealt to
        shards.

    Raises:
        AssertionError: The dtype or the shape is not as above.
    """
    assert partials.dtype == torch.float32 and partials.ndim == 3, f"partials: {partials.dtype} {list(partials.shape)}"
    num_shards, num_rows, top_n = partials.shape
    assert num_shards >= 1 and top_n >= 1, f"partials: {list(partials.shape)}"
    assert top_n == 1 or partials.stride(2) == 1, "partials: expected unit stride in a row"
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


def _merge_relevance_torch(partials: Tensor) -> Tensor:
    """Do the same with torch."""
    num_shards, _, top_n = partials.shape
    if num_shards == 1:
        top = partials[0].contiguous()
    else:
        top = partials.transpose(0, 1).flatten(1).topk(top_n, dim=1).values
    exists = top != float("-inf")
    return top.where(exists, 0.0).sum(dim=1) / exists.sum(dim=1).clamp_(min=1)
