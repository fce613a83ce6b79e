"""accept_loose: which drafts stand when some mismatches may be let through, by rules of each request's own."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, array_module, as_array, at_least, at_most, check_vector, launcher, use_triton

# Flags of `rules`.
LOWEST = 1  # LVSpec eq. 9-10: the share of the drafts with the lowest scores
WINDOW = 2  # FLy: an unsure target, and the next drafts all match
SHIFT = 4  # LVSpec eq. 11: the target's token is drafted at another position

MAX_LOOSE_DRAFTS = 64  # a node's ancestors are the bits of one word
_EPSILON = 1e-4  # 0.7 of 10 is 7, though 0.7 in float32 is less


@triton.jit
def _popcount(word):
    """Return how many bits of each 64-bit word are set."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56).to(tl.int32)


# Vectors that may be slices of others: no variant for each alignment.
@triton.jit(
    do_not_specialize_on_alignment=[
        *("target_tokens_ptr", "draft_tokens_ptr", "cu_num_logits_ptr", "rows_ptr"),
        *("scores_ptr", "entropies_ptr", "may_loosen_ptr"),
    ]
)
def _accept_loose_kernel(
    # [N]
    target_tokens_ptr,
    # [N]
    draft_tokens_ptr,
    # [R + 1]
    cu_num_logits_ptr,
    # [R]
    rows_ptr,
    # [max_reqs]
    rules_ptr,
    # [max_reqs]
    shares_ptr,
    # [max_reqs]
    windows_ptr,
    # [N]
    scores_ptr,
    # [N]
    entropies_ptr,
    # [N]
    may_loosen_ptr,
    min_entropy,
    # [max_reqs, num_cols]; any pointer for chains, as the next two
    parents_ptr,
    parents_stride,
    # [max_reqs, num_cols]
    depths_ptr,
    depths_stride,
    # [max_reqs, num_cols]
    ancestors_ptr,
    ancestors_stride,
    # [R, num_cols]
    sampled_ptr,
    # [R]
    num_sampled_ptr,
    # [R, num_cols]
    path_ptr,
    # [R, num_cols]
    kinds_ptr,
    num_cols,
    BLOCK: tl.constexpr,
    IS_TREE: tl.constexpr,
    LOWEST: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """One request. Entries are its drafts, nodes 1 to BLOCK; what concerns pairs of them has 32 bits a pair at most."""
    RADIX: tl.constexpr = 2 * BLOCK  # more than a node's index or a count of nodes
    req_idx = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx)
    num_logits = tl.minimum(tl.load(cu_num_logits_ptr + req_idx + 1) - start, num_cols)
    req_state_idx = tl.load(rows_ptr + req_idx)
    rule = tl.load(rules_ptr + req_state_idx)
    window = tl.load(windows_ptr + req_state_idx)

    place_of_bit = tl.arange(0, BLOCK)
    node = place_of_bit + 1
    is_draft = node < num_logits
    # Node 64 has the sign bit.
    one = tl.full([BLOCK], 1, tl.int64)
    bit = tl.where(is_draft, one << place_of_bit.to(tl.int64), 0)
    if IS_TREE:
        parent = tl.load(parents_ptr + req_state_idx * parents_stride + node, mask=is_draft, other=0)
        depth = tl.load(depths_ptr + req_state_idx * depths_stride + node, mask=is_draft, other=0)
        above = tl.load(ancestors_ptr + req_state_idx * ancestors_stride + node, mask=is_draft, other=0)
    else:
        parent = tl.where(is_draft, node - 1, 0)
        depth = tl.where(is_draft, node, 0)
        above = tl.where(is_draft, (bit << 1) - 1, 0)
    draft = tl.load(draft_tokens_ptr + start + node, mask=is_draft, other=-1)
    expected = tl.load(target_tokens_ptr + start + parent, mask=is_draft, other=-1)
    entropy = tl.load(entropies_ptr + start + parent, mask=is_draft, other=0.0)
    score = tl.load(scores_ptr + start + node, mask=is_draft, other=0.0)
    score = tl.where(score == score, score, float("inf"))
    may_loosen = tl.load(may_loosen_ptr + start + node, mask=is_draft, other=0) != 0

    valid = is_draft & (draft >= 0)
    exact = valid & (draft == expected)
    # Distinct bits: their sum is their union.
    mismatched = ~tl.sum(tl.where(exact, bit, 0), axis=0)
    mismatches = _popcount(above & mismatched)  # on the way to the node
    # A branch is known by its lowest node: ancestors precede their descendants, so that is the one at depth 1.
    branch = _popcount((above & -above) - 1)
    peers = valid[None, :] & (branch[:, None] == branch[None, :])  # [node, node]: the second is a draft of its branch

    # LOWEST. Float64, where the product is exact: fused with the sum or not, the result is the same.
    not_after = (score[None, :] < score[:, None]) | (
        (score[None, :] == score[:, None]) & (node[None, :] <= node[:, None])
    )
    place = tl.sum((peers & not_after).to(tl.int32), axis=1)
    share = tl.load(shares_ptr + req_state_idx).to(tl.float64)
    num_peers = tl.sum(peers.to(tl.int32), axis=1)
    loosened = (place.to(tl.float64) <= share * num_peers.to(tl.float64) + EPSILON) & ((rule & LOWEST) != 0)
    # WINDOW. No more mismatches on the way to a node W further down: all between match.
    low, high = above.to(tl.int32), (above >> 32).to(tl.int32)
    half = tl.where((place_of_bit < 32)[None, :], low[:, None], high[:, None])
    on_way = ((half >> (place_of_bit % 32)[None, :]) & 1) != 0  # [node, node]: the second is the first or above it
    ends = on_way & (mismatches[:, None] == mismatches[None, :]) & (depth[:, None] - depth[None, :] == window)
    in_window = tl.max(ends.to(tl.int32), axis=0) != 0
    loosened |= in_window & (entropy > min_entropy) & ((rule & WINDOW) != 0)
    # SHIFT
    drafted = tl.max((peers & (draft[None, :] == expected[:, None])).to(tl.int32), axis=1) != 0
    shifted = drafted & ((rule & SHIFT) != 0)
    kind = tl.where(exact, 1, tl.where(valid & may_loosen, tl.where(loosened, 2, tl.where(shifted, 3, 0)), 0))

    stands = tl.sum(tl.where(kind != 0, bit, 0), axis=0)
    alive = is_draft & ((above & ~stands) == 0)
    # One maximum for the greatest depth, within it the fewest mismatches, then the lowest node; 0 for the root.
    key = tl.max(tl.where(alive, (depth * RADIX - mismatches) * RADIX - node, 0), axis=0)
    last_depth = (key + RADIX * RADIX - 1) // (RADIX * RADIX)
    last = (last_depth * RADIX * RADIX - key) % RADIX
    num_sampled = tl.minimum(last_depth + 1, num_logits)
    tl.store(num_sampled_ptr + req_idx, num_sampled)

    path_nodes = tl.sum(tl.where(node == last, above, 0), axis=0)
    on_path = (bit & path_nodes) != 0
    sampled_ptr += req_idx * num_cols
    path_ptr += req_idx * num_cols
    kinds_ptr += req_idx * num_cols
    tl.store(path_ptr + depth, node, mask=on_path)
    tl.store(sampled_ptr + depth - 1, draft, mask=on_path)
    tl.store(kinds_ptr + depth - 1, kind, mask=on_path)
    emitted = tl.load(target_tokens_ptr + start + last, mask=num_logits > 0, other=0)
    # Column 0, then the others, for which `node` counts columns.
    tl.store(path_ptr, 0)
    tl.store(sampled_ptr, emitted, mask=last_depth == 0)
    tl.store(kinds_ptr, 0, mask=last_depth == 0)
    is_column = node < num_cols
    tl.store(sampled_ptr + node, emitted + tl.zeros([BLOCK], tl.int64), mask=is_column & (node == last_depth))
    tl.store(kinds_ptr + node, tl.zeros([BLOCK], tl.int8), mask=is_column & (node >= last_depth))
    beyond = is_column & (node >= num_sampled)
    tl.store(path_ptr + node, node, mask=beyond)
    tl.store(sampled_ptr + node, tl.zeros([BLOCK], tl.int64), mask=beyond)


