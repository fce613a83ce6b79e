"""accept: which drafts stand, strictly or by each request's rules, and what is counted; one program a request."""

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import (
    Impl,
    array_module,
    as_array,
    at_least,
    at_most,
    check_vector,
    known,
    launch,
    launcher,
    on_host,
    use_triton,
)

# Flags of `Looseness.rules`.
LOWEST = 1  # LVSpec eq. 9-10: the share of the drafts with the lowest scores
WINDOW = 2  # FLy: an unsure target, and the next drafts all match
SHIFT = 4  # LVSpec eq. 11: the target's token is drafted at another position

MAX_DRAFTS = 64  # a node's ancestors are the bits of one word
EPSILON = 1e-4  # 0.7 of 10 is 7, though 0.7 in float32 is less
# Arguments of a launch that the tally does not settle.
_CHANGING = (
    *("target_tokens_ptr", "draft_tokens_ptr", "cu_num_logits_ptr", "rows_ptr", "tree", "loose", "by_kind_ptr"),
    *("scores_ptr", "entropies_ptr", "may_loosen_ptr", "sampled_ptr", "num_sampled_ptr"),
)


class TreeShapes(NamedTuple):
    """The shapes of the drafts by persistent row; a chain is a tree too.

    Node 0 is the root (the last committed token), drafts 1 to K follow with parents[i] < i, so that every prefix is a
    tree too. What the tables say of a root's parent and depth, and of nodes without a logits row, does not matter.

    Attributes:
        rows: int64 [R], persistent row (`req_state_idx`) of each request.
        parents: int32 [max_reqs, >= K + 1], parent of each node; unit stride in its rows, all three of one stride.
        depths: int32 [max_reqs, >= K + 1], depth of each node.
        ancestors: int64 [max_reqs, >= K + 1]; bit j - 1 of node i: node j is i or above it. 0 for the root.
    """

    rows: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor


class Looseness(NamedTuple):
    """Which mismatches of a verify step may stand.

    Attributes:
        rows: int64 [R], persistent row of each request.
        rules: int32 [max_reqs], sum of LOWEST, WINDOW and SHIFT; 0 lets no mismatch through.
        shares: float32 [max_reqs], lambda of LOWEST, 0 to 1.
        windows: int32 [max_reqs], W of WINDOW, >= 0; 0 leaves the entropy alone to decide.
        scores: float32 [N], of each logits row's own draft (its visual relevance, eq. 8).
        entropies: float32 [N], normalised, of what the target samples after each logits row's input: a node's judges
            its children.
        may_loosen: bool [N], nothing forbids that the draft of a logits row stands though it differs.
        min_entropy: Above it the target is unsure; compared in float32.
    """

    rows: Tensor
    rules: Tensor
    shares: Tensor
    windows: Tensor
    scores: Tensor
    entropies: Tensor
    may_loosen: Tensor
    min_entropy: float


class Tally(NamedTuple):
    """What a step adds to running totals, and what is kept of each request until its next step.

    Attributes:
        rows: int64 [R], persistent row of each request.
        has_draft: bool [max_reqs], whether a request's drafts are real; those of others are not counted.
        totals: int64 [>= 7 + K], added to. Of the requests with drafts: how many, their drafts, those that stand, the
            depth of their deepest drafts, those that stand by kind (1, 2, 3), and those that stand at each depth.
        by_kind: int64 [R, 3], written: each request's drafts that stand, by kind. None: nobody asks.
        path: int32 [max_reqs, >= K + 1], unit stride in its rows, written: each request's accepted path, as `accept`
            returns it of trees; of a chain each column's own index. None where all drafts are chains for good.
        num_accepted: int32 [max_reqs], written: how many drafts are on the path; -1 of a request without rows. Comes
            and is missing with `path`.
        known: Launches that were checked and compiled before (see `dispatch.launch`), of a caller whose tables, those
            of shapes and rules among them, are the same in every step. None: each is checked anew.
    """

    rows: Tensor
    has_draft: Tensor
    totals: Tensor
    by_kind: Tensor | None = None
    path: Tensor | None = None
    num_accepted: Tensor | None = None
    known: dict[Any, Any] | None = None


