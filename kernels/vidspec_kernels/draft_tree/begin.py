"""tree_begin: what precedes the first forward of a step of draft trees, in one launch; one program a request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launcher, on_host, use_triton
from vidspec_kernels.draft_tree.buffers import TreeGrowBuffers
from vidspec_kernels.draft_tree.tables import TreeTables, TreeTemplate

_NUM_CLEARED = 1024  # leftovers that a program clears at a time


@triton.jit(
    do_not_specialize=["num_nodes", "num_leftovers", "max_frontier"],
    do_not_specialize_on_alignment=["rows_ptr", "num_accepted_ptr"],
)
def _tree_begin_kernel(
    own_parents_ptr, own_depths_ptr, own_ancestors_ptr, own_log_probs_ptr,  # [num_cols]
    tree_tokens_ptr, tree_parents_ptr, tree_depths_ptr, tree_ancestors_ptr, tree_log_probs_ptr,  # [R, num_cols]
    tree_num_nodes_ptr,  # [R]
    frontier_nodes_ptr, frontier_log_probs_ptr,  # [R, max_frontier]; None for trees that do not grow
    leftover_log_probs_ptr,  # [R, num_leftovers]
    rows_ptr, num_accepted_ptr,  # [R]; None where no history is kept
    history_ptr,  # [max_reqs + 1, WINDOW]
    num_observed_ptr, max_depths_ptr,  # [max_reqs + 1]
    num_cols, num_nodes, num_leftovers, max_frontier, depth_min, depth_max, history_low, history_high,
    WINDOW: tl.constexpr, BLOCK_WINDOW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    req_idx = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    in_tree, tree = col < num_cols, req_idx * num_cols + col
    # All loads before the first store, so that their waits overlap.
    parents = tl.load(own_parents_ptr + col, mask=in_tree)
    depths = tl.load(own_depths_ptr + col, mask=in_tree)
    ancestors = tl.load(own_ancestors_ptr + col, mask=in_tree)
    log_probs = tl.load(own_log_probs_ptr + col, mask=in_tree)
    if history_ptr is not None:
        row = tl.load(rows_ptr + req_idx)
        accepted = tl.load(num_accepted_ptr + req_idx).to(tl.int64)
        num_observed = tl.load(num_observed_ptr + row)
        max_depth = tl.load(max_depths_ptr + row)
        i = tl.arange(0, BLOCK_WINDOW)
        past = tl.load(history_ptr + row * WINDOW + i, mask=i < WINDOW, other=0)

    tl.store(tree_tokens_ptr + tree, tl.full([BLOCK], -1, tl.int64), mask=in_tree & (col > 0))
    tl.store(tree_parents_ptr + tree, parents, mask=in_tree)
    tl.store(tree_depths_ptr + tree, depths, mask=in_tree)
    tl.store(tree_ancestors_ptr + tree, ancestors, mask=in_tree)
    tl.store(tree_log_probs_ptr + tree, log_probs, mask=in_tree)
    tl.store(tree_num_nodes_ptr + req_idx, num_nodes)

    if frontier_nodes_ptr is not None:
        tl.store(frontier_nodes_ptr + req_idx * max_frontier, 0)
        tl.store(frontier_log_probs_ptr + req_idx * max_frontier, 0.0)
        nothing = tl.full([CHUNK], -float("inf"), tl.float32)
        for first in range(0, num_leftovers, CHUNK):
            j = first + tl.arange(0, CHUNK)
            tl.store(leftover_log_probs_ptr + req_idx * num_leftovers + j, nothing, mask=j < num_leftovers)

    if history_ptr is not None:
        is_verified = accepted >= 0
        place = num_observed % WINDOW
        total = tl.sum(tl.where(i == place, accepted, past), axis=0).to(tl.float32)
        count = tl.minimum(num_observed + 1, WINDOW).to(tl.float32)
        max_depth += tl.where(total > history_high * count, 1.0, 0.0) - tl.where(total < history_low * count, 1.0, 0.0)
        max_depth = tl.minimum(tl.maximum(max_depth, depth_min), depth_max)
        tl.store(history_ptr + row * WINDOW + place, accepted, mask=is_verified)
        tl.store(num_observed_ptr + row, num_observed + 1, mask=is_verified)
        tl.store(max_depths_ptr + row, max_depth, mask=is_verified)


def tree_begin(
    tree: TreeTables, template: TreeTemplate, num_reqs: int, growth: TreeGrowBuffers | None = None,
    rows: Tensor | None = None, num_accepted: Tensor | None = None, *, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Begin a step: make the trees of batch rows 0 to num_reqs - 1 their template's, and note the last's acceptance.

    Tokens become -1 but the root's, which stays. For trees that grow, the first frontier becomes the root alone and no
    candidate is left over. Each acceptance length moves its request's maximum depth by the mean of the last ones (SAGE,
    section 3.3): one up above `history_high`, one down below `history_low`.

    Args:
        tree: Out.
        template: What the trees become.
        num_reqs: R.
        growth: In and out, of trees that grow; with it also the next two.
        rows: int64 [R], persistent row of each batch row; only padding rows may be equal.
        num_accepted: int32 [R], accepted drafts of the request's last tree; -1 = not verified.
    """
    device = tree.device
    assert 0 <= num_reqs <= len(tree.num_nodes), f"{num_reqs} requests, {len(tree.num_nodes)} fit"
    assert template.parents.shape == (tree.num_cols,), f"template: {len(template.parents)} columns"
    if growth is not None:
        assert rows is not None and num_accepted is not None, "rows, num_accepted: None"
        check(device, rows=(rows, torch.int64, [num_reqs]), num_accepted=(num_accepted, torch.int32, [num_reqs]))
    if num_reqs == 0:
        return
    if not use_triton(impl, device):
        on_host(impl, device, "tree_begin")(tree, template, num_reqs, growth, rows, num_accepted)
        return
    frontier: tuple[Tensor | None, ...] = (None,) * 3
    observed: tuple[Tensor | None, ...] = (None,) * 5
    num_leftovers, max_frontier, window, limits = 0, 0, 1, [0.0] * 4
    if growth is not None:
        frontier = (growth.frontier_nodes, growth.frontier_log_probs, growth.leftover_log_probs)
        num_leftovers, max_frontier = growth.leftover_log_probs[0].numel(), growth.max_frontier
        rules = growth.plans.rules
        if rules.history > 0:
            observed, window = (rows, num_accepted, *growth.plans.observed), rules.history
            limits = [float(rules.depth_min), float(rules.depth_max), rules.history_low, rules.history_high]
    launcher(_tree_begin_kernel, (num_reqs,), device)(
        *template.tensors, *tree.tensors, *frontier, *observed,
        tree.num_cols, template.num_nodes, num_leftovers, max_frontier, *limits,
        WINDOW=window, BLOCK_WINDOW=triton.next_power_of_2(window), BLOCK=triton.next_power_of_2(tree.num_cols),
        CHUNK=_NUM_CLEARED,
    )  # fmt: skip
