"""accept: which draft tokens are accepted, strictly or by each request's rules, and what is counted."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from vidspec_kernels.accept import tables
from vidspec_kernels.accept.tables import MAX_DRAFTS, NUM_SUMS, Looseness, Tally, TreeShapes
from vidspec_kernels.accept.triton import _accept_kernel
from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, known, launch, launcher, on_host, use_triton

# Arguments of a launch that the tally does not settle.
_CHANGING = (
    *("target_tokens_ptr", "draft_tokens_ptr", "cu_num_logits_ptr", "rows_ptr", "tree", "loose"),
    *("scores_ptr", "entropies_ptr", "may_loosen_ptr", "sampled_ptr", "num_sampled_ptr"),
)


def accept(
    target_tokens: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor, max_drafts: int,
    trees: TreeShapes | None = None, looseness: Looseness | None = None, tally: Tally | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Accept each request's longest path of drafts that match the target's samples or may differ from them.

    Shared-noise coupling (Daliri, Musco, Suresh 2025): the target is sampled at every logits row as
    vanilla decoding would. The draft of a node with parent p passes if it is the target's sample at p, its expected
    token. Else, only where `may_loosen` is set, by the first of these that the request's `rules` have:

    - LOWEST (LVSpec, eq. 9-10): it is among the floor(share * n) lowest scores of the n valid drafts of its branch,
      those that match counted too; of equal scores the lower node's is the lower, and NaN is the highest.
    - WINDOW (FLy): the target's entropy at p exceeds `min_entropy`, and some W drafts in a row below the node match.
    - SHIFT (LVSpec, eq. 11): its expected token is some valid draft of its branch.

    A branch is a child of the root with all below it; a chain is one branch. n counts drafts that have a row. The
    deepest node is accepted of those that pass with all their ancestors (siblings may hold the same token); of equally
    deep ones that with the fewest mismatches on its way, then the lowest. An accepted mismatch is emitted though the
    target sampled another token; without any rule every emitted token is the target's own.

    Args:
        target_tokens: int64 [N], the target's sample at each logits row.
        draft_tokens: int32 [N], input token of each logits row: row i of a request is its node i, row 0 its root; -1 =
            not a draft, never accepted.
        cu_num_logits: int32 [R + 1], first logits row of each request; at most max_drafts + 1 rows a request.
        max_drafts: K, 0 to 64; of trees and loose requests at least 1.
        trees: None: all are chains.
        looseness: None: no mismatch is accepted. Its rows are those of the trees, and of the tally.
        tally: What is counted and kept of the step; None: nothing.

    Returns:
        sampled: int64 [R, K + 1], the accepted drafts of each request and the target's sample after them, then zeros.
        num_sampled: int32 [R], 1 + accepted drafts; 0 for a request without rows.
        path: int32 [R, K + 1], the accepted node at each depth from the root on, then each column's own index; None
            for chains.
        kinds: int8 [R, K + 1], of each emitted token: 1 a draft that matches, 2 a mismatch accepted by LOWEST or
            WINDOW, 3 one by SHIFT; 0 for the target's sample and beyond. None without looseness.
    """
    plans, key = _plans(max_drafts, trees, looseness, tally)
    plan = known(plans, _accept_kernel, key)
    if plan is None and (key is None or key not in plans):
        _check(target_tokens, draft_tokens, cu_num_logits, max_drafts, trees, looseness, tally)
        if key is not None:
            plans[key] = True
    num_reqs, num_cols = cu_num_logits.shape[0] - 1, max_drafts + 1
    sampled = target_tokens.new_empty(num_reqs, num_cols)
    num_sampled = cu_num_logits.new_empty(num_reqs)
    path = None if trees is None else cu_num_logits.new_empty(num_reqs, num_cols)
    kinds = None if looseness is None else cu_num_logits.new_empty(num_reqs, num_cols, dtype=torch.int8)
    outs, vectors = (sampled, num_sampled, path, kinds), (target_tokens, draft_tokens, cu_num_logits)
    if plan is None and not use_triton(impl, target_tokens.device):
        on_host(impl, target_tokens.device, "accept")(*vectors, trees, looseness, tally, *outs)
        return outs
    rows = tree = loose = None
    signals: Sequence[Tensor | None] = (None,) * 3
    if trees is not None:
        rows, *shapes = trees
        tree = (*shapes, trees.parents.stride(0), path)
    if looseness is not None:
        rows, *settings = looseness
        loose, signals = (*settings[:3], float(looseness.min_entropy), kinds), settings[3:6]
    if tally is not None:
        rows = tally.rows
    step = (*vectors, rows, tree, loose, *signals, sampled, num_sampled)
    if plan is not None and num_reqs > 0:
        plan((num_reqs,), *step)
    elif num_reqs > 0:
        _launch(step, max_drafts, loose is not None, tally, plans, key)
    return outs


