"""The kernel of `accept`: one program a request."""

import triton
import triton.language as tl


@triton.jit
def _popcount(word):
    """Return how many bits of each 64-bit word are set."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _loose_kind(
    loose,
    req_state_idx,
    draft, expected, valid,  # [BLOCK] by node: its token, the target's sample in its place, whether it is a draft
    depth, above, mismatches,  # [BLOCK] its depth, its ancestors' bits and its own, mismatches among these
    score, entropy,  # [BLOCK]
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Return which rule lets each node differ from the target's sample, as [BLOCK]: 2 LOWEST or WINDOW, 3 SHIFT, 0."""
    rules_ptr, shares_ptr, windows_ptr, min_entropy, _ = loose
    rule = tl.load(rules_ptr + req_state_idx)
    window = tl.load(windows_ptr + req_state_idx)
    place_of_bit = tl.arange(0, BLOCK)
    score = tl.where(score == score, score, float("inf"))
    # A branch is known by its lowest node: ancestors precede their descendants, so that is the one at depth 1.
    branch = _popcount((above & -above) - 1)
    # [node, node]: the second is a draft of the first one's branch.
    peers = valid[None, :] & (branch[:, None] == branch[None, :])

    # LOWEST. Float64, where the product is exact: fused with the sum or not, the result is the same.
    not_after = (score[None, :] < score[:, None]) | (
        (score[None, :] == score[:, None]) & (place_of_bit[None, :] <= place_of_bit[:, None])
    )
    place = tl.sum((peers & not_after).to(tl.int32), axis=1)
    share = tl.load(shares_ptr + req_state_idx).to(tl.float64)
    num_peers = tl.sum(peers.to(tl.int32), axis=1)
    loosened = (place.to(tl.float64) <= share * num_peers.to(tl.float64) + FLAGS[3]) & ((rule & FLAGS[0]) != 0)
    # WINDOW. No more mismatches on the way to a node W further down: all between match.
    low, high = above.to(tl.int32), (above >> 32).to(tl.int32)
    half = tl.where((place_of_bit < 32)[None, :], low[:, None], high[:, None])
    on_way = ((half >> (place_of_bit % 32)[None, :]) & 1) != 0  # [node, node]: the second is the first or above it
    ends = on_way & (mismatches[:, None] == mismatches[None, :]) & (depth[:, None] - depth[None, :] == window)
    in_window = tl.max(ends.to(tl.int32), axis=0) != 0
    loosened |= in_window & (entropy > min_entropy) & ((rule & FLAGS[1]) != 0)
    # SHIFT
    drafted = tl.max((peers & (draft[None, :] == expected[:, None])).to(tl.int32), axis=1) != 0
    shifted = drafted & ((rule & FLAGS[2]) != 0)
    return tl.where(loosened, 2, tl.where(shifted, 3, 0))


@triton.jit
def _count(is_counted, counts, totals_ptr, BLOCK: tl.constexpr, NUM_SUMS: tl.constexpr):
    """Add a request's counts to the totals, where it `is_counted`."""
    num_drafts, num_accepted, deepest, exact, loosened, shifted = counts
    place = tl.arange(0, 8)
    first = tl.where(place == 0, 1, tl.where(place == 1, num_drafts, 0))
    middle = tl.where(place == 2, num_accepted, tl.where(place == 3, deepest, 0))
    last = tl.where(place == 4, exact, tl.where(place == 5, loosened, tl.where(place == 6, shifted, 0)))
    found = tl.where(is_counted, first + middle + last, 0).to(tl.int64)
    # Sums of integers: the order in which programs add does not show.
    tl.atomic_add(totals_ptr + place, found, mask=(place < NUM_SUMS) & (found != 0), sem="relaxed")
    position, one = tl.arange(0, BLOCK), tl.full([BLOCK], 1, tl.int64)
    is_accepted = position < tl.where(is_counted, num_accepted, 0)
    tl.atomic_add(totals_ptr + NUM_SUMS + position, one, mask=is_accepted, sem="relaxed")