NUM_SUMS = 7  # of `Tally.totals` before those by depth


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
def _accept_kernel(
    # [N]
    target_tokens_ptr,
    # [N]
    draft_tokens_ptr,
    # [R + 1]
    cu_num_logits_ptr,
    # [R]; None for strict chains that nobody counts
    rows_ptr,
    # Parents, depths, ancestors, [max_reqs, num_cols] each, their row stride; out: path [R, num_cols]. None for chains
    tree,
    # Rules, shares, windows, [max_reqs] each, the least entropy; out: kinds [R, num_cols]. None where all is strict
    loose,
    # Which rows have drafts [max_reqs]; in and out: totals [NUM_SUMS + num_cols - 1]. None where nobody counts
    sums,
    # Out: [R, 3]; None where nobody asks
    by_kind_ptr,
    # Out: paths by row, [max_reqs, num_cols], their stride, accepted drafts by row [max_reqs]. None where nobody asks
    kept,
    # [N]; None where all is strict, as the next two
    scores_ptr,
    entropies_ptr,
    may_loosen_ptr,
    # [R, num_cols]
    sampled_ptr,
    # [R]
    num_sampled_ptr,
    num_cols,
    BLOCK: tl.constexpr,
    # LOWEST, WINDOW, SHIFT, EPSILON; None where all is strict
    FLAGS: tl.constexpr,
    NUM_SUMS: tl.constexpr,
):
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
    stands = exact
    mismatches = 0
    if loose is not None:
        rules_ptr, shares_ptr, windows_ptr, min_entropy, kinds_ptr = loose
        rule = tl.load(rules_ptr + req_state_idx)
        window = tl.load(windows_ptr + req_state_idx)
        entropy = tl.load(entropies_ptr + start + parent, mask=is_draft, other=0.0)
        score = tl.load(scores_ptr + start + node, mask=is_draft, other=0.0)
        score = tl.where(score == score, score, float("inf"))
        may_loosen = tl.load(may_loosen_ptr + start + node, mask=is_draft, other=0) != 0
        # Distinct bits: their sum is their union.
        mismatched = ~tl.sum(tl.where(exact, bit, 0), axis=0)
        mismatches = _popcount(above & mismatched)  # on the way to the node
        # A branch is known by its lowest node: ancestors precede their descendants, so that is the one at depth 1.
        branch = _popcount((above & -above) - 1)
        # [node, node]: the second is a draft of the first one's branch.
        peers = valid[None, :] & (branch[:, None] == branch[None, :])

        # LOWEST. Float64, where the product is exact: fused with the sum or not, the result is the same.
        not_after = (score[None, :] < score[:, None]) | (
            (score[None, :] == score[:, None]) & (node[None, :] <= node[:, None])
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
        kind = tl.where(exact, 1, tl.where(valid & may_loosen, tl.where(loosened, 2, tl.where(shifted, 3, 0)), 0))
        stands = kind != 0

    if tree is not None:
        RADIX: tl.constexpr = 2 * BLOCK  # more than a node's index or a count of nodes
        alive = is_draft & ((above & ~tl.sum(tl.where(stands, bit, 0), axis=0)) == 0)
        # One maximum for the greatest depth, within it the fewest mismatches, then the lowest node; 0 for the root.
        key = tl.max(tl.where(alive, (depth * RADIX - mismatches) * RADIX - node, 0), axis=0)
        last_depth = (key + RADIX * RADIX - 1) // (RADIX * RADIX)
        last = (last_depth * RADIX * RADIX - key) % RADIX
        on_path = (bit & tl.sum(tl.where(node == last, above, 0), axis=0)) != 0
    else:
        last_depth = tl.min(tl.where(stands, BLOCK, place_of_bit), axis=0)
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
        kinds_ptr += req_idx * num_cols
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
        has_draft_ptr, totals_ptr = sums
        num_drafts = tl.maximum(num_logits - 1, 0)
        num_drafts = tl.where(tl.load(has_draft_ptr + req_state_idx) != 0, num_drafts, 0)
        is_counted = num_drafts > 0
        num_accepted = tl.where(is_counted, last_depth, 0)
        if tree is not None:
            deepest = tl.where(is_counted, tl.max(tl.where(is_draft, depth, 0), axis=0), 0)
        else:
            deepest = num_drafts
        loosened, shifted = 0, 0
        if loose is not None:
            loosened = tl.where(is_counted, tl.sum((on_path & (kind == 2)).to(tl.int32), axis=0), 0)
            shifted = tl.where(is_counted, tl.sum((on_path & (kind == 3)).to(tl.int32), axis=0), 0)
        exact = num_accepted - loosened - shifted
        place = tl.arange(0, 8)
        first = tl.where(place == 0, is_counted.to(tl.int32), tl.where(place == 1, num_drafts, 0))
        middle = tl.where(place == 2, num_accepted, tl.where(place == 3, deepest, 0))
        last = tl.where(place == 4, exact, tl.where(place == 5, loosened, tl.where(place == 6, shifted, 0)))
        found = (first + middle + last).to(tl.int64)
        # Sums of integers: the order in which programs add does not show.
        tl.atomic_add(totals_ptr + place, found, mask=(place < NUM_SUMS) & (found != 0), sem="relaxed")
        one = tl.full([BLOCK], 1, tl.int64)
        tl.atomic_add(totals_ptr + NUM_SUMS + place_of_bit, one, mask=place_of_bit < num_accepted, sem="relaxed")
        if by_kind_ptr is not None:
            by_kind_ptr += req_idx * 3
            tl.store(by_kind_ptr + place - 4, found, mask=(place >= 4) & (place < 7))


def accept(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    max_drafts: int,
    trees: TreeShapes | None = None,
    looseness: Looseness | None = None,
    tally: Tally | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Accept each request's longest path of drafts that match the target's samples or may differ from them.

    Shared-noise coupling (METHODS 0; Daliri, Musco, Suresh 2025): the target is sampled at every logits row as
    vanilla decoding would. The draft of a node with parent p stands if it is the target's sample at p, its expected
    token. Else, only where `may_loosen` says so (METHODS 4), by the first of these that the request's `rules` have:

    - LOWEST (LVSpec, eq. 9-10): it is among the floor(share * n) lowest scores of the n valid drafts of its branch,
      those that match counted too; of equal scores the lower node's is the lower, and NaN is the highest.
    - WINDOW (FLy): the target's entropy at p exceeds `min_entropy`, and some W drafts in a row below the node match.
    - SHIFT (LVSpec, eq. 11): its expected token is some valid draft of its branch.

    A branch is a child of the root with all below it; a chain is one branch. n counts drafts that have a row. The
    deepest node wins of those that stand together with all above them (siblings may hold the same token); of equally
    deep ones that with the fewest mismatches on its way, then the lowest. A mismatch that stands is emitted though the
    target sampled another token; without any rule every emitted token is the target's own.

    Args:
        target_tokens: int64 [N], the target's sample at each logits row.
        draft_tokens: int32 [N], input token of each logits row: row i of a request is its node i, row 0 its root; -1 =
            not a draft, never stands.
        cu_num_logits: int32 [R + 1], first logits row of each request; at most max_drafts + 1 rows a request.
        max_drafts: K, 0 to 64; of trees and loose requests at least 1.
        trees: None: all are chains.
        looseness: None: no mismatch stands. Its rows are those of the trees, and of the tally.
        tally: What is counted and kept of the step; None: nothing.
        impl: See `dispatch.use_triton`.

    Returns:
        sampled: int64 [R, K + 1], the accepted drafts of each request and the target's sample after them, then zeros.
        num_sampled: int32 [R], 1 + accepted drafts; 0 for a request without rows.
        path: int32 [R, K + 1], the accepted node at each depth from the root on, then each column's own index; None
            for chains.
        kinds: int8 [R, K + 1], of each emitted token: 1 a draft that matches, 2 one that LOWEST or WINDOW let through,
            3 one that SHIFT did; 0 for the target's sample and beyond. None without looseness.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    plans, key = _plans(max_drafts, trees, looseness, tally)
    plan = None if impl == "torch" else known(plans, _accept_kernel, key)
    if plan is None and (key is None or key not in plans):
        _check(target_tokens, draft_tokens, cu_num_logits, max_drafts, trees, looseness, tally)
        if key is not None:
            plans[key] = True
    if plan is None and not use_triton(impl, target_tokens.device):
        run = on_host(impl, target_tokens.device, accept_reference)
        return run(target_tokens, draft_tokens, cu_num_logits, max_drafts, trees, looseness, tally)
    num_reqs, num_cols = cu_num_logits.shape[0] - 1, max_drafts + 1
    sampled = target_tokens.new_empty(num_reqs, num_cols)
    num_sampled = cu_num_logits.new_empty(num_reqs)
    rows = path = kinds = tree = loose = by_kind = None
    signals: Sequence[Tensor | None] = (None,) * 3
    if trees is not None:
        path = cu_num_logits.new_empty(num_reqs, num_cols)
        rows, *tables = trees
        tree = (*tables, trees.parents.stride(0), path)
    if looseness is not None:
        kinds = cu_num_logits.new_empty(num_reqs, num_cols, dtype=torch.int8)
        rows, *settings = looseness
        loose, signals = (*settings[:3], float(looseness.min_entropy), kinds), settings[3:6]
    if tally is not None:
        rows, by_kind = tally.rows, tally.by_kind
    if num_reqs > 0:
        step = (target_tokens, draft_tokens, cu_num_logits, rows, tree, loose, by_kind, *signals, sampled, num_sampled)
        if plan is not None:
            plan((num_reqs,), *step)
        else:
            _launch(step, max_drafts, loose is not None, tally, plans, key)
    return sampled, num_sampled, path, kinds


def _plans(
    max_drafts: int, trees: TreeShapes | None, looseness: Looseness | None, tally: Tally | None
) -> tuple[dict[Any, Any], Hashable]:
    """Return the launches that are known, and the key of these arguments among them; None where nobody keeps any.

    What stays of a launch is the tally's, by its identity: the plan keeps it alive, so that nothing else can have it.
    """
    if tally is None or tally.known is None:
        return {}, None
    kept = (tally.has_draft, tally.totals, tally.path, tally.num_accepted)
    return tally.known, (max_drafts, trees is None, looseness is None, tally.by_kind is None, *map(id, kept))


def _launch(
    step: tuple[Any, ...],
    max_drafts: int,
    is_loose: bool,
    tally: Tally | None,
    plans: dict[Any, Any],
    key: Hashable,
) -> None:
    """Launch what no plan is known of; `step` is what changes from step to step."""
    sums = kept = None
    if tally is not None:
        sums = (tally.has_draft, tally.totals)
        if tally.path is not None:
            kept = (tally.path, tally.path.stride(0), tally.num_accepted)
    *vectors, tree, loose, by_kind, scores, entropies, may_loosen, sampled, num_sampled = step
    signals = (scores, entropies, may_loosen)
    args = (*vectors, tree, loose, sums, by_kind, kept, *signals, sampled, num_sampled, max_drafts + 1)
    block = max(2, triton.next_power_of_2(max_drafts))
    constants = {
        "BLOCK": block,
        "FLAGS": (LOWEST, WINDOW, SHIFT, EPSILON) if is_loose else None,
        "NUM_SUMS": NUM_SUMS,
    }
    grid, device = (num_sampled.shape[0],), num_sampled.device
    if is_loose and block > 32:
        launcher(_accept_kernel, grid, device)(*args, **constants, num_warps=8)
    else:
        launch(_accept_kernel, grid, device, args, constants, plans, key, changing=_CHANGING)


def _check(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    max_drafts: int,
    trees: TreeShapes | None,
    looseness: Looseness | None,
    tally: Tally | None,
) -> None:
    """Assert what `accept` says of its arguments."""
    device, num_rows = target_tokens.device, target_tokens.shape[0]
    check_vector("target_tokens", target_tokens, torch.int64, device)
    check_vector("draft_tokens", draft_tokens, torch.int32, device)
    check_vector("cu_num_logits", cu_num_logits, torch.int32, device, min_len=1)
    assert draft_tokens.shape[0] == num_rows, f"{num_rows} target rows, {draft_tokens.shape[0]} drafts"
    least = 0 if trees is None and looseness is None else 1
    assert least <= max_drafts <= MAX_DRAFTS, f"max_drafts {max_drafts}"
    num_reqs = cu_num_logits.shape[0] - 1
    for given in (trees, looseness, tally):
        if given is not None:
            check_vector("rows", given.rows, torch.int64, device)
            assert given.rows.shape[0] == num_reqs, f"rows: expected {num_reqs} entries, got {given.rows.shape[0]}"
    if trees is not None:
        max_reqs, strides = trees.parents.shape[0], trees.parents.stride()
        for name, table, dtype in (
            ("parents", trees.parents, torch.int32),
            ("depths", trees.depths, torch.int32),
            ("ancestors", trees.ancestors, torch.int64),
        ):
            assert table.dtype == dtype and table.device == device and table.ndim == 2, f"{name}: {dtype} of two dims"
            assert table.shape[0] == max_reqs, f"{name}: {table.shape[0]} rows, parents {max_reqs}"
            assert table.shape[1] > max_drafts, f"{name}: expected at least {max_drafts + 1} columns"
            assert table.stride() == strides and strides[1] == 1, (
                f"{name}: expected the strides of parents, unit in rows"
            )
    if looseness is not None:
        max_reqs = looseness.rules.shape[0]
        for name, dtype, length in (
            ("rules", torch.int32, max_reqs),
            ("shares", torch.float32, max_reqs),
            ("windows", torch.int32, max_reqs),
            ("scores", torch.float32, num_rows),
            ("entropies", torch.float32, num_rows),
            ("may_loosen", torch.bool, num_rows),
        ):
            vector = getattr(looseness, name)
            check_vector(name, vector, dtype, device)
            assert vector.shape[0] == length, f"{name}: expected {length} entries, got {vector.shape[0]}"
    if tally is not None:
        _check_tally(tally, max_drafts, device)


def _check_tally(tally: Tally, max_drafts: int, device: torch.device) -> None:
    """Assert what `Tally` says of its tensors, but of its rows."""
    check_vector("has_draft", tally.has_draft, torch.bool, device)
    check_vector("totals", tally.totals, torch.int64, device, NUM_SUMS + max_drafts)
    if (by_kind := tally.by_kind) is not None:
        assert by_kind.dtype == torch.int64 and by_kind.device == device, f"by_kind: {by_kind.dtype}, {by_kind.device}"
        assert by_kind.shape == (len(tally.rows), 3) and by_kind.is_contiguous(), f"by_kind: {list(by_kind.shape)}"
    assert (tally.path is None) == (tally.num_accepted is None), "path and num_accepted: one without the other"
    if tally.path is not None and tally.num_accepted is not None:
        check_vector("num_accepted", tally.num_accepted, torch.int32, device)
        path, max_reqs = tally.path, tally.num_accepted.shape[0]
        assert path.dtype == torch.int32 and path.device == device and path.ndim == 2, "path: int32 of two dims"
        assert path.shape[0] == max_reqs, f"path: {path.shape[0]} rows, num_accepted {max_reqs}"
        assert path.shape[1] > max_drafts and path.stride(1) == 1, f"path: {list(path.shape)}, {path.stride()}"


def accept_reference(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    max_drafts: int,
    trees: TreeShapes | None = None,
    looseness: Looseness | None = None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Do what `accept` does, in numpy or torch without a loop: the specification. Same arguments and results."""
    device = target_tokens.device
    xp, num_cols = array_module(device), max_drafts + 1
    col = _arange(num_cols, device)
    node = col[1:]  # [K]
    place = _places(xp, cu_num_logits, target_tokens.shape[0], col)
    target, draft = place.spread(target_tokens), place.spread(draft_tokens)[:, 1:]  # [R, K + 1] and [R, K]
    shape = _shapes(xp, trees, place, col)
    expected = target[shape.parent_index]
    stands = (draft >= 0) & (draft == expected) & place.has_row
    kind = mismatches = path = kinds = None
    if looseness is not None:
        kind, mismatches = _judge(xp, looseness, node, shape, place, draft, expected)
        stands = kind != 0
    if trees is None:
        num_accepted = stands.cumprod(1).sum(1)[:, None]  # [R, 1]
    else:
        num_accepted, path = _deepest(xp, shape, stands, mismatches, place.has_row, col)
        target = target[shape.req_idx, path]
    num_sampled = num_accepted + 1
    if place.num_logits is not None:
        num_sampled = xp.minimum(num_sampled, place.num_logits)
    sampled = target * (col < num_sampled)
    if kind is not None:
        is_accepted = node <= num_accepted
        if path is not None:
            draft, kind = draft[shape.req_idx, path[:, 1:] - 1], kind[shape.req_idx, path[:, 1:] - 1]
        sampled[:, :-1] = xp.where(is_accepted, draft, sampled[:, :-1])
        kinds = 0 * target
        kinds[:, :-1] = kind * is_accepted
    results = (
        torch.as_tensor(sampled),
        _as(torch.int32, num_sampled[:, 0]),
        None if path is None else _as(torch.int32, path),
        None if kinds is None else _as(torch.int8, kinds),
    )
    if tally is not None:
        _count(xp, tally, place.has_row, None if trees is None else shape.depth, num_accepted, kinds, col)
        if tally.path is not None and tally.num_accepted is not None:
            state_row, kept = as_array(tally.rows), _as(torch.int32, col) if results[2] is None else results[2]
            as_array(tally.path)[state_row, :num_cols] = as_array(kept)
            as_array(tally.num_accepted)[state_row] = as_array(results[1]) - 1
    return results


class _Places(NamedTuple):
    """Where the logits rows of each request are, for the reference.

    Attributes:
        row: int [R, K + 1], the row of each node, of one without a row any; None where all have one.
        num_logits: int [R, 1], rows of each request; None where it is K + 1 of all.
        has_row: bool [R, K] or [1, K], whether a draft has a row.
        shape: Of a row for each node.
    """

    row: Any
    num_logits: Any
    has_row: Any
    shape: tuple[int, int]

    def spread(self, vector: Tensor) -> Any:
        """Return what a vector says of each node's row, [R, K + 1]."""
        if self.row is None:
            return as_array(vector).reshape(self.shape)
        return as_array(vector if len(vector) else vector.new_zeros(1))[self.row]


def _places(xp: ModuleType, cu_num_logits: Tensor, num_rows: int, col: Any) -> _Places:
    shape = (cu_num_logits.shape[0] - 1, len(col))
    if num_rows == shape[0] * shape[1]:  # the usual decode step
        return _Places(None, None, col[None, 1:] > 0, shape)
    bounds = xp.asarray(as_array(cu_num_logits), dtype=xp.int64)[:, None]  # [R + 1, 1]
    num_logits = bounds[1:] - bounds[:-1]
    return _Places(at_most(bounds[:-1] + col, max(num_rows - 1, 0)), num_logits, col[1:] < num_logits, shape)


class _Shapes(NamedTuple):
    """The drafts' shapes for the reference, [R, K] each, or [1, K] where it is the same in every chain.

    Attributes:
        parent_index: Index of each draft's parent in [R, K + 1].
        depth: Of each draft.
        above: Its ancestors.
        words: int64 [R, K + 1], ancestors of each node, the root's too; None for chains.
        req_idx: [R, 1], each request's own place; None for chains.
    """

    parent_index: Any
    depth: Any
    above: Any
    words: Any
    req_idx: Any


def _shapes(xp: ModuleType, trees: TreeShapes | None, place: _Places, col: Any) -> _Shapes:
    if trees is None:
        return _Shapes((slice(None), slice(-1)), col[None, 1:], (2 << col[None, :-1]) - 1, None, None)
    num_reqs, num_cols = place.shape
    state_row, req_idx = as_array(trees.rows), _arange(num_reqs, trees.rows.device)[:, None]
    words = as_array(trees.ancestors)[state_row][:, :num_cols]
    parent, depth = (as_array(table)[state_row][:, 1:num_cols] for table in (trees.parents, trees.depths))
    if place.row is not None:  # nodes without a row may say anything; none is the ancestor of one that has a row
        parent = at_most(at_least(parent, 0), num_cols - 1)
    return _Shapes((req_idx, parent), depth, words[:, 1:], words, req_idx)


def _deepest(xp: ModuleType, shape: _Shapes, stands: Any, mismatches: Any, has_row: Any, col: Any) -> tuple[Any, Any]:
    """Return how many drafts of trees are accepted, [R, 1], and the path to the last, [R, K + 1]."""
    num_cols, bit = len(col), 1 << col[:-1]
    alive = has_row & ((shape.above & ~(stands * bit).sum(1)[:, None]) == 0)  # distinct bits: the sum is the union
    # One maximum for the greatest depth, within it the fewest mismatches, then the lowest node; 0 for the root.
    key = shape.depth * num_cols**2 - col[1:]
    if mismatches is not None:
        key = key - mismatches * num_cols
    key = xp.amax(alive * key, 1)[:, None]
    last = -key % num_cols
    on_path = (shape.words[shape.req_idx, last] & bit) != 0
    path = col + 0 * shape.words
    # A node that is not on the path writes what is there already, the root at depth 0.
    path[shape.req_idx, shape.depth * on_path] = col[1:] * on_path
    return (key + (num_cols**2 - 1)) // num_cols**2, path


def _judge(
    xp: ModuleType, looseness: Looseness, node: Any, shape: _Shapes, place: _Places, draft: Any, expected: Any
) -> tuple[Any, Any]:
    """Return the kind of each draft, [R, K], and how many mismatches are on the way to it, by `Looseness`."""
    has_row, depth, above = place.has_row, shape.depth, shape.above
    state_row = as_array(looseness.rows)
    rule = as_array(looseness.rules)[state_row][:, None]  # [R, 1]
    valid = has_row & (draft >= 0)
    exact = valid & (draft == expected)
    # Pairs of nodes are [R, K, K]. On the way: the second is the first or above it; peers: a draft of its branch, which
    # is known by its lowest node, because ancestors precede their descendants.
    on_way = (above[:, :, None] & (1 << (node - 1))) != 0
    mismatches = (on_way & ~exact[:, None]).sum(2)
    branch = above & -above
    peers = valid[:, None] & (branch[:, :, None] == branch[:, None])

    score = place.spread(looseness.scores)[:, 1:]
    score = xp.where(score == score, score, float("inf"))[:, None]  # [R, 1, K]
    mine = score.swapaxes(1, 2)  # [R, K, 1]
    rank = (peers & xp.where(node <= node[:, None], score <= mine, score < mine)).sum(2)
    share = xp.asarray(as_array(looseness.shares)[state_row], dtype=xp.float64)[:, None]
    loosened = (rank <= share * peers.sum(2) + EPSILON) & ((rule & LOWEST) != 0)
    # No more mismatches on the way to a node W further down: all between match.
    window = as_array(looseness.windows)[state_row][:, None, None]
    ends = on_way & has_row[:, :, None] & (mismatches[:, :, None] == mismatches[:, None])
    in_window = (ends & (depth[:, :, None] - depth[:, None] == window)).any(1)
    unsure = place.spread(looseness.entropies)[shape.parent_index] > looseness.min_entropy
    loosened |= in_window & unsure & ((rule & WINDOW) != 0)
    shifted = (peers & (draft[:, None] == expected[:, :, None])).any(2) & ((rule & SHIFT) != 0)
    may = valid & place.spread(looseness.may_loosen)[:, 1:]
    return xp.where(exact, 1, may * xp.where(loosened, 2, shifted * 3)), mismatches


def _count(xp: ModuleType, tally: Tally, has_row: Any, depth: Any, num_accepted: Any, kinds: Any, col: Any) -> None:
    """Add to the tally's totals, and write its counts by kind.

    Args:
        xp: numpy or torch.
        tally: The caller's.
        has_row: bool [R, K] or [1, K].
        depth: [R, K]; None for chains.
        num_accepted: [R, 1].
        kinds: [R, K + 1]; None where all that stands is exact.
        col: [K + 1].
    """
    num_drafts = has_row.sum(1) * as_array(tally.has_draft)[as_array(tally.rows)]  # [R]
    is_counted = num_drafts > 0
    accepted = num_accepted[:, 0] * is_counted
    deepest = num_drafts if depth is None else xp.amax(depth * has_row, 1) * is_counted
    num_sums = NUM_SUMS + len(col) - 1
    found = as_array(
        tally.totals.new_empty(len(accepted), num_sums)
    )  # column by column: no call takes them all at once
    found[:, 0], found[:, 1], found[:, 2], found[:, 3] = is_counted, num_drafts, accepted, deepest
    found[:, 4], found[:, 5:NUM_SUMS], found[:, NUM_SUMS:] = accepted, 0, col[:-1] < accepted[:, None]
    if kinds is not None:
        for kind in (2, 3):
            found[:, 3 + kind] = (kinds == kind).sum(1) * is_counted
        found[:, 4] -= found[:, 5] + found[:, 6]
    as_array(tally.totals)[:num_sums] += found.sum(0)
    if tally.by_kind is not None:
        as_array(tally.by_kind)[:] = found[:, 4:NUM_SUMS]


def _arange(length: int, device: torch.device) -> Any:
    """Return 0 to `length` - 1 as an array of the device's module."""
    return np.arange(length) if array_module(device) is np else torch.arange(length, device=device)


def _as(dtype: torch.dtype, array: Any) -> Tensor:
    return torch.as_tensor(array).to(dtype)
