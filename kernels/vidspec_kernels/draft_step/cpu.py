"""Loops of `begin_step` and `next_level`."""

import numpy as np

from vidspec_kernels.compiled import compiled


@compiled(
    "int64[:], int64[:], int32[:], boolean[:], float32[:], int64[:], "
    "int32[:], int32[:, :], int64[:, :], int32[:], int64[:], int32[:, :], int64[:], int32[:, :], "
    "int64[:], int32[:], float32[:], int64[:], int32[:], int64[:], int64[:], int32[:], int32[:, :], int32[:], "
    "int32[:], int64[:, :], int64[:], int32[:], int32[:, :], int64, int64, int64, int64, int64"
)
def begin_step(
    batch_rows, picked, num_sampled, is_verified, temperature, seeds,
    num_tokens, text, last_sampled, num_dropped, pos_delta, block_table, fed, path,
    out_rows, out_num_accepted, out_temperature, out_seeds, out_root_slot, out_root_pos, out_pos_delta, out_last_root,
    batch_table, out_level, input_ids, positions, slot_mapping, seq_lens, out_path,
    num_reqs, size, block_size, max_position, max_drafts,
):  # fmt: skip
    padding_row, max_blocks, num_cols = block_table.shape[0], block_table.shape[1], path.shape[1]
    out_level[0] = 0
    for b in range(num_reqs):
        i = picked[b] if len(picked) > 0 else b
        row = batch_rows[i]
        root = num_tokens[row] - 1 - num_dropped[row]
        for col in range(min((root + max_drafts) // block_size + 1, max_blocks)):
            batch_table[b, col] = block_table[row, col]
        verified = num_sampled[i] - 1
        accepted = max(verified, 0)
        if len(is_verified) > 0 and not is_verified[b]:
            verified = -1
        root_pos, delta = num_tokens[row] - 1, pos_delta[row]
        out_rows[b], out_num_accepted[b], out_seeds[b] = row, verified, seeds[row]
        out_temperature[b] = temperature[row] if len(temperature) > 0 else 0.0
        out_root_slot[b], out_root_pos[b], out_pos_delta[b] = root, root_pos, delta
        out_last_root[b], seq_lens[b] = root - max(verified, 0) - 1, root + 1

        last = accepted
        if num_cols > 0:
            for col in range(num_cols):
                out_path[b, col] = path[row, col]
            last = path[row, min(accepted, num_cols - 1)]
        is_missing = False
        if len(fed) > 0:
            is_missing = accepted > 0 and (fed[row] >> max(last - 1, 0)) & 1 == 0
            fed[row] = 0
        # The two tokens: 0 the one before the root, 1 the root.
        for which in range(2):
            entry, place = root - 1 + which, 2 * b + which
            slot = -1
            if 0 <= entry < max_blocks * block_size:
                slot = np.int64(block_table[row, entry // block_size]) * block_size + entry % block_size
            slot_mapping[place] = slot if which == 1 or is_missing else 0
            for axis in range(positions.shape[0]):
                positions[axis, place] = min(root_pos - 1 + which + delta, max_position)
        input_ids[2 * b] = text[row, max(num_tokens[row] - 2, 0)]
        input_ids[2 * b + 1] = last_sampled[row, 0]
    for b in range(num_reqs, size):
        out_rows[b], out_num_accepted[b], out_seeds[b], out_temperature[b] = padding_row, -1, 0, 0.0
        out_root_slot[b], out_root_pos[b], out_pos_delta[b], out_last_root[b], seq_lens[b] = 0, 0, 0, 0, 0
        for place in range(2 * b, 2 * b + 2):
            slot_mapping[place], input_ids[place] = -1, 0
            for axis in range(positions.shape[0]):
                positions[axis, place] = 0


@compiled(
    "int64[:], int32[:], int64[:], int64[:], int32[:, :], int64[:], int64[:, :], int64[:, :], int64[:, :], "
    "int64[:], int64[:, :], int64[:], int32[:], int32[:], int64[:, :], int64, int64, int64, int64"
)
def next_level(
    rows, root_slot, root_pos, pos_delta, batch_table, fed, nodes, tokens, ancestors,
    logical_pos, positions, slot_mapping, seq_lens, input_ids, masks, block_size, max_position, size, level,
):  # fmt: skip
    is_tree, padding_row, num_entries = len(nodes) > 0, fed.shape[0] - 1, batch_table.shape[1] * block_size
    width = nodes.shape[1] if is_tree else 1
    for b in range(size):
        row, root = rows[b], root_slot[b]
        is_real = row != padding_row
        logical = root_pos[b] + level if is_real else 0
        pos = min(logical + pos_delta[b], max_position) if is_real else 0
        seq_lens[b] = (root + 1 if is_tree else root + level + 1) if is_real else 0
        for f in range(width):
            place = b * width + f
            node = nodes[b, f] if is_tree else level
            is_node = is_real and node > 0
            slot = 0 if is_real and not is_node else -1
            if is_node:
                entry = root + node
                if entry < num_entries:
                    slot = np.int64(batch_table[b, entry // block_size]) * block_size + entry % block_size
                fed[row] |= np.int64(1) << (node - 1)
            logical_pos[place], slot_mapping[place] = logical, slot
            for axis in range(positions.shape[0]):
                positions[axis, place] = pos
            if is_tree:
                input_ids[place] = tokens[b, f] if is_node else 0
                masks[b, f] = ancestors[b, node] if is_node else 0
