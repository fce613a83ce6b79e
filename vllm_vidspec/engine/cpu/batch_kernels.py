"""Numpy twins of vLLM's kernels that prepare a step's batch and take down what it gave: see `kernels`. CPU engine only.

What this project never asks for, as context parallelism, is left to the kernel.
"""

import ctypes

import numpy as np

_F32 = np.float32


def _tokens(query_start_loc: np.ndarray, num_reqs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of a ragged batch: place, request and place in the request, [num_tokens] each."""
    starts = query_start_loc[: num_reqs + 1].astype(np.int64)
    place = np.arange(starts[0], starts[-1])
    owner = np.repeat(np.arange(num_reqs), np.diff(starts))
    return place, owner, place - starts[owner]


def _memory(address: np.uint64, size: int) -> np.ndarray:
    """Return `size` int32 that lie at an address."""
    return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_int32)), (size,))


def prepare_pos_seq_lens(grid, pos, seq_lens, idx_mapping, query_start_loc, num_computed_tokens, max_num_reqs) -> None:
    """Write `pos` `[num_tokens]` and `seq_lens` `[num_reqs]`, zeros behind it."""
    num_reqs = grid[0] - 1
    computed = num_computed_tokens[idx_mapping[:num_reqs]]
    place, owner, i = _tokens(query_start_loc, num_reqs)
    pos[place] = computed[owner] + i
    seq_lens[:num_reqs] = computed + np.diff(query_start_loc[: num_reqs + 1])
    seq_lens[num_reqs:max_num_reqs] = 0


def prepare_rope_positions(
    grid,
    positions,
    prefill_positions,
    prefill_positions_stride0,
    prefill_positions_stride1,
    prefill_delta,
    idx_mapping,
    query_start_loc,
    prefill_lens,
    num_computed_tokens,
    NUM_DIMS,
) -> None:
    """Write `positions` `[NUM_DIMS, max_tokens]`: of prompts those in `[max_num_reqs * NUM_DIMS, max_model_len]`."""
    row = idx_mapping[: grid[0]].astype(np.int64)
    place, owner, i = _tokens(query_start_loc, grid[0])
    logical = num_computed_tokens[row][owner].astype(np.int64) + i
    is_prefill = (num_computed_tokens[row] < prefill_lens[row])[owner]
    text = logical + prefill_delta[row][owner]
    prompt = (row * prefill_positions_stride0)[owner] + logical
    for dim in range(NUM_DIMS):
        listed = prefill_positions.reshape(-1).take(prompt + dim * prefill_positions_stride1, mode="clip")
        positions[dim, place] = np.where(is_prefill, listed, text)


def combine_sampled_and_draft_tokens(
    grid,
    input_ids,
    idx_mapping,
    last_sampled_tokens,
    query_start_loc,
    seq_lens,
    prefill_len,
    draft_tokens,
    cu_num_logits,
    logits_indices,
    NUM_NEW_SAMPLED_TOKENS,
) -> bool:
    """Write the last token `[max_num_reqs, 1]` and the drafts `[max_num_reqs, K]` of each request into `input_ids`."""
    if NUM_NEW_SAMPLED_TOKENS not in (None, 1):
        return False
    num_reqs = grid[0]
    row, (place, owner, i) = idx_mapping[:num_reqs], _tokens(cu_num_logits, num_reqs)
    num_logits = np.diff(cu_num_logits[: num_reqs + 1])
    first = query_start_loc[1 : num_reqs + 1] - num_logits
    logits_indices[place] = first[owner] + i
    is_decoding = seq_lens[:num_reqs] > prefill_len[row]
    takes_last = is_decoding & (seq_lens[:num_reqs] - num_logits >= prefill_len[row])
    input_ids[first[takes_last]] = last_sampled_tokens.reshape(-1)[row[takes_last]]
    is_draft = is_decoding[owner] & (i > 0)
    owner, i = owner[is_draft], i[is_draft]
    input_ids[first[owner] + i] = draft_tokens[row[owner], i - 1]
    return True


def expand_idx_mapping(grid, idx_mapping, expanded_idx_mapping, expanded_local_pos, cu_num_logits) -> None:
    place, owner, i = _tokens(cu_num_logits, grid[0])
    expanded_idx_mapping[place], expanded_local_pos[place] = idx_mapping[owner], i


def gather_draft_sampled(
    grid,
    draft_sampled,
    pos,
    input_ids,
    positions,
    logits_indices,
    expanded_idx_mapping,
    expanded_local_pos,
    prefill_len,
    num_logits,
) -> None:
    """Write the input token and the position of each of `num_logits` rows; -1 for what is no draft."""
    token, local = logits_indices[:num_logits], expanded_local_pos[:num_logits]
    pos[:num_logits] = positions[token]
    is_placeholder = (local > 0) & (positions[token] - local < prefill_len[expanded_idx_mapping[:num_logits]])
    draft_sampled[:num_logits] = np.where(is_placeholder, -1, input_ids[token])


def get_num_sampled_and_rejected(
    grid, num_sampled, num_rejected, seq_lens, cu_num_logits, idx_mapping, prefill_len
) -> None:
    num_reqs = grid[0]
    is_prefilling = seq_lens[:num_reqs] < prefill_len[idx_mapping[:num_reqs]]
    num_sampled[:num_reqs][is_prefilling] = 0
    rejected = np.diff(cu_num_logits[: num_reqs + 1]) - num_sampled[:num_reqs]
    num_rejected[:num_reqs] = np.where(is_prefilling, 0, rejected)


def post_update(
    grid,
    idx_mapping,
    num_computed_tokens,
    last_sampled_tokens,
    output_bin_counts,
    sampled_tokens,
    num_sampled,
    num_rejected,
    query_start_loc,
    all_token_ids,
    all_token_ids_stride,
    total_len,
) -> None:
    """Append what each request has sampled to its row of the tables; the counts and `query_start_loc` may be None."""
    batch = np.flatnonzero(idx_mapping[: grid[0]] >= 0)
    row, gained = idx_mapping[batch].astype(np.int64), num_sampled[batch]
    req, i = np.nonzero(np.arange(sampled_tokens.shape[1]) < gained[:, None])
    tokens, owner = sampled_tokens[batch[req], i], row[req]
    # A text that is full goes on in the next row, as the kernel's does; the last one ends where the memory does.
    texts, places = all_token_ids.reshape(-1, copy=False), owner * all_token_ids_stride + total_len[owner] + i
    texts[places[places < len(texts)]] = tokens[places < len(texts)]
    if output_bin_counts is not None:
        np.add.at(output_bin_counts, (owner, tokens), 1)
    has_more = gained > 0
    last_sampled_tokens.reshape(-1, copy=False)[row[has_more]] = sampled_tokens[batch[has_more], gained[has_more] - 1]
    total_len[row] += gained
    lengths = 0 if query_start_loc is None else query_start_loc[batch + 1] - query_start_loc[batch]
    num_computed_tokens[row] += lengths - num_rejected[batch]


def apply_write(
    grid, output, output_stride, write_indices, write_starts, write_contents, write_cu_lens, MULTI_GROUP
) -> bool:
    """Write pieces of the contents into rows of the output."""
    if MULTI_GROUP:
        return False
    flat, begin = output.reshape(-1, copy=False), 0
    writes = (array[: grid[0]].tolist() for array in (write_indices, write_starts, write_cu_lens))
    for row, start, end in zip(*writes, strict=True):
        place = row * output_stride + start
        flat[place : place + end - begin] = write_contents[begin:end]
        begin = end
    return True


def gather_block_tables(
    grid, batch_idx_to_req_idx, src_block_table_ptrs, dst_block_table_ptrs, block_table_strides, num_blocks, num_reqs
) -> None:
    """Copy a batch's rows, zeros behind them; the addresses `[num_groups]` are of tables `[max_num_reqs, stride]`."""
    num_groups, num_padded = grid
    rows = batch_idx_to_req_idx[:num_reqs].tolist()
    for group in range(num_groups):
        stride = int(block_table_strides[group])
        source = _memory(src_block_table_ptrs[group], (max(rows, default=0) + 1) * stride).reshape(-1, stride)
        target = _memory(dst_block_table_ptrs[group], num_padded * stride).reshape(-1, stride)
        for i, row in enumerate(rows):
            count = int(num_blocks[group, row])
            target[i, :count] = source[row, :count]
        target[num_reqs:] = 0


def compute_slot_mappings(
    grid,
    max_num_tokens,
    idx_mapping,
    query_start_loc,
    pos,
    block_table_ptrs,
    block_table_strides,
    block_sizes,
    slot_mapping_enabled,
    slot_mappings,
    CP_SIZE,
    PAD_ID,
) -> bool:
    """Write `slot_mappings` `[num_groups, max_num_tokens]`; the addresses are as in `gather_block_tables`."""
    if CP_SIZE != 1:
        return False
    num_groups, num_reqs = grid[0], grid[1] - 1
    place, owner, _ = _tokens(query_start_loc, num_reqs)
    row, positions = idx_mapping[:num_reqs].astype(np.int64)[owner], pos[place]
    is_real = row >= 0
    for group in range(num_groups):
        size = int(block_sizes[group])
        slots = slot_mappings[group]
        slots[query_start_loc[num_reqs] : max_num_tokens] = PAD_ID
        slots[place] = PAD_ID
        if slot_mapping_enabled[group]:
            entry = row[is_real] * block_table_strides[group] + positions[is_real] // size
            table = _memory(block_table_ptrs[group], int(entry.max(initial=0)) + 1)
            slots[place[is_real]] = table[entry].astype(np.int64) * size + positions[is_real] % size
    return True


def flatten_sampled(grid, flat_sampled, sampled, num_sampled, cu_num_logits) -> None:
    """Write each request's tokens `[num_reqs, >= num_sampled]` from its first row of `[num_logits]` on."""
    req_idx, i = np.nonzero(np.arange(sampled.shape[1]) < num_sampled[: grid[0], None])
    flat_sampled[cu_num_logits[req_idx] + i] = sampled[req_idx, i]


def bilinear_pos_embed(grid, embed, output, H, W, h_scale, w_scale, NUM_GRID, M_SIZE, HIDDEN_DIM) -> None:
    """Of Qwen3-VL's tower: interpolate `[NUM_GRID ** 2, HIDDEN_DIM]` float32 into `[t * H * W, HIDDEN_DIM]`, in the
    order of merged patches.
    """
    place = np.arange(H * W)
    block, local = place // M_SIZE**2, place % M_SIZE**2
    row, col = block // (W // M_SIZE) * M_SIZE + local // M_SIZE, block % (W // M_SIZE) * M_SIZE + local % M_SIZE
    h, w = row.astype(_F32) * _F32(h_scale), col.astype(_F32) * _F32(w_scale)
    low, left = np.floor(h).astype(np.int32), np.floor(w).astype(np.int32)
    high, right = np.minimum(low + 1, NUM_GRID - 1), np.minimum(left + 1, NUM_GRID - 1)
    dh, dw = h - low.astype(_F32), w - left.astype(_F32)
    both = dh * dw
    corners = (
        (_F32(1) - dh - (dw - both), low, left),
        (dw - both, low, right),
        (dh - both, high, left),
        (both, high, right),
    )
    frame = np.zeros((len(place), HIDDEN_DIM), dtype=_F32)
    for share, y, x in corners:
        frame += share[:, None] * embed[y * NUM_GRID + x]
    output.reshape(-1, len(place), HIDDEN_DIM)[:] = frame