def accept_loose(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    rules: Tensor,
    shares: Tensor,
    windows: Tensor,
    scores: Tensor,
    entropies: Tensor,
    may_loosen: Tensor,
    min_entropy: float,
    max_drafts: int,
    trees: tuple[Tensor, Tensor, Tensor] | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accept each request's longest path of drafts that match the target's samples or may differ from them.

    `accept_chain` and `tree_accept` with mismatches let through (METHODS 4). The draft of a node with parent p stands
    if it is the target's sample at p, its expected token. Else, only where `may_loosen` says so, by the first of these
    that the request's `rules` have:

    - LOWEST (LVSpec, eq. 9-10): it is among the floor(share * n) lowest scores of the n valid drafts of its branch,
      those that match counted too; of equal scores the lower node's is the lower, and NaN is the highest.
    - WINDOW (FLy): the target's entropy at p exceeds `min_entropy`, and some W drafts in a row below the node match.
    - SHIFT (LVSpec, eq. 11): its expected token is some valid draft of its branch.

    A branch is a child of the root with all below it; a chain is one branch. n counts drafts that have a row. The
    deepest node wins of those that stand together with all above them; of equally deep ones that with the fewest
    mismatches on its way, then the lowest. A draft that stands is emitted though the target sampled another token, so
    with any rule the output is no longer the target's own; with none it is that of `accept_chain` and `tree_accept`.

    Args:
        target_tokens: int64 [N], the target's sample at each logits row.
        draft_tokens: int64 [N], input token of each logits row: row i of a request is its node i, row 0 its root; -1 =
            not a draft, never stands.
        cu_num_logits: int32 [R + 1], first logits row of each request; at most max_drafts + 1 rows a request.
        rows: int64 [R], persistent row (`req_state_idx`) of each batch row.
        rules: int32 [max_reqs], sum of LOWEST, WINDOW and SHIFT; 0 lets no mismatch through.
        shares: float32 [max_reqs], lambda of LOWEST, 0 to 1.
        windows: int32 [max_reqs], W of WINDOW, >= 0; 0 leaves the entropy alone to decide.
        scores: float32 [N], of each logits row's own draft (its visual relevance, eq. 8).
        entropies: float32 [N], of the target's distribution after each logits row's input: a node's judges its
            children.
        may_loosen: bool [N], the draft of each logits row may stand though it differs.
        min_entropy: Compared in float32.
        max_drafts: K, 1 to 64.
        trees: None for chains, else the tables of `tree_accept`: parents int32, depths int32, ancestors int64, each
            [max_reqs, >= K + 1]. What they say of roots and of nodes without a row does not matter.
        impl: See `dispatch.use_triton`.

    Returns:
        sampled: int64 [R, K + 1], the accepted drafts of each request and the target's sample after them, then zeros.
        num_sampled: int32 [R], 1 + accepted drafts; 0 for a request without rows.
        path: int32 [R, K + 1], the accepted node at each depth from the root on, then each column's own index.
        kinds: int8 [R, K + 1], of each emitted token: 1 a draft that matches, 2 one that LOWEST or WINDOW let through,
            3 one that SHIFT did; 0 for the target's sample and beyond.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    tokens = (target_tokens, draft_tokens, cu_num_logits)
    settings = (rows, rules, shares, windows)
    signals = (scores, entropies, may_loosen)
    _check(tokens, settings, signals, max_drafts, trees)
    device, num_reqs, num_cols = target_tokens.device, cu_num_logits.shape[0] - 1, max_drafts + 1
    if not use_triton(impl, device):
        return accept_loose_reference(*tokens, *settings, *signals, min_entropy, max_drafts, trees)
    sampled = target_tokens.new_empty(num_reqs, num_cols)
    num_sampled = cu_num_logits.new_empty(num_reqs)
    path = cu_num_logits.new_empty(num_reqs, num_cols)
    kinds = cu_num_logits.new_empty(num_reqs, num_cols, dtype=torch.int8)
    parents, depths, ancestors = trees or (rules[:, None],) * 3
    if num_reqs > 0:
        launcher(_accept_loose_kernel, (num_reqs,), device)(
            *tokens,
            *settings,
            *signals,
            float(min_entropy),
            parents,
            parents.stride(0),
            depths,
            depths.stride(0),
            ancestors,
            ancestors.stride(0),
            sampled,
            num_sampled,
            path,
            kinds,
            num_cols,
            BLOCK=max(2, triton.next_power_of_2(max_drafts)),
            IS_TREE=trees is not None,
            LOWEST=LOWEST,
            WINDOW=WINDOW,
            SHIFT=SHIFT,
            EPSILON=_EPSILON,
        )
    return sampled, num_sampled, path, kinds


def _check(
    tokens: tuple[Tensor, Tensor, Tensor],
    settings: tuple[Tensor, Tensor, Tensor, Tensor],
    signals: tuple[Tensor, Tensor, Tensor],
    max_drafts: int,
    trees: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Assert what `accept_loose` says of its arguments."""
    (target_tokens, draft_tokens, cu_num_logits), (rows, rules, shares, windows) = tokens, settings
    device = target_tokens.device
    check_vector("target_tokens", target_tokens, torch.int64, device)
    check_vector("draft_tokens", draft_tokens, torch.int64, device)
    check_vector("cu_num_logits", cu_num_logits, torch.int32, device, min_len=1)
    assert 1 <= max_drafts <= MAX_LOOSE_DRAFTS, f"max_drafts {max_drafts}"
    check_vector("rows", rows, torch.int64, device)
    check_vector("rules", rules, torch.int32, device)
    check_vector("shares", shares, torch.float32, device)
    check_vector("windows", windows, torch.int32, device)
    num_reqs, num_rows, max_reqs = cu_num_logits.shape[0] - 1, target_tokens.shape[0], rules.shape[0]
    for name, signal, dtype in zip(
        ("scores", "entropies", "may_loosen"), signals, (torch.float32, torch.float32, torch.bool), strict=True
    ):
        check_vector(name, signal, dtype, device)
        assert signal.shape[0] == num_rows, f"{name}: expected {num_rows} entries, got {signal.shape[0]}"
    assert draft_tokens.shape[0] == num_rows, f"{num_rows} target rows, {draft_tokens.shape[0]} drafts"
    assert rows.shape[0] == num_reqs, f"rows: expected {num_reqs} entries, got {rows.shape[0]}"
    for name, setting in (("shares", shares), ("windows", windows)):
        assert setting.shape[0] == max_reqs, f"{name}: {setting.shape[0]} entries, rules {max_reqs}"
    if trees is None:
        return
    for name, table, dtype in zip(
        ("parents", "depths", "ancestors"), trees, (torch.int32, torch.int32, torch.int64), strict=True
    ):
        assert table.dtype == dtype and table.device == device and table.ndim == 2, f"{name}: {dtype} of two dimensions"
        assert table.shape[1] > max_drafts and table.stride(1) == 1, f"{name}: {max_drafts + 1} columns of unit stride"
        assert table.shape[0] == max_reqs, f"{name}: {table.shape[0]} rows, rules {max_reqs}"


def accept_loose_reference(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    rules: Tensor,
    shares: Tensor,
    windows: Tensor,
    scores: Tensor,
    entropies: Tensor,
    may_loosen: Tensor,
    min_entropy: float,
    max_drafts: int,
    trees: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `accept_loose` does, in numpy or torch without a loop: the specification. Same arguments and results."""
    xp = array_module(rows.device)
    num_cols, num_rows = max_drafts + 1, target_tokens.shape[0]
    bounds = xp.asarray(as_array(cu_num_logits), dtype=xp.int64)[:, None]  # [R + 1, 1]
    num_logits = bounds[1:] - bounds[:-1]  # [R, 1]
    col = as_array(torch.arange(num_cols, device=rows.device))  # [K + 1]
    path = col + xp.zeros_like(num_logits)  # [R, K + 1]
    if num_rows == 0:
        zeros = target_tokens.new_zeros(path.shape)
        return zeros, _as(torch.int32, num_logits[:, 0]), _as(torch.int32, path), _as(torch.int8, zeros)
    state_row = as_array(rows)
    row = at_most(bounds[:-1] + col, num_rows - 1)  # [R, K + 1]
    req_idx = as_array(torch.arange(len(state_row), device=rows.device))[:, None]

    # Of the drafts, [R, K], or [1, K] where it is the same in every chain. Nodes without a row may say anything.
    node = col[1:]  # [K]
    if trees is None:
        parent, depth, branch = col[None, :-1], node[None], xp.zeros_like(node)[None]
        on_way = (node <= node[:, None])[None]
    else:
        parents, depths, ancestors = (as_array(table)[state_row][:, 1:num_cols] for table in trees)
        parent = at_most(at_least(parents, 0), max_drafts)
        depth = xp.asarray(depths, dtype=xp.int64)
        branch = ancestors & -ancestors  # known by its lowest node: ancestors precede their descendants
        on_way = (ancestors[:, :, None] & (1 << col[:-1])) != 0
    has_row, draft_row = node < num_logits, row[:, 1:]
    draft = as_array(draft_tokens)[draft_row]
    valid = has_row & (draft >= 0)
    target, parent_row = as_array(target_tokens), row[req_idx, parent]
    expected = target[parent_row]
    exact = valid & (draft == expected)
    # Pairs of nodes are [R, K, K]. On the way: the second is the first or above it; peers: a draft of its branch.
    mismatches = (on_way & ~exact[:, None]).sum(2)
    peers = valid[:, None] & (branch[:, :, None] == branch[:, None])

    rule = as_array(rules)[state_row][:, None]  # [R, 1]
    score = as_array(scores)[draft_row]
    score = xp.where(score == score, score, float("inf"))[:, None]  # [R, 1, K]
    mine = score.swapaxes(1, 2)  # [R, K, 1]
    place = (peers & xp.where(node <= node[:, None], score <= mine, score < mine)).sum(2)
    share = xp.asarray(as_array(shares)[state_row], dtype=xp.float64)[:, None]
    loosened = (place <= share * peers.sum(2) + _EPSILON) & ((rule & LOWEST) != 0)
    # No more mismatches on the way to a node W further down: all between match.
    window = as_array(windows)[state_row][:, None, None]
    ends = on_way & has_row[:, :, None] & (mismatches[:, :, None] == mismatches[:, None])
    in_window = (ends & (depth[:, :, None] - depth[:, None] == window)).any(1)
    unsure = as_array(entropies)[parent_row] > min_entropy
    loosened |= in_window & unsure & ((rule & WINDOW) != 0)
    shifted = (peers & (draft[:, None] == expected[:, :, None])).any(2) & ((rule & SHIFT) != 0)
    may = valid & as_array(may_loosen)[draft_row]
    kind = xp.where(exact, 1, may * xp.where(loosened, 2, shifted * 3))

    # One maximum for the greatest depth, within it the fewest mismatches, then the lowest node; 0 for the root.
    alive = has_row & ~(on_way & (kind == 0)[:, None]).any(2)
    key = xp.amax(alive * ((depth * num_cols - mismatches) * num_cols - node), 1)[:, None]  # [R, 1]
    last, num_accepted = -key % num_cols, -(-key // num_cols**2)
    on_path = (on_way & (node == last)[:, :, None]).any(1)
    # A node that is not on the path writes what is there already, the root at depth 0.
    path[req_idx, depth * on_path] = node * on_path
    num_sampled = xp.minimum(num_accepted + 1, num_logits)
    sampled = target[row[req_idx, path]] * (col < num_sampled)
    kinds = xp.zeros_like(path)
    follows, is_accepted = path[:, 1:] - 1, node <= num_accepted
    sampled[:, :-1] = xp.where(is_accepted, draft[req_idx, follows], sampled[:, :-1])
    kinds[:, :-1] = kind[req_idx, follows] * is_accepted
    return torch.as_tensor(sampled), _as(torch.int32, num_sampled[:, 0]), _as(torch.int32, path), _as(torch.int8, kinds)


def _as(dtype: torch.dtype, array: Any) -> Tensor:
    return torch.as_tensor(array).to(dtype)
