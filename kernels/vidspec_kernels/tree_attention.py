"""tree_attention: attention of draft-tree rows over a paged KV cache: a shared prefix, then nodes chosen by bit words.

On the GPU as many programs as it holds at a time share the work equally, whatever the requests' lengths (stream-K:
Osama et al., 2023; LeanAttention: Sanovar et al., 2024). Where a share ends within a row tile, the tile's parts
are merged by log-sum-exp in an order that the lengths alone fix: equal inputs give equal bits. But where shares end
depends on the whole batch, and so do the last bits of a result. That is the price of equal shares in bounded memory:
splits of a fixed length would need partial results of every split of every request.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import (
    DeviceLimits,
    Impl,
    as_meta,
    check_vector,
    device_limits,
    launch,
    shared_bytes_per_program,
    use_triton,
)
from vidspec_kernels.tree_attention_reference import tree_attention_reference

# Rows of a tile: with more than 64, one program takes a multiprocessor and reads a key for twice as many. That pays
# where products outrun the second-level cache, on Hopper and the large Blackwells; elsewhere the padding of a last tile
# costs more than reading again.
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
# Requests that a program looks at at once to find its share.
_BLOCK_REQS = 128
# A share of fewer tiles of keys writes about as much of its partial results as it reads of K and V.
MIN_UNITS = 4
# Up to so many parts one program merges alone.
DIRECT_PARTS = 8
# Rows that it merges at a time, and parts of them that are under way.
_MERGE_ROWS = 16
_MERGE_PARTS = 4
_LOG2E = 1.4426950408889634
# Shapes of calls that are remembered as checked: most are of a few batch sizes.
_MAX_PLANS = 1024
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


@triton.jit
def _units(
    req_idx, num_reqs, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
    READS_PREFIX: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Return row tiles of requests, and units of work of one of them for one KV head: key tiles, and one for nodes."""
    mask = req_idx < num_reqs
    num_queries = tl.minimum(tl.load(num_queries_ptr + req_idx, mask=mask, other=0), max_queries)
    num_units = tl.full(req_idx.shape, 1, tl.int32)
    if READS_PREFIX:
        num_keys = tl.minimum(tl.load(prefix_lens_ptr + req_idx, mask=mask, other=0), max_entries)
        num_units += tl.cdiv(tl.maximum(num_keys, 0), BLOCK_KEYS)
    return tl.cdiv(num_queries * GROUP, BLOCK_ROWS), num_units


