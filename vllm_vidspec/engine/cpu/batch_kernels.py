"""Numpy twins of vLLM's kernels that prepare a step's batch and take down what it gave: see `kernels`."""

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


def prepare_pos_seq_lens(grid, k) -> None:
    """Write `pos` `[num_tokens]` and `seq_lens` `[num_reqs]`, zeros behind it."""
    num_reqs = grid[0] - 1
    computed = k.num_computed_tokens[k.idx_mapping[:num_reqs]]
    place, owner, i = _tokens(k.query_start_loc, num_reqs)
    k.pos[place] = computed[owner] + i
    k.seq_lens[:num_reqs] = computed + np.diff(k.query_start_loc[: num_reqs + 1])
    k.seq_lens[num_reqs : k.max_num_reqs] = 0


def prepare_rope_positions(grid, k) -> None:
    """Write `positions` `[NUM_DIMS, max_tokens]`: of prompts those in `[max_num_reqs * NUM_DIMS, max_model_len]`."""
    row = k.idx_mapping[: grid[0]].astype(np.int64)
    place, owner, i = _tokens(k.query_start_loc, grid[0])
    logical = k.num_computed_tokens[row][owner].astype(np.int64) + i
    is_prefill = (k.num_computed_tokens[row] < k.prefill_lens[row])[owner]
    text = logical + k.prefill_delta[row][owner]
    prompt = (row * k.prefill_positions_stride0)[owner] + logical
    for dim in range(k.NUM_DIMS):
        listed = k.prefill_positions.reshape(-1).take(prompt + dim * k.prefill_positions_stride1, mode="clip")
        k.positions[dim, place] = np.where(is_prefill, listed, text)


def combine_sampled_and_draft_tokens(grid, k) -> bool:
    """Write the last token `[max_num_reqs, 1]` and the drafts `[max_num_reqs, K]` of each request into `input_ids`."""
    if k.NUM_NEW_SAMPLED_TOKENS != 1:
        return False
    num_reqs = grid[0]
    row, (place, owner, i) = k.idx_mapping[:num_reqs], _tokens(k.cu_num_logits, num_reqs)
    num_logits = np.diff(k.cu_num_logits[: num_reqs + 1])
    first = k.query_start_loc[1 : num_reqs + 1] - num_logits
    k.logits_indices[place] = first[owner] + i
    is_decoding = k.seq_lens[:num_reqs] > k.prefill_len[row]
    takes_last = is_decoding & (k.seq_lens[:num_reqs] - num_logits >= k.prefill_len[row])
    k.input_ids[first[takes_last]] = k.last_sampled_tokens.reshape(-1)[row[takes_last]]
    is_draft = is_decoding[owner] & (i > 0)
    owner, i = owner[is_draft], i[is_draft]
    k.input_ids[first[owner] + i] = k.draft_tokens[row[owner], i - 1]
    return True


def expand_idx_mapping(grid, k) -> None:
    place, owner, i = _tokens(k.cu_num_logits, grid[0])
    k.expanded_idx_mapping[place], k.expanded_local_pos[place] = k.idx_mapping[owner], i


def gather_draft_sampled(grid, k) -> None:
    """Write the input token and the position of each of `num_logits` rows; -1 for what is no draft."""
    token, local = k.logits_indices[: k.num_logits], k.expanded_local_pos[: k.num_logits]
    k.pos[: k.num_logits] = k.positions[token]
    is_placeholder = (local > 0) & (k.positions[token] - local < k.prefill_len[k.expanded_idx_mapping[: k.num_logits]])
    k.draft_sampled[: k.num_logits] = np.where(is_placeholder, -1, k.input_ids[token])


def get_num_sampled_and_rejected(grid, k) -> None:
    num_reqs = grid[0]
    is_prefilling = k.seq_lens[:num_reqs] < k.prefill_len[k.idx_mapping[:num_reqs]]
    k.num_sampled[:num_reqs][is_prefilling] = 0
    rejected = np.diff(k.cu_num_logits[: num_reqs + 1]) - k.num_sampled[:num_reqs]
    k.num_rejected[:num_reqs] = np.where(is_prefilling, 0, rejected)


def post_update(grid, k) -> None:
    """Append what each request has sampled to its row of the tables; the counts and `query_start_loc` may be None."""
    batch = np.flatnonzero(k.idx_mapping[: grid[0]] >= 0)
    row, gained = k.idx_mapping[batch].astype(np.int64), k.num_sampled[batch]
    req, i = np.nonzero(np.arange(k.sampled_tokens.shape[1]) < gained[:, None])
    tokens, owner = k.sampled_tokens[batch[req], i], row[req]
    # A text that is full goes on in the next row, as the kernel's does; the last one ends where the memory does.
    texts, places = k.all_token_ids.reshape(-1, copy=False), owner * k.all_token_ids_stride + k.total_len[owner] + i
    texts[places[places < len(texts)]] = tokens[places < len(texts)]
    if k.output_bin_counts is not None:
        np.add.at(k.output_bin_counts, (owner, tokens), 1)
    has_more = gained > 0
    k.last_sampled_tokens.reshape(-1, copy=False)[row[has_more]] = k.sampled_tokens[
        batch[has_more], gained[has_more] - 1
    ]
    k.total_len[row] += gained
    lengths = 0 if k.query_start_loc is None else k.query_start_loc[batch + 1] - k.query_start_loc[batch]
    k.num_computed_tokens[row] += lengths - k.num_rejected[batch]