def _plans(
    max_drafts: int, trees: TreeShapes | None, looseness: Looseness | None, tally: Tally | None
) -> tuple[dict[Any, Any], Hashable]:
    """Return the launches that are known, and the key of these arguments among them; None where none are kept.

    What stays of a launch is the tally's, by its identity: the plan keeps it alive, so that nothing else can have it.
    """
    if tally is None or tally.known is None:
        return {}, None
    kept = (tally.has_draft, tally.totals, tally.path, tally.num_accepted)
    return tally.known, (max_drafts, trees is None, looseness is None, *map(id, kept))


def _launch(
    step: tuple[Any, ...], max_drafts: int, is_loose: bool, tally: Tally | None, plans: dict[Any, Any], key: Hashable,
) -> None:  # fmt: skip
    """Launch what no plan is known of; `step` is what changes from step to step."""
    sums = kept = None
    if tally is not None:
        sums = (tally.has_draft, tally.totals)
        if tally.path is not None:
            kept = (tally.path, tally.path.stride(0), tally.num_accepted)
    *vectors, tree, loose, scores, entropies, may_loosen, sampled, num_sampled = step
    signals = (scores, entropies, may_loosen)
    args = (*vectors, tree, loose, sums, kept, *signals, sampled, num_sampled, max_drafts + 1)
    block = max(2, triton.next_power_of_2(max_drafts))
    constants = {
        "BLOCK": block, "FLAGS": tables.FLAGS if is_loose else None, "NUM_SUMS": NUM_SUMS,
    }  # fmt: skip
    grid, device = (num_sampled.shape[0],), num_sampled.device
    if is_loose and block > 32:
        launcher(_accept_kernel, grid, device)(*args, **constants, num_warps=8)
    else:
        launch(_accept_kernel, grid, device, args, constants, plans, key, changing=_CHANGING)


def _check(
    target_tokens: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor, max_drafts: int, trees: TreeShapes | None,
    looseness: Looseness | None, tally: Tally | None,
) -> None:  # fmt: skip
    device, num_rows, num_reqs = target_tokens.device, target_tokens.shape[0], cu_num_logits.shape[0] - 1
    check(device, target_tokens=(target_tokens, torch.int64, 0), draft_tokens=(draft_tokens, torch.int32, [num_rows]))
    check(device, cu_num_logits=(cu_num_logits, torch.int32, 1))
    least = 0 if trees is None and looseness is None else 1
    assert least <= max_drafts <= MAX_DRAFTS, f"max_drafts {max_drafts}"
    for each in (trees, looseness, tally):
        check(device, rows=(None if each is None else each.rows, torch.int64, [num_reqs]))
    if trees is not None:
        shape = ([trees.parents.shape[0]], max_drafts + 1)
        check(
            device, parents=(trees.parents, torch.int32, *shape), depths=(trees.depths, torch.int32, *shape),
            ancestors=(trees.ancestors, torch.int64, *shape),
        )  # fmt: skip
        for name in ("depths", "ancestors"):
            is_alike = getattr(trees, name).stride() == trees.parents.stride()
            assert is_alike, f"{name}: expected the strides of parents"
    if looseness is not None:
        by_row, by_logits = [looseness.rules.shape[0]], [num_rows]
        check(
            device, rules=(looseness.rules, torch.int32, by_row), shares=(looseness.shares, torch.float32, by_row),
            windows=(looseness.windows, torch.int32, by_row), scores=(looseness.scores, torch.float32, by_logits),
            entropies=(looseness.entropies, torch.float32, by_logits),
            may_loosen=(looseness.may_loosen, torch.bool, by_logits),
        )  # fmt: skip
    if tally is not None:
        assert (tally.path is None) == (tally.num_accepted is None), "path and num_accepted: one without the other"
        max_reqs = 0 if tally.num_accepted is None else [tally.num_accepted.shape[0]]
        check(
            device, has_draft=(tally.has_draft, torch.bool, 0),
            totals=(tally.totals, torch.int64, NUM_SUMS + max_drafts),
            path=(tally.path, torch.int32, max_reqs, max_drafts + 1), num_accepted=(tally.num_accepted, torch.int32, 0),
        )  # fmt: skip
