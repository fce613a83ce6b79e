"""Loop of `place_trees`."""

from vidspec_kernels.compiled import compiled


@compiled(
    "int64[:], int32[:], int32[:], int32[:, :], int64[:, :], int64[:, :], int64[:, :], boolean, "
    "int32[:], int32[:], int32[:], int32[:], int64[:, :], int64"
)
def place_trees(
    idx_mapping, query_start_loc, seq_lens, depths, ancestors, positions, out_positions, is_apart,
    query_start, num_queries, prefix_lens, roots, masks, size,
):  # fmt: skip
    num_reqs, num_cols = len(idx_mapping), depths.shape[1]
    for b in range(num_reqs):
        row, start = idx_mapping[b], query_start_loc[b]
        num_tokens = query_start_loc[b + 1] - start
        root, is_tree = seq_lens[b] - num_tokens, num_tokens <= num_cols
        query_start[b], num_queries[b] = start if is_tree else 0, num_tokens if is_tree else 0
        prefix_lens[b], roots[b] = root + 1 if is_tree else 0, root
        for node in range(num_cols):
            masks[b, node] = ancestors[row, node] if node < num_queries[b] else 0
        for axis in range(positions.shape[0]):
            first = positions[axis, start] if num_tokens > 0 else 0
            if is_apart:
                for token in range(start, start + num_tokens):
                    out_positions[axis, token] = positions[axis, token]
            for node in range(num_queries[b]):
                # A chain's node is at its own depth: its positions are right, and those of media in a prompt are none.
                if depths[row, node] != node:
                    out_positions[axis, start + node] = first + depths[row, node]
    for b in range(num_reqs, size):
        query_start[b], num_queries[b], prefix_lens[b], roots[b] = 0, 0, 0, 0
        masks[b, :] = 0
