"""The kernel of `tree_attention`: every program takes an equal share of all the work."""

import triton
import triton.language as tl

from vidspec_kernels.float8 import as_float, scaled


@triton.jit
def _load(ptr, mask):
    if mask is None:
        loaded = tl.load(ptr)
    else:
        loaded = tl.load(ptr, mask=mask, other=0.0)
    return loaded


@triton.jit
def _attend_tile(
    q, row_max, row_sum, acc, entries, entry_mask, seen, block_table_ptr,
    key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
    value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
    scale_log2, dims, dim_mask, BLOCK_SIZE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; nothing is read outside `entry_mask`, and nothing used outside `seen`.

    Both are None where all rows attend to all entries and a head fills its dimensions: then nothing is masked.
    """
    # int64 before the product: a block's offset passes 2**31 in a large pool.
    block = _load(block_table_ptr + entries // BLOCK_SIZE, entry_mask).to(tl.int64)
    slot = (entries % BLOCK_SIZE).to(tl.int64)
    key_mask = None
    value_mask = None
    if seen is not None:
        key_mask = entry_mask[None, :] & dim_mask[:, None]
        value_mask = entry_mask[:, None] & dim_mask[None, :]
    key_offset = block * key_block_stride + slot * key_slot_stride
    k = _load(key_ptr + key_offset[None, :] + dims[:, None] * key_dim_stride, key_mask)
    if WIDEN:
        scores = tl.dot(q.to(tl.float32), as_float(k, tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(q, as_float(k, q.dtype))
    scores *= scale_log2
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # Rows that have seen no entry yet keep -inf; the shift only has to be finite for them.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(weights, axis=1)
    value_offset = block * value_block_stride + slot * value_slot_stride
    v = _load(value_ptr + value_offset[:, None] + dims[None, :] * value_dim_stride, value_mask)
    acc = acc * correction[:, None]
    if WIDEN:
        acc = tl.dot(weights, as_float(v, tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(q.dtype), as_float(v, q.dtype), acc)
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
def _shares(
    most_programs, num_reqs, num_queries_ptr, prefix_lens_ptr, num_kv_heads, max_entries, max_queries, num_row_tiles,
    READS_PREFIX: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_REQS: tl.constexpr, MIN_UNITS: tl.constexpr,
):  # fmt: skip
    """Return all units of work, items, units of the smallest item, and programs that share them: program p has the
    units from total * p // num_programs on.
    """
    total = 0
    num_items = 0
    smallest = 2**30
    for first_req in range(0, num_reqs, BLOCK_REQS):
        num_tiles, num_units = _units(
            first_req + tl.arange(0, BLOCK_REQS), num_reqs, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
            READS_PREFIX, GROUP, BLOCK_ROWS, BLOCK_KEYS,
        )  # fmt: skip
        total += tl.sum(num_tiles * num_units, axis=0) * num_kv_heads
        num_items += tl.sum(num_tiles, axis=0) * num_kv_heads
        smallest = tl.minimum(smallest, tl.min(tl.where(num_tiles > 0, num_units, 2**30), axis=0))
    # Fewer programs where shares would be too small to be worth merging. A multiple of the row tiles: where all
    # requests have as many, the programs of a key's row tiles read it at the same time.
    num_programs = tl.minimum(most_programs, tl.maximum(total // MIN_UNITS, num_items))
    if num_programs > num_row_tiles:
        num_programs -= num_programs % num_row_tiles
    return total, num_items, smallest, num_programs


@triton.jit
def _first_unit(program, total, num_programs):
    """Return program * total // num_programs without its product, which takes 64 bits: such a division is a call."""
    return program * (total // num_programs) + program * (total % num_programs) // num_programs


@triton.jit
def _programs_of(item_begin, item_units, total, num_programs):
    """Return the first and the last program that has a share of an item, given its first unit and how many it has."""
    first = ((item_begin + 1).to(tl.int64) * num_programs - 1) // total
    last = ((item_begin + item_units).to(tl.int64) * num_programs - 1) // total
    return first.to(tl.int32), last.to(tl.int32)


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
    row, part_out_ptr, part_lse_ptr, first_program, num_parts,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Return base-2 LSE and output of rows: of their parts, weighted by their LSE, in the order of the parts."""
    offset = row[:, None] * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, BLOCK_DIM], tl.float32)
    for first_part in range(0, num_parts, MERGE_PARTS):
        # Unrolled: so many parts are under way at a time.
        for i in tl.static_range(MERGE_PARTS):
            place = _place(first_program, tl.minimum(first_part + i, num_parts - 1))
            part_lse = tl.load(part_lse_ptr + place * BLOCK_ROWS + row)
            part_lse = tl.where(first_part + i < num_parts, part_lse, float("-inf"))
            part_out = tl.load(part_out_ptr + place * (BLOCK_ROWS * BLOCK_DIM) + offset)
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
    do_not_specialize=[
        *("masks_stride", "num_reqs", "max_entries", "max_queries", "num_row_tiles"),
        *("query_scale_stride", "key_scale_stride", "value_scale_stride"),
    ],
    do_not_specialize_on_alignment=[
        *("rows_ptr", "query_start_ptr", "num_queries_ptr", "prefix_lens_ptr", "masks_ptr"),
        *("query_scale_ptr", "key_scale_ptr", "value_scale_ptr"),
    ],
)
def _tree_attention_kernel(
    query_ptr, query_stride, query_head_stride,  # [num_tokens, num_heads, HEAD_SIZE]
    # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    key_cache_ptr, key_block_stride, key_slot_stride, key_head_stride, key_dim_stride,
    # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    value_cache_ptr, value_block_stride, value_slot_stride, value_head_stride, value_dim_stride,
    block_table_ptr, block_table_stride,  # [num_table_rows, max_entries / BLOCK_SIZE]
    rows_ptr, query_start_ptr, num_queries_ptr, prefix_lens_ptr,  # [num_reqs]
    masks_ptr, masks_stride,  # [num_reqs, >= max_queries]
    # [num_tokens, num_heads, HEAD_SIZE], None where the prefix is computed here
    prefix_out_ptr, prefix_out_stride, prefix_out_head_stride,
    prefix_lse_ptr, prefix_lse_head_stride, prefix_lse_stride,  # [num_heads, num_tokens]
    out_ptr, out_stride, out_head_stride,  # [num_tokens, num_heads, HEAD_SIZE]
    lse_ptr, lse_head_stride, lse_stride,  # [num_heads, num_tokens], or None
    part_out_ptr,  # [2 * num_programs, BLOCK_ROWS, BLOCK_DIM]
    part_lse_ptr,  # [2 * num_programs, BLOCK_ROWS], base 2
    # [num_kv_heads] each, or None
    query_scale_ptr, query_scale_stride, key_scale_ptr, key_scale_stride, value_scale_ptr, value_scale_stride,
    scale_log2, num_reqs, num_kv_heads, max_entries, max_queries, num_row_tiles,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_REQS: tl.constexpr,
    MIN_UNITS: tl.constexpr, IS_OVERLAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """An equal share of all the work: units of consecutive items, an item being a row tile of a request's KV head."""
    program = tl.program_id(0)
    reads_prefix: tl.constexpr = prefix_out_ptr is None
    if IS_OVERLAPPED and reads_prefix:
        # From now on programs that merge may start where there is room.
        tl.extra.cuda.gdc_launch_dependents()
    some_reqs = tl.arange(0, BLOCK_REQS)
    total, num_items, smallest, num_programs = _shares(
        tl.num_programs(0), num_reqs, num_queries_ptr, prefix_lens_ptr, num_kv_heads, max_entries, max_queries,
        num_row_tiles, reads_prefix, GROUP, BLOCK_ROWS, BLOCK_KEYS, BLOCK_REQS, MIN_UNITS,
    )  # fmt: skip
    if program >= num_programs:
        return
    unit = _first_unit(program, total, num_programs)
    end = _first_unit(program + 1, total, num_programs)

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
            # What float8 is converted to: float16 holds it exactly, with the fewest instructions.
            if q.dtype.primitive_bitwidth == 8:
                q = as_float(q, tl.float16)
            item_scale_log2 = scaled(scale_log2, query_scale_ptr, query_scale_stride, kv_head)
            item_scale_log2 = scaled(item_scale_log2, key_scale_ptr, key_scale_stride, kv_head)
            table_ptr = block_table_ptr + tl.load(rows_ptr + req_idx) * block_table_stride
            key_ptr = key_cache_ptr + kv_head * key_head_stride
            value_ptr = value_cache_ptr + kv_head * value_head_stride

            # ---- the prefix -----------------------------------------------------------------------------------------
            if reads_prefix:
                row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
                acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
                first_key = first_unit * BLOCK_KEYS
                last_key = tl.minimum(last_unit * BLOCK_KEYS, num_keys)
                # Masks take a tenth of the time of a large tile; without them there is more code, which small ones
                # wait for.
                if BLOCK_ROWS >= 64 and HEAD_SIZE == BLOCK_DIM:
                    last_whole = last_key // BLOCK_KEYS * BLOCK_KEYS
                    for whole_key in range(first_key, last_whole, BLOCK_KEYS):
                        row_max, row_sum, acc = _attend_tile(
                            q, row_max, row_sum, acc, whole_key + tl.arange(0, BLOCK_KEYS), None, None, table_ptr,
                            key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
                            value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
                            item_scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
                        )  # fmt: skip
                    first_key = tl.maximum(first_key, last_whole)
                for some_key in range(first_key, last_key, BLOCK_KEYS):
                    entries = some_key + tl.arange(0, BLOCK_KEYS)
                    entry_mask = entries < num_keys
                    row_max, row_sum, acc = _attend_tile(
                        q, row_max, row_sum, acc, entries, entry_mask, entry_mask[None, :], table_ptr,
                        key_ptr, key_block_stride, key_slot_stride, key_dim_stride,
                        value_ptr, value_block_stride, value_slot_stride, value_dim_stride,
                        item_scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
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
                if value_scale_ptr is not None:
                    acc /= tl.load(value_scale_ptr + kv_head * value_scale_stride)

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
                        item_scale_log2, dims, dim_mask, BLOCK_SIZE, WIDEN,
                    )  # fmt: skip

            # Of a row that attends to nothing: zeros and -inf.
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
            acc = scaled(acc / row_sum[:, None], value_scale_ptr, value_scale_stride, kv_head)
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
                first_program, _ = _programs_of(unit - first_unit, item_units, total, num_programs)
                place = _place(first_program, program - first_program)
                tl.store(part_lse_ptr + place * BLOCK_ROWS + row, row_lse, mask=row_mask)
                offset = row[:, None] * BLOCK_DIM + dims[None, :]
                tl.store(part_out_ptr + place * (BLOCK_ROWS * BLOCK_DIM) + offset, acc, mask=row_mask[:, None])
            unit += last_unit - first_unit


@triton.jit(
    do_not_specialize=["num_reqs", "max_entries", "max_queries", "num_row_tiles", "most_programs"],
    do_not_specialize_on_alignment=["query_start_ptr", "num_queries_ptr", "prefix_lens_ptr"],
)
def _merge_parts_kernel(
    query_start_ptr, num_queries_ptr, prefix_lens_ptr,  # [num_reqs]
    out_ptr, out_stride, out_head_stride,  # [num_tokens, num_heads, HEAD_SIZE]
    lse_ptr, lse_head_stride, lse_stride,  # [num_heads, num_tokens], or None
    part_out_ptr,  # [2 * num_programs, BLOCK_ROWS, BLOCK_DIM]
    part_lse_ptr,  # [2 * num_programs, BLOCK_ROWS], base 2
    num_reqs, num_kv_heads, max_entries, max_queries, num_row_tiles, most_programs,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_REQS: tl.constexpr, MIN_UNITS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of MERGE_ROWS rows of an item (program axes: rows of all row tiles, KV head, request).

    Where it is overlapped with the launch that makes the parts, every program waits for that one's end, also one that
    merges nothing: what comes next waits for this launch alone.
    """
    kv_head, req_idx = tl.program_id(1), tl.program_id(2)
    first_row = tl.program_id(0) * MERGE_ROWS
    row_tile = first_row // BLOCK_ROWS
    num_rows = tl.minimum(tl.load(num_queries_ptr + req_idx), max_queries) * GROUP
    if first_row >= num_rows:
        if IS_OVERLAPPED:
            tl.extra.cuda.gdc_wait()
        return
    total, _, _, num_programs = _shares(
        most_programs, num_reqs, num_queries_ptr, prefix_lens_ptr, num_kv_heads, max_entries, max_queries,
        num_row_tiles, True, GROUP, BLOCK_ROWS, BLOCK_KEYS, BLOCK_REQS, MIN_UNITS,
    )  # fmt: skip
    # Items are ordered by row tile, then by request, then by KV head.
    units_before = 0
    item_units = 0
    for first_req in range(0, num_reqs, BLOCK_REQS):
        some_reqs = first_req + tl.arange(0, BLOCK_REQS)
        num_tiles, num_units = _units(
            some_reqs, num_reqs, num_queries_ptr, prefix_lens_ptr, max_queries, max_entries,
            True, GROUP, BLOCK_ROWS, BLOCK_KEYS,
        )  # fmt: skip
        tiles_before = tl.minimum(num_tiles, row_tile) + ((some_reqs < req_idx) & (num_tiles > row_tile)).to(tl.int32)
        units_before += tl.sum(tiles_before * num_units, axis=0)
        item_units += tl.sum(tl.where(some_reqs == req_idx, num_units, 0), axis=0)
    item_begin = units_before * num_kv_heads + kv_head * item_units
    first_program, last_program = _programs_of(item_begin, item_units, total, num_programs)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    if first_program == last_program:
        return
    row = first_row % BLOCK_ROWS + tl.arange(0, MERGE_ROWS)
    row_lse, acc = _merge_rows(
        row, part_out_ptr, part_lse_ptr, first_program, last_program - first_program + 1,
        BLOCK_ROWS, BLOCK_DIM, MERGE_ROWS, MERGE_PARTS,
    )  # fmt: skip
    token, first_head = tl.load(query_start_ptr + req_idx).to(tl.int64), kv_head * GROUP
    out_ptr += token * out_stride + first_head * out_head_stride
    if lse_ptr is not None:
        lse_ptr += token * lse_stride + first_head * lse_head_stride
    row += row_tile * BLOCK_ROWS
    _write_rows(
        row, row < num_rows, row_lse, acc, out_ptr, out_stride, out_head_stride,
        lse_ptr, lse_head_stride, lse_stride, GROUP, HEAD_SIZE, BLOCK_DIM,
    )  # fmt: skip