def apply_write(grid, k) -> bool:
    if k.MULTI_GROUP:
        return False
    flat, begin = k.output.reshape(-1, copy=False), 0
    writes = (array[: grid[0]].tolist() for array in (k.write_indices, k.write_starts, k.write_cu_lens))
    for row, start, end in zip(*writes, strict=True):
        place = row * k.output_stride + start
        flat[place : place + end - begin] = k.write_contents[begin:end]
        begin = end
    return True


def gather_block_tables(grid, k) -> None:
    """Copy a batch's rows, zeros behind them; the addresses `[num_groups]` are of tables `[max_num_reqs, stride]`."""
    num_groups, num_padded = grid
    rows = k.batch_idx_to_req_idx[: k.num_reqs].tolist()
    for group in range(num_groups):
        stride = int(k.block_table_strides[group])
        source = _memory(k.src_block_table_ptrs[group], (max(rows, default=0) + 1) * stride).reshape(-1, stride)
        target = _memory(k.dst_block_table_ptrs[group], num_padded * stride).reshape(-1, stride)
        for i, row in enumerate(rows):
            count = int(k.num_blocks[group, row])
            target[i, :count] = source[row, :count]
        target[k.num_reqs :] = 0


def compute_slot_mappings(grid, k) -> bool:
    """Write `slot_mappings` `[num_groups, max_num_tokens]`; the addresses are as in `gather_block_tables`."""
    if k.CP_SIZE != 1:
        return False
    num_groups, num_reqs = grid[0], grid[1] - 1
    place, owner, _ = _tokens(k.query_start_loc, num_reqs)
    row, positions = k.idx_mapping[:num_reqs].astype(np.int64)[owner], k.pos[place]
    is_real = row >= 0
    for group in range(num_groups):
        size = int(k.block_sizes[group])
        slots = k.slot_mappings[group]
        slots[k.query_start_loc[num_reqs] : k.max_num_tokens] = k.PAD_ID
        slots[place] = k.PAD_ID
        if k.slot_mapping_enabled[group]:
            entry = row[is_real] * k.block_table_strides[group] + positions[is_real] // size
            table = _memory(k.block_table_ptrs[group], int(entry.max(initial=0)) + 1)
            slots[place[is_real]] = table[entry].astype(np.int64) * size + positions[is_real] % size
    return True


def flatten_sampled(grid, k) -> None:
    """Write each request's tokens `[num_reqs, >= num_sampled]` from its first row of `[num_logits]` on."""
    req_idx, i = np.nonzero(np.arange(k.sampled.shape[1]) < k.num_sampled[: grid[0], None])
    k.flat_sampled[k.cu_num_logits[req_idx] + i] = k.sampled[req_idx, i]


def bilinear_pos_embed(grid, k) -> None:
    """Interpolate `[NUM_GRID ** 2, HIDDEN_DIM]` float32 into `[t * H * W, HIDDEN_DIM]`, in merged patches' order."""
    place = np.arange(k.H * k.W)
    block, local = place // k.M_SIZE**2, place % k.M_SIZE**2
    row = block // (k.W // k.M_SIZE) * k.M_SIZE + local // k.M_SIZE
    col = block % (k.W // k.M_SIZE) * k.M_SIZE + local % k.M_SIZE
    h, w = row.astype(_F32) * _F32(k.h_scale), col.astype(_F32) * _F32(k.w_scale)
    low, left = np.floor(h).astype(np.int32), np.floor(w).astype(np.int32)
    high, right = np.minimum(low + 1, k.NUM_GRID - 1), np.minimum(left + 1, k.NUM_GRID - 1)
    dh, dw = h - low.astype(_F32), w - left.astype(_F32)
    both = dh * dw
    corners = (
        (_F32(1) - dh - (dw - both), low, left),
        (dw - both, low, right),
        (dh - both, high, left),
        (both, high, right),
    )
    frame = np.zeros((len(place), k.HIDDEN_DIM), dtype=_F32)
    for share, y, x in corners:
        frame += share[:, None] * k.embed[y * k.NUM_GRID + x]
    k.output.reshape(-1, len(place), k.HIDDEN_DIM)[:] = frame