# Vectors that may be slices of others: no variant for each alignment.
@triton.jit(
    do_not_specialize_on_alignment=[
        *("target_tokens_ptr", "draft_tokens_ptr", "cu_num_logits_ptr", "rows_ptr"),
        *("scores_ptr", "entropies_ptr", "may_loosen_ptr"),
    ]
)
def _accept_kernel(
    target_tokens_ptr, draft_tokens_ptr,  # [N]
    cu_num_logits_ptr,  # [R + 1]
    rows_ptr,  # [R]; None for strict chains that are not counted
    # Parents, depths, ancestors, [max_reqs, num_cols] each, their row stride; out: path [R, num_cols]. None for chains
    tree,
    # Rules, shares, windows, [max_reqs] each, the least entropy; out: kinds [R, num_cols]. None where all is strict
    loose,
    sums,  # Which rows have drafts [max_reqs]; in and out: totals [NUM_SUMS + num_cols - 1]. None: nothing is counted
    # Out: paths by row, [max_reqs, num_cols], their stride, accepted drafts by row [max_reqs]. None: not requested
    kept,
    scores_ptr, entropies_ptr, may_loosen_ptr,  # [N]; None where all is strict
    sampled_ptr,  # [R, num_cols]
    num_sampled_ptr,  # [R]
    num_cols,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,  # LOWEST, WINDOW, SHIFT, EPSILON; None where all is strict
    NUM_SUMS: tl.constexpr,
):  # fmt: skip
    """One request. Entries are its drafts, nodes 1 to BLOCK; what concerns pairs of them has 32 bits a pair at most.

    What a case has no use for is None, so that a strict chain compiles to loads, one minimum and stores. Arguments that
    go together come as a tuple, because each argument costs a launch time, None too.
    """
    req_idx = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx)
    num_logits = tl.minimum(tl.load(cu_num_logits_ptr + req_idx + 1) - start, num_cols)
    if rows_ptr is not None:
        req_state_idx = tl.load(rows_ptr + req_idx)

    place_of_bit = tl.arange(0, BLOCK)
    node = place_of_bit + 1
    is_draft = node < num_logits
    # Node 64 has the sign bit.
    bit = tl.where(is_draft, tl.full([BLOCK], 1, tl.int64) << place_of_bit.to(tl.int64), 0)
    if tree is not None:
        parents_ptr, depths_ptr, ancestors_ptr, table_stride, path_ptr = tree
        table_row = req_state_idx * table_stride
        parent = tl.load(parents_ptr + table_row + node, mask=is_draft, other=0)
        depth = tl.load(depths_ptr + table_row + node, mask=is_draft, other=0)
        above = tl.load(ancestors_ptr + table_row + node, mask=is_draft, other=0)
    else:
        parent, depth = place_of_bit, node
        above = tl.where(is_draft, (bit << 1) - 1, 0)
    draft = tl.load(draft_tokens_ptr + start + node, mask=is_draft, other=-1)
    expected = tl.load(target_tokens_ptr + start + parent, mask=is_draft, other=-1)

    valid = is_draft & (draft >= 0)
    exact = valid & (draft == expected)
    passes = exact
    mismatches = 0
    if loose is not None:
        # Distinct bits: their sum is their union.
        mismatches = _popcount(above & ~tl.sum(tl.where(exact, bit, 0), axis=0))  # on the way to the node
        entropy = tl.load(entropies_ptr + start + parent, mask=is_draft, other=0.0)
        score = tl.load(scores_ptr + start + node, mask=is_draft, other=0.0)
        rule = _loose_kind(
            loose, req_state_idx, draft, expected, valid, depth, above, mismatches, score, entropy, BLOCK, FLAGS
        )
        may_loosen = tl.load(may_loosen_ptr + start + node, mask=is_draft, other=0) != 0
        kind = tl.where(exact, 1, tl.where(valid & may_loosen, rule, 0))
        passes = kind != 0

    if tree is not None:
        RADIX: tl.constexpr = 2 * BLOCK  # more than a node's index or a count of nodes
        alive = is_draft & ((above & ~tl.sum(tl.where(passes, bit, 0), axis=0)) == 0)
        # One maximum for the greatest depth, within it the fewest mismatches, then the lowest node; 0 for the root.
        key = tl.max(tl.where(alive, (depth * RADIX - mismatches) * RADIX - node, 0), axis=0)
        last_depth = (key + RADIX * RADIX - 1) // (RADIX * RADIX)
        last = (last_depth * RADIX * RADIX - key) % RADIX
        on_path = (bit & tl.sum(tl.where(node == last, above, 0), axis=0)) != 0
    else:
        last_depth = tl.min(tl.where(passes, BLOCK, place_of_bit), axis=0)
        last = last_depth
        on_path = node <= last
    tl.store(num_sampled_ptr + req_idx, tl.minimum(last_depth + 1, num_logits))

    # The path's drafts, what the target samples after them, then zeros. Column 0, and the others, for which `node`
    # counts columns.
    emitted = tl.load(target_tokens_ptr + start + last, mask=num_logits > 0, other=0)
    is_column = node < num_cols
    sampled_ptr += req_idx * num_cols
    tl.store(sampled_ptr + depth - 1, draft, mask=on_path)
    tl.store(sampled_ptr, emitted, mask=last_depth == 0)
    tl.store(sampled_ptr + node, tl.where(node == last_depth, emitted, 0), mask=is_column & (node >= last_depth))
    if tree is not None:
        path_ptr += req_idx * num_cols
        tl.store(path_ptr, 0)
        tl.store(path_ptr + depth, node, mask=on_path)
        tl.store(path_ptr + node, node, mask=is_column & (node > last_depth))
    if loose is not None:
        kinds_ptr = loose[4] + req_idx * num_cols
        tl.store(kinds_ptr + depth - 1, kind, mask=on_path)
        tl.store(kinds_ptr, 0, mask=last_depth == 0)
        tl.store(kinds_ptr + node, tl.zeros([BLOCK], tl.int8), mask=is_column & (node >= last_depth))

    if kept is not None:
        kept_path_ptr, kept_stride, kept_count_ptr = kept
        kept_path_ptr += req_state_idx * kept_stride
        tl.store(kept_path_ptr, 0)
        if tree is not None:
            tl.store(kept_path_ptr + depth, node, mask=on_path)
            tl.store(kept_path_ptr + node, node, mask=is_column & (node > last_depth))
        else:
            tl.store(kept_path_ptr + node, node, mask=is_column)
        tl.store(kept_count_ptr + req_state_idx, tl.minimum(last_depth + 1, num_logits) - 1)
    if sums is not None:
        deepest, loosened, shifted = num_logits - 1, 0, 0
        if tree is not None:
            deepest = tl.max(tl.where(is_draft, depth, 0), axis=0)
        if loose is not None:
            loosened = tl.sum((on_path & (kind == 2)).to(tl.int32), axis=0)
            shifted = tl.sum((on_path & (kind == 3)).to(tl.int32), axis=0)
        has_draft_ptr, totals_ptr = sums
        is_counted = (num_logits > 1) & (tl.load(has_draft_ptr + req_state_idx) != 0)
        counts = (num_logits - 1, last_depth, deepest, last_depth - loosened - shifted, loosened, shifted)
        _count(is_counted, counts, totals_ptr, BLOCK, NUM_SUMS)
