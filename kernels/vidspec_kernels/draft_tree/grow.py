"""tree_grow: one level of the adaptive draft trees of a batch (SAGE), in one launch; one program a request."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check, check_contiguous
from vidspec_kernels.dispatch import Impl, launcher, on_host, remember, use_triton
from vidspec_kernels.draft_tree.buffers import TreeGrowBuffers

# Comparisons that one program makes at a time.
_NUM_COMPARED = 4096


@triton.jit
def _score(
    index, num_candidates, total,
    log_probs_ptr,  # [F * C]
    frontier_log_probs_ptr,  # [F]
    width_bounds_ptr,  # [C]
    log_threshold,
):  # fmt: skip
    """Return the path log-probabilities of candidates and whether they may become nodes; the greedy one is exempt."""
    valid = index < total
    parent = tl.load(frontier_log_probs_ptr + index // num_candidates, mask=valid, other=-float("inf"))
    score = parent + tl.load(log_probs_ptr + index, mask=valid, other=-float("inf"))
    bound = tl.load(width_bounds_ptr + index % num_candidates, mask=valid, other=float("inf"))
    return score, (score > log_threshold) & (parent >= bound) & (index > 0)


@triton.jit(
    do_not_specialize=["num_next", "first_parent", "num_frontier", "level", "budget"],
    do_not_specialize_on_alignment=["rows_ptr"],
)
def _tree_grow_kernel(
    log_probs_ptr, token_ids_ptr,  # [R * F, C]
    rows_ptr,  # [R]
    depths_ptr, widths_ptr,  # [max_reqs + 1]
    log_thresholds_ptr,  # [max_depth + 1, num_levels]
    width_bounds_ptr,  # [max_width + 1, num_levels, C]
    next_free_ptr,  # [R]
    tree_tokens_ptr, tree_parents_ptr, tree_depths_ptr, tree_ancestors_ptr, tree_log_probs_ptr,  # [R, num_cols]
    leftover_log_probs_ptr, leftover_token_ids_ptr,  # [R, num_parents, C]
    leftover_parents_ptr,  # [R, num_parents]
    # [R, max_frontier], in: this level's; out: the next one's
    frontier_nodes_ptr, frontier_tokens_ptr, frontier_log_probs_ptr,
    num_candidates, num_levels, num_cols, num_parents, max_frontier, num_next, first_parent, num_frontier, level,
    budget,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    req_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + req_idx)
    depth = tl.minimum(tl.load(depths_ptr + row), budget)
    width = tl.load(widths_ptr + row)
    log_threshold = tl.load(log_thresholds_ptr + depth * num_levels + level)
    bounds_ptr = width_bounds_ptr + (width * num_levels + level) * num_candidates
    num_greedy = tl.where(level < depth, 1, 0)
    next_free = tl.load(next_free_ptr + req_idx)
    if level == 0:
        next_free = depth + 1  # the greedy path's nodes are reserved

    total = num_frontier * num_candidates
    log_probs_ptr += req_idx * total
    frontier_nodes_ptr += req_idx * max_frontier
    frontier_tokens_ptr += req_idx * max_frontier
    frontier_log_probs_ptr += req_idx * max_frontier
    i = tl.arange(0, BLOCK)
    parent = tl.load(frontier_nodes_ptr + i // num_candidates, mask=i < total, other=0)
    token = tl.load(token_ids_ptr + req_idx * total + i, mask=i < total, other=0)
    score, allowed = _score(
        i, num_candidates, total, log_probs_ptr, frontier_log_probs_ptr, bounds_ptr, log_threshold
    )  # fmt: skip
    # A candidate's place is the number of better ones; of equal ones the lower index is better.
    place = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, total, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other, other_allowed = _score(
            j, num_candidates, total, log_probs_ptr, frontier_log_probs_ptr, bounds_ptr, log_threshold
        )  # fmt: skip
        is_better = (other[None, :] > score[:, None]) | ((other[None, :] == score[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum((is_better & other_allowed[None, :]).to(tl.int32), axis=1)

    chosen = allowed & (next_free + place <= budget)
    num_chosen = tl.sum(chosen.to(tl.int32), axis=0)
    chosen = chosen | (i < num_greedy)
    node = tl.where(i == 0, level + 1, next_free + place)
    next_free += num_chosen
    # All threads have read the frontier and `next_free` before any writes the next ones over them.
    tl.debug_barrier()
    tl.store(next_free_ptr + req_idx, next_free)

    tree = req_idx * num_cols
    own_bit = tl.full([BLOCK], 1, tl.int64) << tl.where(chosen, node - 1, 0).to(tl.int64)
    ancestors = tl.load(tree_ancestors_ptr + tree + parent, mask=chosen, other=0) | own_bit
    tl.store(tree_tokens_ptr + tree + node, token, mask=chosen)
    tl.store(tree_parents_ptr + tree + node, parent.to(tl.int32), mask=chosen)
    tl.store(tree_depths_ptr + tree + node, tl.zeros([BLOCK], dtype=tl.int32) + level + 1, mask=chosen)
    tl.store(tree_ancestors_ptr + tree + node, ancestors, mask=chosen)
    tl.store(tree_log_probs_ptr + tree + node, score, mask=chosen)

    leftover = (req_idx * num_parents + first_parent) * num_candidates + i
    tl.store(leftover_log_probs_ptr + leftover, tl.where(chosen, -float("inf"), score), mask=i < total)
    tl.store(leftover_token_ids_ptr + leftover, token, mask=i < total)
    leftover_parent = req_idx * num_parents + first_parent + i // num_candidates
    tl.store(leftover_parents_ptr + leftover_parent, parent, mask=(i < total) & (i % num_candidates == 0))

    # Next frontier: the greedy node, then the best others, unless none of their children would find room.
    num_others = tl.where(next_free <= budget, tl.minimum(num_chosen, num_next - 1), 0)
    num_alive = tl.where(level + 1 < depth, 1 + num_others, 0)
    column = tl.where(i == 0, 0, place + 1)
    alive = chosen & (column < num_alive)
    tl.store(frontier_nodes_ptr + column, node.to(tl.int64), mask=alive)
    tl.store(frontier_tokens_ptr + column, token, mask=alive)
    tl.store(frontier_log_probs_ptr + column, score, mask=alive)
    absent = (i >= num_alive) & (i < num_next)
    tl.store(frontier_nodes_ptr + i, tl.zeros([BLOCK], dtype=tl.int64), mask=absent)
    tl.store(frontier_tokens_ptr + i, tl.zeros([BLOCK], dtype=tl.int64), mask=absent)
    tl.store(frontier_log_probs_ptr + i, tl.full([BLOCK], -float("inf"), tl.float32), mask=absent)


def tree_grow(
    buffers: TreeGrowBuffers, rows: Tensor, log_probs: Tensor, token_ids: Tensor, *, level: int, budget: int,
    first_parent: int, num_next: int, trims: bool = False, impl: Impl = "auto",
) -> int:  # fmt: skip
    """Append one level of children to every tree of a batch, and choose the nodes to expand next.

    SAGE's dynamic tree construction (section 3.2, eq. 12 and after), level by level. A candidate becomes a node iff its
    path's log-probability is above the level's threshold and its parent's path reaches the bound of the candidate's
    rank (eq. 12 solved for P_parent: no rounding, no exponential, the same choice on every device). They are appended
    by descending path probability, of equal ones the lower index first, while the budget lasts. Candidate 0, the
    greedy child of the greedy node, is exempt from all tests: it becomes node level + 1, which is reserved for it.

    The frontier of batch row r, its first F columns in `buffers`, is replaced by the next one's first F' columns: the
    greedy node, then the best other new nodes (none where the budget is spent); node 0, token 0 and log-probability
    -inf elsewhere, hence everywhere once a request has its depth. Before level 0 it is the root (`tree_begin`).

    Args:
        buffers: In and out.
        rows: int64 [R], persistent row of each batch row.
        log_probs: float32 [R * F, C], candidates of each frontier node, of the token alone, <= 0 or NaN.
        token_ids: int64 [R * F, C].
        level: In [0, L); children get depth level + 1. Level 0 reads the requests' plans.
        budget: Draft nodes that a tree may have, in [0, K]. A planned depth above it counts as the budget.
        first_parent: Where the candidates are kept among the leftovers, in [0, P - F].
        num_next: Most columns of the next frontier, in [1, min(F * C, F_max)].
        trims: Whether the loop, not the kernel, writes the columns in use only (at least one): they are known.

    Returns:
        F': `num_next`, or fewer where it is trimmed.
    """
    tensors, numbers = (rows, log_probs, token_ids), (level, budget, first_parent, num_next)
    call = (*numbers, trims, impl, *map(id, tensors))
    known = buffers.ready.get(call) or remember(
        buffers.ready, call, _bind(buffers, *tensors, *numbers, trims, impl), tensors
    )  # fmt: skip
    num_columns: int = known[0]()
    return num_columns


def _bind(
    buffers: TreeGrowBuffers, rows: Tensor, log_probs: Tensor, token_ids: Tensor, level: int, budget: int,
    first_parent: int, num_next: int, trims: bool, impl: Impl,
) -> Callable[[], int]:  # fmt: skip
    """Check a call, and return what runs it."""
    num_reqs, num_candidates = len(rows), buffers.num_candidates
    device = buffers.device
    check(device, rows=(rows, torch.int64, 0))
    assert num_reqs <= len(buffers.next_free), f"{num_reqs} rows, {len(buffers.next_free)} fit"
    num_frontier = len(log_probs) // max(num_reqs, 1)
    shape = ([num_reqs * num_frontier], [num_candidates])
    check_contiguous(device, log_probs=(log_probs, torch.float32, *shape), token_ids=(token_ids, torch.int64, *shape))
    assert 0 <= level < buffers.num_levels, f"level {level} of {buffers.num_levels}"
    assert 0 <= budget < buffers.tree.num_cols, f"budget {budget}, {buffers.tree.num_cols - 1} nodes fit"
    assert num_frontier <= buffers.max_frontier, f"log_probs: {num_frontier} nodes a request"
    assert 0 <= first_parent <= buffers.max_parents - num_frontier, f"first_parent {first_parent}"
    most_next = min(buffers.max_frontier, num_frontier * num_candidates)
    assert num_reqs == 0 or 1 <= num_next <= most_next, f"num_next {num_next}"
    if num_reqs == 0:
        return lambda: 1 if trims else num_next
    numbers = (level, budget, first_parent, num_next)
    if not use_triton(impl, device):
        loop = on_host(impl, device, "tree_grow")
        return loop.bind(log_probs, token_ids, rows, *buffers.arrays, *numbers, trims)
    block = triton.next_power_of_2(num_frontier * num_candidates)
    launched = functools.partial(
        launcher(_tree_grow_kernel, (num_reqs,), device),
        log_probs, token_ids, rows, *buffers.tensors, num_candidates, buffers.num_levels, buffers.tree.num_cols,
        buffers.max_parents, buffers.max_frontier, num_next, first_parent, num_frontier, level, budget,
        BLOCK=block, CHUNK=max(2, min(32, _NUM_COMPARED // block)),
    )  # fmt: skip

    def run() -> int:
        launched()
        return num_next

    return run
