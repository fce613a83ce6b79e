"""tree_attention: attention of draft-tree rows over a paged KV cache: a shared prefix, then nodes chosen by bit words.

On the GPU the prefix is split over programs (flash decoding) and the parts are merged by log-sum-exp; on the CPU all
requests and heads are two batched products. Each element of the result has one owner: equal inputs give equal bits.
"""

import functools
import math
import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import (
    Impl,
    DeviceLimits,
    check_vector,
    device_limits,
    launcher,
    shared_bytes_per_program,
    use_triton,
)

# Bits of a mask word: KV entries after the prefix.
_NODES = 64
_MAX_BLOCK_ROWS = 64
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
# A split shorter than this writes about as much of its partial results as it reads of K and V.
_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 128
_PROGRAMS_PER_SM = 2
_MERGE_SPLITS = 16
# float32 logits that the reference holds at once: they stay near the core.
_STRIP_ENTRIES = 2**20
_LOG2E = 1.4426950408889634
_BITS = torch.ones(_NODES, dtype=torch.int64, device="cpu") << torch.arange(_NODES, device="cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _attend_tile(
    q, row_max, row_sum, acc, entries, entry_mask, seen, block_table_ptr,
    key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
    value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
    scale_log2, dims, dim_mask, BLOCK_SIZE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; nothing is read outside `entry_mask`, and nothing used outside `seen`."""
    # int64 before the product: a block's offset passes 2**31 in a large pool.
    block = tl.load(block_table_ptr + entries // BLOCK_SIZE, mask=entry_mask, other=0).to(tl.int64)
    slot = (entries % BLOCK_SIZE).to(tl.int64)
    key_offset = block * key_block_stride + slot * key_slot_stride
    k = tl.load(
        key_ptr + key_offset[None, :] + dims[:, None] * key_dim_stride,
        mask=entry_mask[None, :] & dim_mask[:, None], other=0.0,
    )  # fmt: skip
    if WIDEN:
        scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(q, k)
    scores = tl.where(seen, scores * scale_log2, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # Rows that have seen no entry yet keep -inf; the shift only has to be finite for them.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(weights, axis=1)
    value_offset = block * value_block_stride + slot * value_slot_stride
    v = tl.load(
        value_ptr + value_offset[:, None] + dims[None, :] * value_dim_stride,
        mask=entry_mask[:, None] & dim_mask[None, :], other=0.0,
    )  # fmt: skip
    acc = acc * correction[:, None]
    if WIDEN:
        acc = tl.dot(weights, v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return new_max, row_sum, acc


# Not a variant each: sizes that change from step to step, and vectors that are slices of others.
@triton.jit(
    do_not_specialize=["masks_stride", "max_entries", "max_queries", "num_row_tiles", "num_splits"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_ptr", "num_queries_ptr", "prefix_lens_ptr", "masks_ptr"],
)
def _tree_attention_kernel(
    # [num_tokens, num_heads, HEAD_SIZE]
    query_ptr,
    query_stride,
    query_head_stride,
    # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    key_cache_ptr,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    key_dim_stride,
    # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    value_cache_ptr,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    value_dim_stride,
    # [num_table_rows, max_entries / BLOCK_SIZE]
    block_table_ptr,
    block_table_stride,
    # [R]
    rows_ptr,
    query_start_ptr,
    num_queries_ptr,
    prefix_lens_ptr,
    # [R, >= max_queries]
    masks_ptr,
    masks_stride,
    # [num_tokens, num_heads, HEAD_SIZE], None where the prefix is computed here
    prefix_out_ptr,
    prefix_out_stride,
    prefix_out_head_stride,
    # [num_heads, num_tokens]
    prefix_lse_ptr,
    prefix_lse_head_stride,
    prefix_lse_stride,
    # [num_tokens, num_heads, HEAD_SIZE]
    out_ptr,
    out_stride,
    out_head_stride,
    # [num_heads, num_tokens], or None
    lse_ptr,
    lse_head_stride,
    lse_stride,
    # [num_splits, R, max_queries, num_heads, HEAD_SIZE], None where one program sees everything and writes `out`
    part_out_ptr,
    # [num_splits, R, max_queries, num_heads], base 2
    part_lse_ptr,
    scale_log2,
    max_entries,
    max_queries,
    num_heads,
    num_row_tiles,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """BLOCK_ROWS (query, head) rows of one KV head over one split of the prefix; the last split takes the nodes too."""
    # The row tiles of a request follow each other: they read the same entries at about the same time.
    req_idx = tl.program_id(0) // num_row_tiles
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_rows = tl.minimum(tl.load(num_queries_ptr + req_idx), max_queries) * GROUP
    first_row = (tl.program_id(0) % num_row_tiles) * BLOCK_ROWS
    if first_row >= num_rows:
        return

    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_SIZE
    # A KV head's rows are its GROUP heads of one query, then those of the next.
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    # Offsets of 64 bits are scalars: those of rows, counted from the request's first, fit into half the registers.
    query = row // GROUP
    head = row % GROUP
    query_start = tl.load(query_start_ptr + req_idx)
    first_token = query_start.to(tl.int64)
    first_head = kv_head * GROUP
    mask = row_mask[:, None] & dim_mask[None, :]
    query_ptr += first_token * query_stride + first_head * query_head_stride
    query_offset = query * query_stride + head * query_head_stride
    q = tl.load(query_ptr + query_offset[:, None] + dims[None, :], mask=mask, other=0.0)

    block_table_ptr += tl.load(rows_ptr + req_idx) * block_table_stride
    key_ptr = key_cache_ptr + kv_head * key_head_stride
    value_ptr = value_cache_ptr + kv_head * value_head_stride
    prefix_len = tl.load(prefix_lens_ptr + req_idx)
    if prefix_out_ptr is None:
        row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
        num_keys = tl.minimum(prefix_len, max_entries)
        keys_per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_KEYS), num_splits) * BLOCK_KEYS
        key_start = split * keys_per_split
        key_end = tl.minimum(key_start + keys_per_split, num_keys)
        for first_key in range(key_start, key_end, BLOCK_KEYS):
            entries = first_key + tl.arange(0, BLOCK_KEYS)
            entry_mask = entries < key_end
            row_max, row_sum, acc = _attend_tile(
                q, row_max, row_sum, acc, entries, entry_mask, entry_mask[None, :], block_table_ptr,
                key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
                value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
                scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
            )  # fmt: skip
    else:
        # A part of one entry: its score is the prefix's LSE (times log2 e), its value the prefix's output.
        prefix_lse_ptr += first_head * prefix_lse_head_stride + first_token * prefix_lse_stride
        lse_offset = head * prefix_lse_head_stride + query * prefix_lse_stride
        row_max = tl.load(prefix_lse_ptr + lse_offset, mask=row_mask, other=float("-inf")) * 1.4426950408889634
        # Either infinity: no prefix.
        row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
        prefix_out_ptr += first_token * prefix_out_stride + first_head * prefix_out_head_stride
        prefix_offset = query * prefix_out_stride + head * prefix_out_head_stride
        acc = tl.load(prefix_out_ptr + prefix_offset[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = tl.where(row_sum[:, None] == 0.0, 0.0, acc)

    if split == num_splits - 1:
        word = tl.load(masks_ptr + req_idx.to(tl.int64) * masks_stride + query, mask=row_mask, other=0)
        # A loop with stages, and words of 32 bits for a tile: unrolled, loaded through registers, or with 64 bits a
        # pair it takes more registers than there are.
        for first_node in tl.range(0, NODES, BLOCK_NODES):
            node = tl.arange(0, BLOCK_NODES)
            entries = prefix_len + first_node + node
            # The shift of a negative word (bit 63) brings ones in from the left: only the lower bits are looked at.
            bits = (word >> first_node).to(tl.int32)
            seen = ((bits[:, None] >> node[None, :]) & 1) != 0
            seen = seen & (entries < max_entries)[None, :]
            entry_mask = tl.max(seen.to(tl.int32), axis=0) != 0
            row_max, row_sum, acc = _attend_tile(
                q, row_max, row_sum, acc, entries, entry_mask, seen, block_table_ptr,
                key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
                value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
                scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
            )  # fmt: skip

    # Of a row that attends to nothing: zeros and -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    row_lse = row_max + tl.log2(row_sum)
    # The rows once more, from 0 that the compiler cannot know: else it keeps those above in registers all the way.
    row = first_row + tl.load(query_start_ptr + req_idx, volatile=True) - query_start + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    query = row // GROUP
    head = row % GROUP
    mask = row_mask[:, None] & dim_mask[None, :]
    if part_out_ptr is None:
        out_ptr += first_token * out_stride + first_head * out_head_stride
        out_offset = query * out_stride + head * out_head_stride
        tl.store(out_ptr + out_offset[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            # From base 2: times log 2.
            lse_ptr += first_head * lse_head_stride + first_token * lse_stride
            lse_offset = head * lse_head_stride + query * lse_stride
            tl.store(lse_ptr + lse_offset, row_lse * 0.6931471805599453, mask=row_mask)
    else:
        num_reqs = tl.num_programs(0) // num_row_tiles
        first_part = (split * num_reqs + req_idx).to(tl.int64) * max_queries * num_heads + first_head
        part = query * num_heads + head
        tl.store(part_out_ptr + first_part * HEAD_SIZE + part[:, None] * HEAD_SIZE + dims[None, :], acc, mask=mask)
        tl.store(part_lse_ptr + first_part + part, row_lse, mask=row_mask)


@triton.jit(
    do_not_specialize=["max_queries", "num_splits"],
    do_not_specialize_on_alignment=["query_start_ptr", "num_queries_ptr"],
)
def _merge_splits_kernel(
    # [num_splits, R, max_queries, num_heads, HEAD_SIZE]
    part_out_ptr,
    # [num_splits, R, max_queries, num_heads], base 2
    part_lse_ptr,
    # [R]
    query_start_ptr,
    num_queries_ptr,
    # [num_tokens, num_heads, HEAD_SIZE]
    out_ptr,
    out_stride,
    out_head_stride,
    # [num_heads, num_tokens], or None
    lse_ptr,
    lse_head_stride,
    lse_stride,
    max_queries,
    num_heads,
    num_splits,
    HEAD_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One head of one query: the mean of its parts, weighted by their sums of exponentials."""
    req_idx = tl.program_id(0) // max_queries
    query = tl.program_id(0) % max_queries
    head = tl.program_id(1).to(tl.int64)
    if query >= tl.load(num_queries_ptr + req_idx):
        return
    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_SIZE
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for first_split in range(0, num_splits, BLOCK_SPLITS):
        split = first_split + tl.arange(0, BLOCK_SPLITS)
        split_mask = split < num_splits
        part = (split.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * num_heads + head
        part_lse = tl.load(part_lse_ptr + part, mask=split_mask, other=float("-inf"))
        part_out = tl.load(
            part_out_ptr + part[:, None] * HEAD_SIZE + dims[None, :],
            mask=split_mask[:, None] & dim_mask[None, :], other=0.0,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(part_lse, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(part_lse - shift)
        correction = tl.exp2(top - shift)
        total = total * correction + tl.sum(weights, axis=0)
        acc = acc * correction + tl.sum(weights[:, None] * part_out, axis=0)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total
    token = (tl.load(query_start_ptr + req_idx) + query).to(tl.int64)
    out_offset = token * out_stride + head * out_head_stride
    tl.store(out_ptr + out_offset + dims, acc.to(out_ptr.dtype.element_ty), mask=dim_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + head * lse_head_stride + token * lse_stride, (top + tl.log2(total)) * 0.6931471805599453)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    num_queries: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    out: Tensor,
    *,
    scale: float,
    max_queries: int,
    max_prefix_len: int,
    prefix: tuple[Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Attend from the rows of each request to its prefix and to the nodes behind it that each row's mask word names.

    KV entry e of request r lies in block block_table[rows[r], e // block_size] at offset e % block_size. Query row
    query_start[r] + i attends to entries 0..prefix_lens[r] - 1 and to every entry prefix_lens[r] + j whose bit j of
    masks[r, i] is set (bit 63 is the sign). Entries past the table count as not attended to. Of entries that no row of
    the request attends to nothing is used, whatever they hold. A row that attends to nothing yields zeros and an LSE of
    -inf. Rows of `out` and `lse` that belong to no request are left alone. Softmax and sums are float32.

    Args:
        query: float32, bfloat16 or float16 [num_tokens, num_heads, head_size], unit stride in head_size.
        key_cache: float [num_blocks, block_size, num_kv_heads, head_size], any strides (a permuted view is fine).
        value_cache: The same shape, strides of its own.
        block_table: int32 [num_table_rows, max_blocks], unit stride in its rows; max_blocks >= 1.
        rows: int64 [R], row of `block_table` of each request.
        query_start: int32 [>= R], first row of each request in `query` and `out`; requests may not overlap.
        num_queries: int32 [>= R], rows of each request, 0..max_queries.
        prefix_lens: int32 [>= R], entries that all rows of the request attend to, 0..max_prefix_len.
        masks: int64 [>= R, >= max_queries], unit stride in its rows.
        out: Out, like `query` in shape and dtype, unit stride in head_size.
        scale: Factor of the logits.
        max_queries: Host-known bound of `num_queries`.
        max_prefix_len: Host-known bound of `prefix_lens`; together with R and the heads it sets the number of splits.
        prefix: The prefix part where something else has computed it (FlashAttention, not causal), merged by LSE: its
            output, like `query` in shape, unit stride in head_size, and its natural LSE, float32 [num_heads,
            num_tokens] of any strides, where either infinity says that the row has no prefix (its output is not used).
            Then only the nodes are computed here; `prefix_lens` still says where they lie. Both may be `out`, `lse`.
        lse: Out, float32 [num_heads, num_tokens] of any strides: natural log-sum-exp of each written row's logits.
        impl: See `dispatch.use_triton`. The kernels never synchronise with the host; the reference does.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    _check(query, key_cache, value_cache, block_table, rows, query_start, num_queries, prefix_lens, masks, out,
           max_queries, max_prefix_len, prefix, lse)  # fmt: skip
    if rows.shape[0] == 0 or max_queries == 0 or query.shape[0] == 0:
        return
    run = _launch if use_triton(impl, query.device) else tree_attention_reference
    run(query, key_cache, value_cache, block_table, rows, query_start, num_queries, prefix_lens, masks, out,
        scale=scale, max_queries=max_queries, max_prefix_len=max_prefix_len, prefix=prefix, lse=lse)  # fmt: skip


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    num_queries: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    out: Tensor,
    max_queries: int,
    max_prefix_len: int,
    prefix: tuple[Tensor, Tensor] | None,
    lse: Tensor | None,
) -> None:
    """Assert what `tree_attention` says of its arguments."""
    device, num_reqs = query.device, rows.shape[0]
    num_tokens, num_heads, head_size = query.shape
    assert query.dtype in _DTYPES and key_cache.dtype in _DTYPES, f"query {query.dtype}, key_cache {key_cache.dtype}"
    assert key_cache.ndim == 4 and key_cache.shape[3] == head_size, f"key_cache: {list(key_cache.shape)}"
    assert num_heads % key_cache.shape[2] == 0, f"key_cache: {key_cache.shape[2]} KV heads for {num_heads} heads"
    assert value_cache.shape == key_cache.shape, f"value_cache: {list(value_cache.shape)}"
    assert value_cache.dtype == key_cache.dtype, f"value_cache: expected {key_cache.dtype}, got {value_cache.dtype}"
    assert key_cache.device == value_cache.device == device, f"caches: expected device {device}"
    assert block_table.dtype == torch.int32 and block_table.device == device and block_table.ndim == 2, "block_table"
    assert block_table.shape[1] == 1 or block_table.stride(1) == 1, "block_table: expected unit stride in a row"
    check_vector("rows", rows, torch.int64, device)
    check_vector("query_start", query_start, torch.int32, device, num_reqs)
    check_vector("num_queries", num_queries, torch.int32, device, num_reqs)
    check_vector("prefix_lens", prefix_lens, torch.int32, device, num_reqs)
    assert masks.dtype == torch.int64 and masks.device == device and masks.ndim == 2, "masks"
    assert masks.shape[0] >= num_reqs and masks.shape[1] >= max_queries, f"masks: {list(masks.shape)}"
    assert masks.shape[1] <= 1 or masks.stride(1) == 1, "masks: expected unit stride in a row"
    assert max_queries >= 0 and max_prefix_len >= 0, f"max_queries {max_queries}, max_prefix_len {max_prefix_len}"
    like_query = {"query": query, "out": out}
    like_lse = {} if lse is None else {"lse": lse}
    if prefix is not None:
        like_query["prefix output"], like_lse["prefix LSE"] = prefix
    for name, tensor in like_query.items():
        assert tensor.shape == query.shape and tensor.device == device, f"{name}: {list(tensor.shape)}"
        assert tensor.dtype == query.dtype, f"{name}: expected {query.dtype}, got {tensor.dtype}"
        assert tensor.stride(2) == 1, f"{name}: expected unit stride in head_size"
    for name, tensor in like_lse.items():
        assert tensor.dtype == torch.float32 and tensor.device == device, f"{name}: {tensor.dtype}"
        assert tensor.shape == (num_heads, num_tokens), f"{name}: {list(tensor.shape)}"


def _tile(block_rows: int, line_bytes: int, shared_bytes: int) -> int:
    """Return the keys of a tile: the most that a program holds, of lines of one padded head, and its scratch."""
    fitting = (keys for keys in (64, 32) if _held_bytes(block_rows, line_bytes, keys) <= shared_bytes)
    return next(fitting, 16)


def _held_bytes(block_rows: int, line_bytes: int, block_keys: int) -> int:
    """Return the shared memory of a program."""
    return (block_rows + 2 * _TILES_HELD * block_keys) * line_bytes + _SCRATCH_BYTES


def _pipeline(block_rows: int, line_bytes: int, block_keys: int, limits: DeviceLimits) -> tuple[int, int]:
    """Return the stages of the loops and the nodes of a tile."""
    shared_bytes = shared_bytes_per_program(limits, _PROGRAMS_PER_SM)
    # Blackwell's products take a few bytes more, to wait on, and more registers.
    waits = _WAIT_BYTES if limits.capability >= 100 else 0
    if _held_bytes(block_rows, line_bytes, block_keys) + waits > shared_bytes:
        return _NUM_STAGES - 1, min(block_keys, _BLOCK_NODES // 2)
    return _NUM_STAGES, min(block_keys, _BLOCK_NODES)


@functools.cache
def _num_splits(num_programs: int, max_splits: int, num_slots: int) -> int:
    """Return the fewest splits that leave about as few slots idle in the last wave as any number of splits would."""

    def used(num_splits: int) -> float:
        waves = num_programs * num_splits / num_slots
        return waves / math.ceil(waves)

    best = max(map(used, range(1, max_splits + 1)))
    return next(num_splits for num_splits in range(1, max_splits + 1) if used(num_splits) >= 0.85 * best)


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    num_queries: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    out: Tensor,
    *,
    scale: float,
    max_queries: int,
    max_prefix_len: int,
    prefix: tuple[Tensor, Tensor] | None,
    lse: Tensor | None,
) -> None:
    """Launch the kernel, and the merge where there are several splits; the grids come from shapes and bounds alone."""
    # The kernel counts a request's rows in 32 bits.
    assert max_queries * max(query.stride(0), out.stride(0)) < 2**31, f"strides {query.stride(0)}, {out.stride(0)}"
    num_reqs, (_, num_heads, head_size) = rows.shape[0], query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    limits = device_limits(query.device)
    # Products of float32, or of two dtypes, keep float32's precision. bfloat16 is widened where a CPU tensor shows that
    # this is the interpreter, whose dot multiplies bfloat16's bit patterns as integers.
    interpreted_bf16 = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    widen = query.dtype == torch.float32 or query.dtype != key_cache.dtype or interpreted_bf16
    block_dim = max(16, triton.next_power_of_2(head_size))
    most_rows = _MAX_BLOCK_ROWS_WIDE if widen else _MAX_BLOCK_ROWS
    block_rows = min(max(16, triton.next_power_of_2(max_queries * group)), most_rows)
    line_bytes = block_dim * (4 if widen else 2)
    block_keys = _tile(block_rows, line_bytes, shared_bytes_per_program(limits, _PROGRAMS_PER_SM))
    num_stages, block_nodes = _pipeline(block_rows, line_bytes, block_keys, limits)
    num_row_tiles = triton.cdiv(max_queries * group, block_rows)
    num_splits = 1
    if prefix is None:
        max_splits = min(max(1, triton.cdiv(max_prefix_len, _KEYS_PER_SPLIT)), _MAX_SPLITS)
        num_splits = _num_splits(num_reqs * num_row_tiles * num_kv_heads, max_splits, _PROGRAMS_PER_SM * limits.num_sms)
    part_out = part_lse = None
    if num_splits > 1:
        part_lse = torch.empty(num_splits, num_reqs, max_queries, num_heads, dtype=torch.float32, device=query.device)
        part_out = torch.empty(*part_lse.shape, head_size, dtype=torch.float32, device=query.device)
    prefix_out, prefix_lse = prefix or (None, None)
    outputs = (out, *_strides(out, 2), lse, *_strides(lse, 2))
    launcher(_tree_attention_kernel, (num_reqs * num_row_tiles, num_kv_heads, num_splits), query.device)(
        query, *_strides(query, 2), key_cache, *key_cache.stride(), value_cache, *value_cache.stride(),
        block_table, block_table.stride(0), rows, query_start, num_queries, prefix_lens, masks, masks.stride(0),
        prefix_out, *_strides(prefix_out, 2), prefix_lse, *_strides(prefix_lse, 2), *outputs, part_out, part_lse,
        scale * _LOG2E, block_table.shape[1] * block_size, max_queries, num_heads, num_row_tiles, num_splits,
        GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size, NODES=_NODES, BLOCK_DIM=block_dim,
        BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys, BLOCK_NODES=block_nodes, WIDEN=widen, num_stages=num_stages,
        num_warps=8 if widen or line_bytes > 256 else 4,
    )  # fmt: skip
    if num_splits > 1:
        launcher(_merge_splits_kernel, (num_reqs * max_queries, num_heads), query.device)(
            part_out, part_lse, query_start, num_queries, *outputs, max_queries, num_heads, num_splits,
            HEAD_SIZE=head_size, BLOCK_DIM=block_dim, BLOCK_SPLITS=_MERGE_SPLITS, num_warps=2,
        )  # fmt: skip


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


def tree_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    num_queries: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    out: Tensor,
    *,
    scale: float,
    max_queries: int,
    max_prefix_len: int,
    prefix: tuple[Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
) -> None:
    """Do what `tree_attention` does, in plain torch without a loop over requests or rows: the specification.

    Same arguments. Requests are padded to max_queries rows, and to max_prefix_len entries and the nodes.
    """
    num_reqs, (num_tokens, num_heads, head_size) = rows.shape[0], query.shape
    num_kv_heads = key_cache.shape[2]
    row = torch.arange(max_queries, device=query.device)
    valid = row < num_queries[:num_reqs, None]  # [R, Q]
    token = (query_start[:num_reqs, None] + row).clamp_(max=num_tokens - 1).flatten()  # [R * Q]
    blocks, bias = _blocks_and_bias(
        block_table, rows, prefix_lens[:num_reqs, None].to(torch.int64),
        masks[:num_reqs, :max_queries].masked_fill(~valid, 0), key_cache.shape[:2],
        max_prefix_len if prefix is None else None,
    )  # fmt: skip
    # Logits in base 2, whose exponential is the faster one; [R, num_kv_heads, group, Q, D].
    queries = query.index_select(0, token).to(torch.float32) * (scale * _LOG2E)
    queries = queries.view(num_reqs, max_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    step = max(1, _STRIP_ENTRIES // (num_heads * bias[0].numel()))
    parts = [
        _attend(queries[i : i + step], key_cache, value_cache, blocks[i : i + step], bias[i : i + step])
        for i in range(0, num_reqs, step)
    ]
    result, top, total = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    kept = valid.flatten().nonzero().squeeze(1)
    token = token.index_select(0, kept)
    # Only rows that belong to a request: [n, num_heads, D], [n, num_heads].
    result = result.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_size).index_select(0, kept)
    if prefix is not None or lse is not None:
        result_lse = (top + total.log2()).permute(0, 3, 1, 2, 4).reshape(-1, num_heads).index_select(0, kept) / _LOG2E
        if prefix is not None:
            result, result_lse = _merge(result, result_lse, prefix[0][token], prefix[1].T[token])
        if lse is not None:
            lse.T[token] = result_lse
    out.index_copy_(0, token, result.to(out.dtype))


def _blocks_and_bias(
    block_table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    masks: Tensor,
    pool_shape: torch.Size,
    max_prefix_len: int | None,
) -> tuple[Tensor, Tensor]:
    """Return blocks [R, n] that hold each request's first L entries, and what to add to the logits [R, Q, L].

    0 where a row attends to an entry, else -inf. `prefix_lens` is [R, 1]. Without `max_prefix_len`, of the nodes only:
    L entries from the beginning of the first node's block on.
    """
    num_blocks, block_size = pool_shape
    max_blocks = block_table.shape[1]
    # Up to the last node that any row attends to: seldom all 64.
    union = functools.reduce(operator.or_, masks.flatten().tolist())
    num_nodes = max(1, (union & (2**_NODES - 1)).bit_length())
    if max_prefix_len is None:
        length = block_size - 1 + num_nodes
        first = prefix_lens // block_size  # [R, 1], column of the table that holds the first node
        first_node, prefix_end = prefix_lens - first * block_size, torch.zeros_like(first)
    else:
        length = max_prefix_len + num_nodes
        first = torch.zeros_like(prefix_lens)
        first_node = prefix_end = prefix_lens
    entry = torch.arange(length, device=rows.device)
    # Columns that hold no entry attended to may hold anything.
    column = (first + entry[: triton.cdiv(length, block_size)]).clamp_(max=max_blocks - 1)
    blocks = block_table.index_select(0, rows).gather(1, column).clamp_(0, num_blocks - 1)
    bias = torch.where(entry < prefix_end, 0.0, float("-inf"))[:, None].expand(-1, masks.shape[1], -1).contiguous()
    seen = (masks[:, :, None] & _BITS[:num_nodes].to(rows.device)) != 0  # [R, Q, num_nodes]
    node = (first_node + entry[:num_nodes])[:, None].expand(seen.shape)
    bias.scatter_(2, node, torch.where(seen, 0.0, float("-inf")))
    if max_prefix_len is None or length > max_blocks * block_size:
        bias.masked_fill_((first * block_size + entry >= max_blocks * block_size)[:, None], float("-inf"))
    return blocks, bias


def _attend(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output [R, num_kv_heads, group, Q, D], and maximum and sum of exponentials of each row [..., 1].

    Args:
        queries: float32 [R, num_kv_heads, group, Q, D], scaled for logits in base 2.
        key_cache: As in `tree_attention`.
        value_cache: As in `tree_attention`.
        blocks: [R, n].
        bias: float32 [R, Q, L], 0 or -inf.
    """
    rows = queries.flatten(2, 3).flatten(0, 1)  # [R * num_kv_heads, group * Q, D]
    keys = _gather(key_cache, blocks, bias.shape[2])
    logits = torch.bmm(rows, keys.transpose(1, 2)).view(*queries.shape[:4], -1)
    bias = bias[:, None, None]
    logits += bias
    top = logits.amax(dim=-1, keepdim=True)
    # Adding -inf is the fast way to hide an entry, but one that holds NaN or infinity still shows: then by selection.
    if math.isnan(top.sum().item()):
        logits.masked_fill_(bias == float("-inf"), float("-inf"))
        top = logits.amax(dim=-1, keepdim=True)
    # Rows that attend to nothing keep -inf; the shift only has to be finite for them.
    weights = logits.sub_(top.clamp(min=torch.finfo(torch.float32).min)).exp2_()
    # The largest weight of a row is 1.
    total = weights.sum(dim=-1, keepdim=True).clamp_(min=1.0)
    values = _gather(value_cache, blocks, bias.shape[-1])
    result = torch.bmm(weights.view(*rows.shape[:2], -1), values)
    # 0 * NaN is NaN.
    if not math.isfinite(result.sum().item()):
        unseen = (bias == float("-inf")).all(dim=3).transpose(2, 3)  # [R, 1, L, 1]
        values = values.unflatten(0, queries.shape[:2]).masked_fill(unseen, 0.0)
        result = torch.bmm(weights.view(*rows.shape[:2], -1), values.flatten(0, 1))
    return result.view(queries.shape) / total, top, total


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` entries of some blocks as float32 [R * num_kv_heads, length, head_size]."""
    num_reqs, num_columns = blocks.shape
    _, block_size, num_kv_heads, head_size = cache.shape
    # Whole blocks in the cache's own order first: the CPU engine keeps a block of keys as [head_size, block_size].
    slots_adjacent = cache.stride(1) < cache.stride(3)
    chosen = cache.permute(0, 2, 3, 1) if slots_adjacent else cache.permute(0, 2, 1, 3)
    chosen = chosen.index_select(0, blocks.flatten()).to(torch.float32)
    chosen = chosen.view(num_reqs, num_columns, *chosen.shape[1:])
    if slots_adjacent:
        entries = chosen.permute(0, 2, 3, 1, 4).reshape(num_reqs * num_kv_heads, head_size, -1).transpose(1, 2)
    else:
        entries = chosen.transpose(1, 2).reshape(num_reqs * num_kv_heads, num_columns * block_size, head_size)
    return entries[:, :length]


def _merge(out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [..., D] and natural LSE [...] of two parts together."""
    prefix_lse = prefix_lse.masked_fill(prefix_lse == float("inf"), float("-inf"))
    total = torch.logaddexp(lse, prefix_lse)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    weight, prefix_weight = torch.exp(lse - shift)[..., None], torch.exp(prefix_lse - shift)[..., None]
    prefix_out = prefix_out.to(torch.float32).masked_fill(prefix_weight == 0, 0.0)
    return out * weight + prefix_out * prefix_weight, total