@triton.jit
def _item(
    left, req_idx, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
    READS_PREFIX: tl.constexpr, GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Return what unit `left` of a request's row tile belongs to: rows of the request, prefix, KV head, units, place.

    From memory each time: called twice, less is kept in registers from one call to the next.
    """
    num_rows = tl.minimum(tl.load(num_queries_ptr + req_idx, volatile=True), max_queries) * GROUP
    prefix_len = tl.maximum(tl.load(prefix_lens_ptr + req_idx, volatile=True), 0)
    num_units = 1
    if READS_PREFIX:
        num_units += tl.cdiv(tl.minimum(prefix_len, max_entries), BLOCK_KEYS)
    return num_rows, prefix_len, (left // num_units).to(tl.int64), num_units, left % num_units


@triton.jit
def _place(first_program, part):
    """Return where a part lies: of a program's two, the one that begins an item, or the one that goes on with one."""
    return 2 * (first_program + part) + tl.minimum(part, 1)


@triton.jit
def _merge_rows(
    row, part_out_ptr, part_lse_ptr, first_program, leader, num_parts, span,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Return base-2 LSE and output of rows: of every `span`-th part from `leader` on, weighted by their LSE."""
    offset = row[:, None] * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, BLOCK_DIM], tl.float32)
    for first_part in range(0, num_parts, MERGE_PARTS):
        # Unrolled: so many parts are under way at a time.
        for i in tl.static_range(MERGE_PARTS):
            place = _place(first_program, leader + tl.minimum(first_part + i, num_parts - 1) * span)
            # Past the first-level cache, which may hold what the place held before.
            part_lse = tl.load(part_lse_ptr + place * BLOCK_ROWS + row, cache_modifier=".cg")
            part_lse = tl.where(first_part + i < num_parts, part_lse, float("-inf"))
            part_out = tl.load(part_out_ptr + place * (BLOCK_ROWS * BLOCK_DIM) + offset, cache_modifier=".cg")
            new_top = tl.maximum(top, part_lse)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(part_lse - shift)
            correction = tl.exp2(top - shift)
            total = total * correction + weights
            acc = acc * correction[:, None] + weights[:, None] * part_out
            top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    return top + tl.log2(total), acc / total[:, None]


@triton.jit
def _write_rows(
    row, row_mask, row_lse, acc, out_ptr, out_stride, out_head_stride, lse_ptr, lse_head_stride, lse_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write rows, counted from the request's first; the pointers are at its first token and the first head."""
    query = row // GROUP
    head = row % GROUP
    dims = tl.arange(0, BLOCK_DIM)
    out_offset = query * out_stride + head * out_head_stride
    mask = row_mask[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.store(out_ptr + out_offset[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        # From base 2: times log 2.
        lse_offset = head * lse_head_stride + query * lse_stride
        tl.store(lse_ptr + lse_offset, row_lse * 0.6931471805599453, mask=row_mask)


# Not a variant each: sizes that change from step to step, and vectors that are slices of others.
@triton.jit(
    do_not_specialize=["masks_stride", "num_reqs", "max_entries", "max_queries", "num_row_tiles"],
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
    # [num_reqs]
    rows_ptr,
    query_start_ptr,
    num_queries_ptr,
    prefix_lens_ptr,
    # [num_reqs, >= max_queries]
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
    # [2 * num_programs, BLOCK_ROWS, BLOCK_DIM]
    part_out_ptr,
    # [2 * num_programs, BLOCK_ROWS], base 2
    part_lse_ptr,
    # [2, 2 * num_programs], zeros before and after
    arrivals_ptr,
    scale_log2,
    num_reqs,
    num_kv_heads,
    max_entries,
    max_queries,
    num_row_tiles,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    DIRECT_PARTS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """An equal share of all the work: units of consecutive items, an item being a row tile of a request's KV head."""
    program = tl.program_id(0)
    reads_prefix: tl.constexpr = prefix_out_ptr is None
    some_reqs = tl.arange(0, BLOCK_REQS)
    total = 0
    num_items = 0
    smallest = 2**30
    for first_req in range(0, num_reqs, BLOCK_REQS):
        num_tiles, num_units = _units(
            first_req + some_reqs, num_reqs, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
            reads_prefix, GROUP, BLOCK_ROWS, BLOCK_KEYS,
        )  # fmt: skip
        total += tl.sum(num_tiles * num_units, axis=0) * num_kv_heads
        num_items += tl.sum(num_tiles, axis=0) * num_kv_heads
        smallest = tl.minimum(smallest, tl.min(tl.where(num_tiles > 0, num_units, 2**30), axis=0))
    # Fewer programs where shares would be too small to be worth merging. A multiple of the row tiles: where all
    # requests have as many, the programs of a key's row tiles read it at the same time.
    num_programs = tl.minimum(tl.num_programs(0), tl.maximum(total // MIN_UNITS, num_items))
    if num_programs > num_row_tiles:
        num_programs -= num_programs % num_row_tiles
    if program >= num_programs:
        return
    # Units fit into 32 bits, their products with programs into 64.
    unit = (program.to(tl.int64) * total // num_programs).to(tl.int32)
    end = ((program + 1).to(tl.int64) * total // num_programs).to(tl.int32)

    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_SIZE
    # Of what a loop around everything keeps in registers there is too much, if it may: layouts of tiles and of parts.
    for _ in tl.range(0, tl.minimum(num_items, (end - unit) // smallest + 2), disable_licm=True):
        if unit < end:
            # ---- the item: first by row tile, then by request, then by KV head --------------------------------------
            row_tile = 0
            req_idx = -1
            first_req = 0
            left = unit
            while req_idx < 0:
                num_tiles, num_units = _units(
                    first_req + some_reqs, num_reqs, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
                    reads_prefix, GROUP, BLOCK_ROWS, BLOCK_KEYS,
                )  # fmt: skip
                ends = tl.cumsum(tl.where(num_tiles > row_tile, num_units, 0) * num_kv_heads, axis=0)
                is_over = ends <= left
                num_over = tl.sum(is_over.to(tl.int32), axis=0)
                left -= tl.max(tl.where(is_over, ends, 0), axis=0)
                if num_over < BLOCK_REQS:
                    req_idx = first_req + num_over
                else:
                    first_req += BLOCK_REQS
                    if first_req >= num_reqs:
                        first_req = 0
                        row_tile += 1
            num_rows, prefix_len, kv_head, item_units, first_unit = _item(
                left, req_idx, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
                reads_prefix, GROUP, BLOCK_KEYS,
            )  # fmt: skip
            num_keys = tl.minimum(prefix_len, max_entries)
            last_unit = tl.minimum(item_units, first_unit + end - unit)

            # ---- its rows -------------------------------------------------------------------------------------------
            # A KV head's rows are its GROUP heads of one query, then those of the next.
            row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            row_mask = row < num_rows
            # Offsets of 64 bits are scalars: those of rows, counted from the request's first, fit into half the
            # registers.
            query = row // GROUP
            head = row % GROUP
            first_token = tl.load(query_start_ptr + req_idx)
            first_head = kv_head * GROUP
            mask = row_mask[:, None] & dim_mask[None, :]
            query_offset = query * query_stride + head * query_head_stride
            q = tl.load(
                query_ptr + first_token.to(tl.int64) * query_stride + first_head * query_head_stride
                + query_offset[:, None] + dims[None, :], mask=mask, other=0.0,
            )  # fmt: skip
            table_ptr = block_table_ptr + tl.load(rows_ptr + req_idx) * block_table_stride
            key_ptr = key_cache_ptr + kv_head * key_head_stride
            value_ptr = value_cache_ptr + kv_head * value_head_stride

            # ---- the prefix -----------------------------------------------------------------------------------------
            if reads_prefix:
                row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
                acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
                for first_key in range(
                    first_unit * BLOCK_KEYS, tl.minimum(last_unit * BLOCK_KEYS, num_keys), BLOCK_KEYS
                ):
                    entries = first_key + tl.arange(0, BLOCK_KEYS)
                    entry_mask = entries < num_keys
                    row_max, row_sum, acc = _attend_tile(
                        q, row_max, row_sum, acc, entries, entry_mask, entry_mask[None, :], table_ptr,
                        key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
                        value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
                        scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
                    )  # fmt: skip
            else:
                # A part of one entry: its score is the prefix's LSE (times log2 e), its value the prefix's output.
                lse_offset = head * prefix_lse_head_stride + query * prefix_lse_stride
                row_max = tl.load(
                    prefix_lse_ptr + first_head * prefix_lse_head_stride
                    + first_token.to(tl.int64) * prefix_lse_stride + lse_offset,
                    mask=row_mask, other=float("-inf"),
                ) * 1.4426950408889634  # fmt: skip
                # Either infinity: no prefix.
                row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)
                row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
                prefix_offset = query * prefix_out_stride + head * prefix_out_head_stride
                acc = tl.load(
                    prefix_out_ptr + first_token.to(tl.int64) * prefix_out_stride + first_head * prefix_out_head_stride
                    + prefix_offset[:, None] + dims[None, :], mask=mask, other=0.0,
                ).to(tl.float32)  # fmt: skip
                acc = tl.where(row_sum[:, None] == 0.0, 0.0, acc)

            # ---- the nodes ------------------------------------------------------------------------------------------
            if last_unit == item_units:
                # Words of 32 bits, low one first: with 64 bits a pair of row and node there are not enough registers.
                words_ptr = (masks_ptr + tl.cast(req_idx, tl.int64) * masks_stride).to(
                    tl.pointer_type(tl.int32)
                ) + 2 * query
                high = tl.load(words_ptr + 1, mask=row_mask, other=0)
                last_node = tl.where(tl.max((high != 0).to(tl.int32), axis=0) != 0, 64, 32)
                for first_node in tl.range(0, last_node, BLOCK_NODES):
                    node = tl.arange(0, BLOCK_NODES)
                    word = tl.load(words_ptr + first_node // 32, mask=row_mask, other=0) >> (first_node % 32)
                    entries = prefix_len + first_node + node
                    seen = ((word[:, None] >> node[None, :]) & 1) != 0
                    seen = seen & (entries < max_entries)[None, :]
                    entry_mask = tl.max(seen.to(tl.int32), axis=0) != 0
                    row_max, row_sum, acc = _attend_tile(
                        q, row_max, row_sum, acc, entries, entry_mask, seen, table_ptr,
                        key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
                        value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
                        scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
                    )  # fmt: skip

            # Of a row that attends to nothing: zeros and -inf.
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
            acc = acc / row_sum[:, None]
            row_lse = row_max + tl.log2(row_sum)

            # ---- the result, or a part of it ------------------------------------------------------------------------
            num_rows, prefix_len, kv_head, item_units, first_unit = _item(
                left, req_idx, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
                reads_prefix, GROUP, BLOCK_KEYS,
            )  # fmt: skip
            last_unit = tl.minimum(item_units, first_unit + end - unit)
            first_head = kv_head * GROUP
            token = tl.load(query_start_ptr + req_idx, volatile=True)
            # Their difference is 0, which the compiler cannot know: else it keeps rows in registers all the way.
            first_row = row_tile * BLOCK_ROWS + token - first_token
            request_out_ptr = out_ptr + token.to(tl.int64) * out_stride + first_head * out_head_stride
            request_lse_ptr = lse_ptr
            if lse_ptr is not None:
                request_lse_ptr += token.to(tl.int64) * lse_stride + first_head * lse_head_stride
            row = tl.arange(0, BLOCK_ROWS)
            row_mask = row < num_rows - first_row
            if last_unit - first_unit == item_units:
                _write_rows(
                    first_row + row, row_mask, row_lse, acc, request_out_ptr, out_stride, out_head_stride,
                    request_lse_ptr, lse_head_stride, lse_stride, GROUP, HEAD_SIZE, BLOCK_DIM,
                )  # fmt: skip
            elif reads_prefix:
                # Program p has the units from total * p // num_programs on.
                item_begin = unit - first_unit
                first_program = (((item_begin + 1).to(tl.int64) * num_programs - 1) // total).to(tl.int32)
                last_program = (((item_begin + item_units).to(tl.int64) * num_programs - 1) // total).to(tl.int32)
                num_parts = last_program - first_program + 1
                part = program - first_program
                place = _place(first_program, part)
                tl.store(part_lse_ptr + place * BLOCK_ROWS + row, row_lse, mask=row_mask)
                offset = row[:, None] * BLOCK_DIM + dims[None, :]
                tl.store(part_out_ptr + place * (BLOCK_ROWS * BLOCK_DIM) + offset, acc, mask=row_mask[:, None])
                # Many parts are merged by several programs, each some, before one merges the rest: twice their root.
                fan_in = tl.ceil(tl.sqrt(num_parts.to(tl.float32))).to(tl.int32)
                fan_in = tl.where(num_parts <= DIRECT_PARTS, num_parts, fan_in)
                span = 1
                level_ptr = arrivals_ptr
                while num_parts > 1:
                    # All threads' stores come before the arrival, which releases them and acquires the others'.
                    tl.debug_barrier()
                    leader = part - part % fan_in
                    members = tl.minimum(fan_in, num_parts - leader)
                    place = _place(first_program, leader * span)
                    if tl.atomic_add(level_ptr + place, 1, sem="acq_rel", scope="gpu") == members - 1:
                        # The last to arrive merges, in the order of the parts; nobody else comes before the next call.
                        tl.store(level_ptr + place, 0)
                        part = part // fan_in
                        num_parts = tl.cdiv(num_parts, fan_in)
                        for begin in range(0, tl.minimum(num_rows - first_row, BLOCK_ROWS), MERGE_ROWS):
                            some = begin + tl.arange(0, MERGE_ROWS)
                            some_lse, some_out = _merge_rows(
                                some, part_out_ptr, part_lse_ptr, first_program, leader * span, members, span,
                                BLOCK_ROWS, BLOCK_DIM, MERGE_ROWS, MERGE_PARTS,
                            )  # fmt: skip
                            some_mask = some < num_rows - first_row
                            if num_parts == 1:
                                _write_rows(
                                    first_row + some, some_mask, some_lse, some_out, request_out_ptr, out_stride,
                                    out_head_stride, request_lse_ptr, lse_head_stride, lse_stride,
                                    GROUP, HEAD_SIZE, BLOCK_DIM,
                                )  # fmt: skip
                            else:
                                # The leader's place is written again once all threads have read it.
                                tl.debug_barrier()
                                tl.store(part_lse_ptr + place * BLOCK_ROWS + some, some_lse, mask=some_mask)
                                some_offset = some[:, None] * BLOCK_DIM + dims[None, :]
                                some_ptr = part_out_ptr + place * (BLOCK_ROWS * BLOCK_DIM) + some_offset
                                tl.store(some_ptr, some_out, mask=some_mask[:, None])
                        span *= fan_in
                        level_ptr += 2 * tl.num_programs(0)
                    else:
                        num_parts = 0
            unit += last_unit - first_unit


class TreeAttentionScratch:
    """Memory of a model's `tree_attention` calls, for parts of results and their arrivals, made once.

    All layers share it: calls that do must follow each other on a stream. It has room for two tiles of partial results
    of every program that a device holds, whatever the batch: for each multiprocessor 256 rows of a padded head and of
    one sum, in float32 (17 MB for heads of 128 and 132 multiprocessors).

    Args:
        head_size: The largest of the model's layers.
        device: Where its caches live.
    """

    def __init__(self, head_size: int, device: torch.device):
        self.head_size = head_size
        self.num_sms = device_limits(device).num_sms
        num_rows = 2 * _MAX_BLOCK_ROWS * self.num_sms
        self.part_out = torch.empty(num_rows * _padded(head_size), dtype=torch.float32, device=device)
        self.part_lse = torch.empty(num_rows, dtype=torch.float32, device=device)
        # Two levels of merges, two items that a program can have a part of.
        self.arrivals = torch.zeros(4 * _PROGRAMS_PER_SM * self.num_sms, dtype=torch.int32, device=device)
        self.plans: dict[tuple[Any, ...], Callable[..., None]] = {}  # checked launches, by `_signature`
        self.variants: dict[Any, Any] = {}  # see `dispatch.launch`

    def as_meta(self) -> "TreeAttentionScratch":
        """Return what a launch is prepared with: the same, without memory."""
        other = copy.copy(self)
        other.part_out, other.part_lse, other.arrivals = map(as_meta, (self.part_out, self.part_lse, self.arrivals))
        other.plans, other.variants = {}, {}
        return other


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
    scratch: TreeAttentionScratch,
    prefix: tuple[Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Attend from the rows of each request to its prefix and to the nodes behind it that each row's mask word names.

    KV entry e of request r lies in block block_table[rows[r], e // block_size] at offset e % block_size. Query row
    query_start[r] + i attends to entries 0..prefix_lens[r] - 1 and to every entry prefix_lens[r] + j whose bit j of
    masks[r, i] is set (bit 63 is the sign). Entries past the table count as not attended to. Of entries that no row of
    the request attends to nothing is used, whatever they hold. A row that attends to nothing yields zeros and an LSE of
    -inf. Rows of `out` and `lse` that belong to no request are left alone: padding has no rows, and its tables may hold
    anything. Softmax and sums are float32.

    A launch depends on shapes, strides and `max_queries` alone, allocates nothing and asks the device nothing, so that
    it can be captured: every length is read when it runs.

    Args:
        query: float32, bfloat16 or float16 [num_tokens, num_heads, head_size], unit stride in head_size.
        key_cache: float [num_blocks, block_size, num_kv_heads, head_size], any strides (a permuted view is fine).
        value_cache: The same shape, strides of its own.
        block_table: int32 [num_table_rows, max_blocks], unit stride in its rows; max_blocks >= 1.
        rows: int64 [R], row of `block_table` of each request.
        query_start: int32 [>= R], first row of each request in `query` and `out`; requests may not overlap.
        num_queries: int32 [>= R], rows of each request, 0..max_queries.
        prefix_lens: int32 [>= R], entries that all rows of the request attend to; less than none counts as none.
        masks: int64 [>= R, >= max_queries], unit stride in its rows.
        out: Out, like `query` in shape and dtype, unit stride in head_size.
        scale: Factor of the logits.
        max_queries: Host-known bound of `num_queries`.
        scratch: Memory of the model's calls, on the same device; the reference uses none of it.
        prefix: The prefix part where something else has computed it (FlashAttention, not causal), merged by LSE: its
            output, like `query` in shape, unit stride in head_size, and its natural LSE, float32 [num_heads,
            num_tokens] of any strides, where either infinity says that the row has no prefix (its output is not used).
            Then only the nodes are computed here; `prefix_lens` still says where they lie. Both may be `out`, `lse`.
        lse: Out, float32 [num_heads, num_tokens] of any strides: natural log-sum-exp of each written row's logits.
        impl: See `dispatch.use_triton`. The kernel never synchronises with the host; the reference does.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    arguments = (query, key_cache, value_cache, block_table, rows, query_start, num_queries, prefix_lens, masks, out)
    signature = _signature(max_queries, *arguments, lse, *(prefix or (None, None)))
    plan = scratch.plans.get(signature)
    if plan is None:
        _check(*arguments, max_queries, scratch, prefix, lse)
        if len(scratch.plans) >= _MAX_PLANS:
            scratch.plans.clear()
        plan = scratch.plans[signature] = _plan(*arguments, scratch, max_queries, prefix, lse)
    if rows.shape[0] == 0 or max_queries == 0 or query.shape[0] == 0:
        return
    if use_triton(impl, query.device):
        plan(*arguments, scale, prefix, lse)
    else:
        tree_attention_reference(*arguments, scale=scale, max_queries=max_queries, prefix=prefix, lse=lse)


def _signature(max_queries: int, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Return what checks and launch depend on, beside the device, which is the scratch's."""
    found: list[Any] = [max_queries]
    for tensor in tensors:
        found += (None,) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
    return tuple(found)


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
    scratch: TreeAttentionScratch,
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
    assert max_queries >= 0, f"max_queries {max_queries}"
    assert scratch.arrivals.device == device and scratch.head_size >= head_size, f"scratch for heads of {head_size}"
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
    elif line_bytes > 256 or limits.capability not in _WIDE_TILES:
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


def _plan(
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
    scratch: TreeAttentionScratch,
    max_queries: int,
    prefix: tuple[Tensor, Tensor] | None,
    lse: Tensor | None,
) -> Callable[..., None]:
    """Return what launches the kernel for arguments that look like these: tensors, scale, prefix and `lse`."""
    # The kernel counts a request's rows, and units of work, in 32 bits.
    assert max_queries * max(query.stride(0), out.stride(0)) < 2**31, f"strides {query.stride(0)}, {out.stride(0)}"
    device, num_reqs, (_, num_heads, head_size) = query.device, rows.shape[0], query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    # Products of float32, or of two dtypes, keep float32's precision. bfloat16 is widened where a CPU tensor shows that
    # this is the interpreter, whose dot multiplies bfloat16's bit patterns as integers.
    interpreted_bf16 = query.dtype == torch.bfloat16 and device.type == "cpu"
    widen = query.dtype == torch.float32 or query.dtype != key_cache.dtype or interpreted_bf16
    tile = tile_shape(max_queries * group, head_size, widen, prefix is None, device_limits(device))
    num_row_tiles = triton.cdiv(max_queries * group, tile.block_rows)
    most_units = num_reqs * num_kv_heads * num_row_tiles * (block_table.shape[1] * block_size // tile.block_keys + 2)
    assert most_units < 2**31, f"{most_units} units of work"
    table_strides, mask_strides = (block_table.stride(0),), (masks.stride(0),)
    per_tensor = (query, key_cache, value_cache, *(prefix or (None, None)), out, lse)
    strides = [_strides(tensor) for tensor in per_tensor]
    # A key's dimensions may lie anywhere, those of queries and outputs are side by side.
    query_strides, keys, values, prefix_out, prefix_lse, outs, lses = (
        found if i in (1, 2) else found[:2] for i, found in enumerate(strides)
    )
    numbers = (num_reqs, num_kv_heads, block_table.shape[1] * block_size, max_queries, num_row_tiles)
    grid = (tile.programs_per_sm * scratch.num_sms,)
    constants = {
        "GROUP": group, "HEAD_SIZE": head_size, "BLOCK_SIZE": block_size, "BLOCK_DIM": _padded(head_size),
        "BLOCK_ROWS": tile.block_rows, "BLOCK_KEYS": tile.block_keys, "BLOCK_NODES": tile.block_nodes,
        "BLOCK_REQS": _BLOCK_REQS, "MIN_UNITS": MIN_UNITS, "DIRECT_PARTS": DIRECT_PARTS, "MERGE_ROWS": _MERGE_ROWS,
        "MERGE_PARTS": _MERGE_PARTS, "WIDEN": widen,
    }  # fmt: skip
    options = {"num_stages": tile.num_stages, "num_warps": tile.num_warps}
    variant = (query.dtype, key_cache.dtype, prefix is None, lse is None, num_kv_heads, *strides, *table_strides, tile)

    def launch_one(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
        num_queries: Tensor, prefix_lens: Tensor, masks: Tensor, out: Tensor, scale: float,
        prefix: tuple[Tensor, Tensor] | None, lse: Tensor | None,
    ) -> None:  # fmt: skip
        before, before_lse = prefix or (None, None)
        args = (
            query, *query_strides, key_cache, *keys, value_cache, *values, block_table, *table_strides, rows,
            query_start, num_queries, prefix_lens, masks, *mask_strides, before, *prefix_out, before_lse, *prefix_lse,
            out, *outs, lse, *lses, scratch.part_out, scratch.part_lse, scratch.arrivals, scale * _LOG2E, *numbers,
        )  # fmt: skip
        aligned = (query, key_cache, value_cache, block_table, before, before_lse, out, lse)
        key = (variant, *(tensor is not None and tensor.data_ptr() % 16 for tensor in aligned))
        launch(_tree_attention_kernel, grid, device, args, constants, scratch.variants, key, options)

    return launch_one


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()
