"""tree_grow: one level of the adaptive draft trees of a batch (SAGE), in one launch; one program a request."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, as_meta, check_vector, launcher, use_triton

# Comparisons that one program makes at a time.
_NUM_COMPARED = 4096
# By node; node 64's bit is the sign.
_OWN_BITS = np.concatenate(([0], np.left_shift(1, np.arange(64)))).astype(np.int64)


class TreeGrowBuffers:
    """The tensors that growth reads and writes in every step; checked once, here, instead of in every launch.

    Args:
        tokens: Out, int64 [max_num_reqs, K + 1], one tree a batch row, column 0 the root; contiguous as all of these.
        parents: Out, int32 [max_num_reqs, K + 1].
        depths: Out, int32 [max_num_reqs, K + 1].
        ancestors: In and out, int64 [max_num_reqs, K + 1]; bit j - 1 of node i is set iff node j is i or an ancestor
            of i.
        log_probs: Out, float32 [max_num_reqs, K + 1], of the path.
        planned_depths: int64 [max_num_reqs] by persistent row, levels that a request's tree gets.
        planned_widths: int64 [max_num_reqs] by persistent row, selects `width_bounds`.
        log_thresholds: float32 [max_depth + 1, L], by depth and level: the log-probability a path must exceed.
        width_bounds: float32 [max_width + 1, L, C], by width, level and rank: the log-probability that a parent's path
            must reach for its child of that rank.
        max_parents: P, frontier nodes of all levels of a step together.

    Attributes:
        next_free: int64 [max_num_reqs] by batch row, the first node index beyond the greedy path that is free.
        leftover_log_probs: float32 [max_num_reqs, P, C], path log-probability of every candidate of the step; -inf once
            it is a node.
        leftover_tokens: int64 [max_num_reqs, P, C].
        leftover_parents: int64 [max_num_reqs, P], node index of the candidates' parent.
    """

    def __init__(
        self,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        log_probs: Tensor,
        planned_depths: Tensor,
        planned_widths: Tensor,
        log_thresholds: Tensor,
        width_bounds: Tensor,
        max_parents: int,
    ):
        device, (max_num_reqs, self.num_cols) = tokens.device, tokens.shape
        _, self.num_levels, self.num_candidates = width_bounds.shape
        self.device, self.max_parents = device, max_parents
        self.next_free = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        shape = (max_num_reqs, max_parents, self.num_candidates)
        self.leftover_log_probs = torch.full(shape, -torch.inf, device=device)
        self.leftover_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.leftover_parents = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        # In the kernel's order.
        self.tensors = (
            planned_depths, planned_widths, log_thresholds, width_bounds, self.next_free,
            tokens, parents, depths, ancestors, log_probs,
            self.leftover_log_probs, self.leftover_tokens, self.leftover_parents,
        )  # fmt: skip
        for name, tensor, dtype, ndim in (
            ("tokens", tokens, torch.int64, 2),
            ("parents", parents, torch.int32, 2),
            ("depths", depths, torch.int32, 2),
            ("ancestors", ancestors, torch.int64, 2),
            ("log_probs", log_probs, torch.float32, 2),
            ("planned_depths", planned_depths, torch.int64, 1),
            ("planned_widths", planned_widths, torch.int64, 1),
            ("log_thresholds", log_thresholds, torch.float32, 2),
            ("width_bounds", width_bounds, torch.float32, 3),
        ):
            assert tensor.dtype == dtype and tensor.ndim == ndim, f"{name}: expected {dtype} of {ndim} dimensions"
            assert tensor.device == device and tensor.is_contiguous(), f"{name}: expected contiguous, on {device}"
            assert ndim != 2 or name == "log_thresholds" or tensor.shape == tokens.shape, f"{name}: other shape"
        assert log_thresholds.shape[1] == self.num_levels, "log_thresholds, width_bounds: unequal numbers of levels"
        # The reference works on the memory itself; the plan of a step is looked up once, on level 0.
        self._arrays = tuple(tensor.numpy() for tensor in self.tensors) if device.type == "cpu" else ()
        self._plan: tuple[np.ndarray, ...] = ()

    def as_meta(self) -> "TreeGrowBuffers":
        """Return the same buffers without memory, for `warm_up`."""
        plan, out = self.tensors[:4], self.tensors[5:10]
        return TreeGrowBuffers(*map(as_meta, out), *map(as_meta, plan), self.max_parents)  # type: ignore[call-arg]


@triton.jit
def _score(
    index,
    num_candidates,
    total,
    # [F * C]
    log_probs_ptr,
    # [F]
    frontier_log_probs_ptr,
    # [C]
    width_bounds_ptr,
    log_threshold,
):
    """Return the path log-probabilities of candidates and whether they may become nodes; the greedy one is exempt."""
    valid = index < total
    parent = tl.load(frontier_log_probs_ptr + index // num_candidates, mask=valid, other=-float("inf"))
    score = parent + tl.load(log_probs_ptr + index, mask=valid, other=-float("inf"))
    bound = tl.load(width_bounds_ptr + index % num_candidates, mask=valid, other=float("inf"))
    return score, (score > log_threshold) & (parent >= bound) & (index > 0)


@triton.jit(do_not_specialize=["num_next", "first_parent", "num_frontier", "level", "budget"])
def _tree_grow_kernel(
    # [R * F, C]
    log_probs_ptr,
    token_ids_ptr,
    # [R, F]
    frontier_nodes_ptr,
    frontier_log_probs_ptr,
    # [R]
    rows_ptr,
    # [max_reqs]
    depths_ptr,
    widths_ptr,
    # [max_depth + 1, num_levels]
    log_thresholds_ptr,
    # [max_width + 1, num_levels, C]
    width_bounds_ptr,
    # [R]
    next_free_ptr,
    # [R, num_cols]
    tree_tokens_ptr,
    tree_parents_ptr,
    tree_depths_ptr,
    tree_ancestors_ptr,
    tree_log_probs_ptr,
    # [R, num_parents, C]
    leftover_log_probs_ptr,
    leftover_token_ids_ptr,
    # [R, num_parents]
    leftover_parents_ptr,
    # [R, num_next]
    next_nodes_ptr,
    next_tokens_ptr,
    next_log_probs_ptr,
    num_candidates,
    num_levels,
    num_cols,
    num_parents,
    num_next,
    first_parent,
    num_frontier,
    level,
    budget,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
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
    frontier_log_probs_ptr += req_idx * num_frontier
    i = tl.arange(0, BLOCK)
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
    tl.store(next_free_ptr + req_idx, next_free)

    parent = tl.load(
        frontier_nodes_ptr + req_idx * num_frontier + i // num_candidates, mask=i < total, other=0
    )  # fmt: skip
    token = tl.load(token_ids_ptr + req_idx * total + i, mask=i < total, other=0)
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
    out = req_idx * num_next
    tl.store(next_nodes_ptr + out + column, node.to(tl.int64), mask=alive)
    tl.store(next_tokens_ptr + out + column, token, mask=alive)
    tl.store(next_log_probs_ptr + out + column, score, mask=alive)
    absent = (i >= num_alive) & (i < num_next)
    tl.store(next_nodes_ptr + out + i, tl.zeros([BLOCK], dtype=tl.int64), mask=absent)
    tl.store(next_tokens_ptr + out + i, tl.zeros([BLOCK], dtype=tl.int64), mask=absent)
    tl.store(next_log_probs_ptr + out + i, tl.full([BLOCK], -float("inf"), tl.float32), mask=absent)


def tree_grow(
    buffers: TreeGrowBuffers,
    rows: Tensor,
    frontier_nodes: Tensor,
    frontier_log_probs: Tensor,
    log_probs: Tensor,
    token_ids: Tensor,
    *,
    level: int,
    budget: int,
    first_parent: int,
    num_next: int,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Append one level of children to every tree of a batch, and choose the nodes to expand next.

    SAGE's dynamic tree construction (section 3.2, eq. 12 and after), level by level. A candidate becomes a node iff its
    path's log-probability is above the level's threshold and its parent's path reaches the bound of the candidate's
    rank (eq. 12 solved for P_parent: no rounding, no exponential, the same choice on every device). They are appended
    by descending path probability, of equal ones the lower index first, while the budget lasts. Candidate 0, the
    greedy child of the greedy node, is exempt from all tests: it becomes node level + 1, which is reserved for it.

    Args:
        buffers: In and out.
        rows: int64 [R], persistent row of each batch row.
        frontier_nodes: int64 [R, F]; 0 = no node at this place, but on level 0 the root, F = 1.
        frontier_log_probs: float32 [R, F], of the path to the node; -inf = no node at this place. It is so everywhere
            in a request that has its depth.
        log_probs: float32 [R * F, C], candidates of each frontier node, of the token alone, <= 0 or NaN.
        token_ids: int64 [R * F, C].
        level: In [0, L); children get depth level + 1. On level 0 the requests' plans are read.
        budget: Draft nodes that a tree may have, in [0, K]. A planned depth above it counts as the budget.
        first_parent: Frontier nodes of the levels before, in [0, P - F].
        num_next: Most columns of the next frontier, in [1, F * C].
        impl: See `dispatch.use_triton`. The reference takes CPU tensors only.

    Returns:
        nodes: int64 [R, F'], the next frontier: the greedy node, then the best other new nodes (none where the budget
            is spent); 0 elsewhere, hence everywhere once a request has its depth. F' is `num_next`; the reference, for
            which counting costs no wait, returns as many columns as are in use, at least one.
        token_ids: int64 [R, F'], their tokens; 0 elsewhere.
        log_probs: float32 [R, F'], of the path; -inf elsewhere.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    device, num_reqs, num_frontier = buffers.device, frontier_nodes.shape[0], frontier_nodes.shape[1]
    num_rows, num_candidates = num_reqs * num_frontier, buffers.num_candidates
    check_vector("rows", rows, torch.int64, device)
    _check("frontier_nodes", frontier_nodes, torch.int64, device, (num_reqs, num_frontier))
    _check("frontier_log_probs", frontier_log_probs, torch.float32, device, (num_reqs, num_frontier))
    _check("log_probs", log_probs, torch.float32, device, (num_rows, num_candidates))
    _check("token_ids", token_ids, torch.int64, device, (num_rows, num_candidates))
    assert len(rows) == num_reqs <= len(buffers.next_free), f"{len(rows)} rows, {num_reqs} requests"
    assert 0 <= level < buffers.num_levels, f"level {level} of {buffers.num_levels}"
    assert 0 <= budget < buffers.num_cols, f"budget {budget}, {buffers.num_cols - 1} nodes fit"
    assert 0 <= first_parent <= buffers.max_parents - num_frontier, f"first_parent {first_parent}"
    assert 1 <= num_next <= num_frontier * num_candidates, f"num_next {num_next}"
    if not use_triton(impl, device):
        return tree_grow_reference(
            buffers, rows, frontier_nodes, frontier_log_probs, log_probs, token_ids,
            level=level, budget=budget, first_parent=first_parent, num_next=num_next,
        )  # fmt: skip
    next_nodes = token_ids.new_empty(num_reqs, num_next)
    next_tokens = token_ids.new_empty(num_reqs, num_next)
    next_log_probs = log_probs.new_empty(num_reqs, num_next)
    if num_reqs > 0:
        block = triton.next_power_of_2(num_frontier * num_candidates)
        launcher(_tree_grow_kernel, (num_reqs,), device)(
            log_probs, token_ids, frontier_nodes, frontier_log_probs, rows, *buffers.tensors,
            next_nodes, next_tokens, next_log_probs,
            num_candidates, buffers.num_levels, buffers.num_cols, buffers.max_parents, num_next,
            first_parent, num_frontier, level, budget,
            BLOCK=block, CHUNK=max(2, min(32, _NUM_COMPARED // block)),
        )  # fmt: skip
    return next_nodes, next_tokens, next_log_probs


def _check(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> None:
    assert tensor.dtype == dtype and tensor.device == device, f"{name}: expected {dtype} on {device}"
    assert tensor.shape == shape, f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}"
    assert tensor.is_contiguous(), f"{name}: expected contiguous rows"


def tree_grow_reference(
    buffers: TreeGrowBuffers,
    rows: Tensor,
    frontier_nodes: Tensor,
    frontier_log_probs: Tensor,
    log_probs: Tensor,
    token_ids: Tensor,
    *,
    level: int,
    budget: int,
    first_parent: int,
    num_next: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `tree_grow` does, in numpy on the memory of CPU tensors. Same arguments and results.

    Numpy, because the arrays are tiny and the steps many: a call costs a third of torch's, and there are 50 in a level.
    """
    assert buffers.device.type == "cpu", "the reference of tree_grow works on CPU tensors"
    (
        planned_depths, planned_widths, log_thresholds, width_bounds, next_free, tree_tokens, tree_parents, tree_depths,
        tree_ancestors, tree_log_probs, leftover_log_probs, leftover_tokens, leftover_parents,
    ) = buffers._arrays  # fmt: skip
    num_reqs, num_frontier = frontier_nodes.shape
    num_candidates, num_cols = buffers.num_candidates, buffers.num_cols
    if num_reqs == 0:
        return frontier_nodes.new_zeros(0, 1), frontier_nodes.new_zeros(0, 1), frontier_log_probs.new_zeros(0, 1)
    nodes, path_log_probs = frontier_nodes.numpy(), frontier_log_probs.numpy()[:, :, None]
    free = next_free[:num_reqs]
    if level == 0:
        row_idx = rows.numpy()
        depth = np.minimum(planned_depths[row_idx], budget)
        # [R], [R, L, 1, 1], [R, L, 1, C]
        buffers._plan = depth, log_thresholds[depth, :, None, None], width_bounds[planned_widths[row_idx], :, None]
        np.add(depth, 1, out=free)
    depth, thresholds, bounds = buffers._plan

    # [R, F, C]
    scores = log_probs.numpy().reshape(num_reqs, num_frontier, num_candidates) + path_log_probs
    tokens = token_ids.numpy().reshape(scores.shape)
    chosen = scores > thresholds[:, level]
    chosen &= path_log_probs >= bounds[:, level]
    chosen[:, 0, 0] = grows = depth > level

    # [E] what passed: by request, the greedy child first, then by descending probability, then by index.
    which = chosen.reshape(-1).nonzero()[0]
    req = which // (num_frontier * num_candidates)
    score = scores.reshape(-1)[which]
    counts = np.bincount(req, minlength=num_reqs)
    starts = counts.cumsum() - counts
    greedy = starts[grows]
    sort_key = -score
    sort_key[greedy] = -np.inf
    order = np.lexsort((sort_key, req))
    which, score = which[order], score[order]
    place = np.arange(len(which)) - starts[req]
    node = (free - grows)[req] + place
    node[greedy] = level + 1
    free += counts
    free -= grows
    if free.max() > budget + 1:
        fits = node <= budget
        which, score, req, place, node = which[fits], score[fits], req[fits], place[fits], node[fits]
        np.minimum(free, budget + 1, out=free)

    parent, token = nodes.reshape(-1)[which // num_candidates], tokens.reshape(-1)[which]
    first_col = req * num_cols
    column = first_col + node
    ancestors = tree_ancestors.reshape(-1)
    ancestors[column] = ancestors[first_col + parent] | _OWN_BITS[node]
    tree_tokens.reshape(-1)[column] = token
    tree_parents.reshape(-1)[column] = parent
    tree_depths.reshape(-1)[column] = level + 1
    tree_log_probs.reshape(-1)[column] = score

    last_parent = first_parent + num_frontier
    scores.reshape(-1)[which] = -np.inf
    leftover_log_probs[:num_reqs, first_parent:last_parent] = scores
    leftover_tokens[:num_reqs, first_parent:last_parent] = tokens
    leftover_parents[:num_reqs, first_parent:last_parent] = nodes

    width = np.where(free <= budget, num_next, 1)  # no room: no children but the greedy one
    width *= depth > level + 1
    alive = (place < width[req]).nonzero()[0]
    place = place[alive]
    num_next = int(place.max()) + 1 if len(place) else 1
    target = req[alive] * num_next + place
    next_nodes = np.zeros((num_reqs, num_next), dtype=np.int64)
    next_tokens = np.zeros((num_reqs, num_next), dtype=np.int64)
    next_log_probs = np.full((num_reqs, num_next), -np.inf, dtype=np.float32)
    next_nodes.reshape(-1)[target] = node[alive]
    next_tokens.reshape(-1)[target] = token[alive]
    next_log_probs.reshape(-1)[target] = score[alive]
    return torch.from_numpy(next_nodes), torch.from_numpy(next_tokens), torch.from_numpy(next_log_probs)
