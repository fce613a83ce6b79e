"""Loops of `tree_begin`, `tree_plan`, `tree_grow`, `tree_place` and `tree_finish`."""

import math

import numpy as np
from torch import Tensor

from vidspec_kernels.compiled import compiled
from vidspec_kernels.draft_tree.buffers import TreeGrowBuffers
from vidspec_kernels.draft_tree.finish import Leaves
from vidspec_kernels.draft_tree.plan import LEAST_LOGIT
from vidspec_kernels.draft_tree.tables import TreePlans, TreeTables, TreeTemplate


@compiled(
    "int32[:], int32[:], int64[:], float32[:], int64, int64[:, :], int32[:, :], int32[:, :], int64[:, :], "
    "float32[:, :], int32[:], int64"
)
def _begin(
    own_parents, own_depths, own_ancestors, own_log_probs, own_num_nodes,
    tokens, parents, depths, ancestors, log_probs, num_nodes, num_reqs,
):  # fmt: skip
    for b in range(num_reqs):
        for col in range(tokens.shape[1]):
            if col > 0:
                tokens[b, col] = -1
            parents[b, col], depths[b, col] = own_parents[col], own_depths[col]
            ancestors[b, col], log_probs[b, col] = own_ancestors[col], own_log_probs[col]
        num_nodes[b] = own_num_nodes


@compiled(
    "int64[:, :], float32[:, :], float32[:, :, :], int64[:], int32[:], int64[:, :], int64[:], float32[:], int64, "
    "float64, float64, float64, float64"
)
def _begin_growth(
    frontier_nodes, frontier_log_probs, leftover_log_probs, rows, num_accepted, history, num_observed, max_depths,
    window, depth_min, depth_max, history_low, history_high,
):  # fmt: skip
    for b in range(len(rows)):
        frontier_nodes[b, 0], frontier_log_probs[b, 0] = 0, 0.0
        leftover_log_probs[b, :, :] = -np.inf
        row, accepted = rows[b], num_accepted[b]
        if window == 0 or accepted < 0:
            continue
        history[row, num_observed[row] % window] = accepted
        num_observed[row] += 1
        total, count = np.int64(0), min(num_observed[row], window)
        for place in range(window):
            total += history[row, place]
        change = (1.0 if total > history_high * count else 0.0) - (1.0 if total < history_low * count else 0.0)
        max_depths[row] = min(max(max_depths[row] + change, depth_min), depth_max)


def tree_begin(
    tree: TreeTables, template: TreeTemplate, num_reqs: int, growth: TreeGrowBuffers | None, rows: Tensor | None,
    num_accepted: Tensor | None,
) -> None:  # fmt: skip
    _begin(*template.arrays, template.num_nodes, *tree.arrays, num_reqs)
    if growth is not None:
        rules, observed = growth.plans.rules, growth.plans.observed_arrays
        limits = (float(rules.depth_min), float(rules.depth_max), rules.history_low, rules.history_high)
        outs = (growth.frontier_nodes, growth.frontier_log_probs, growth.leftover_log_probs)
        _begin_growth(*outs, rows, num_accepted, *observed, rules.history, *limits)


@compiled(
    "float32[:, :], int64[:], float32[:], float32[:], int64[:], int64[:], int64, float32, float32, float32, float32, "
    "float32"
)
def _plan(
    log_probs, rows, max_depths, next_confidence, next_depths, next_widths, top_k, log_top_k, depth_min, width_min,
    width_range, least_logit,
):  # fmt: skip
    one = np.float32(1.0)
    for b in range(len(rows)):
        row, total, product = rows[b], np.float32(0.0), np.float32(0.0)
        for rank in range(top_k):
            logit = log_probs[b, rank] - log_probs[b, 0]
            if not logit > least_logit:
                logit = least_logit
            weight = np.exp(logit)
            total += weight
            product += weight * logit
        alpha = min(max(one - (np.log(total) - product / total) / log_top_k, np.float32(0.0)), one)
        next_confidence[b] = alpha
        next_depths[b] = np.int64(depth_min + alpha * (max_depths[row] - depth_min))
        next_widths[b] = np.int64(width_min + (one - alpha) * width_range)


def tree_plan(plans: TreePlans, rows: Tensor, log_probs: Tensor) -> None:
    rules = plans.rules
    numbers = (math.log(rules.top_k), float(rules.depth_min), float(rules.width_min))
    _plan(
        log_probs, rows, plans.observed_arrays[2], *plans.adopted_arrays[:3], rules.top_k, *numbers,
        float(rules.width_max - rules.width_min), LEAST_LOGIT,
    )  # fmt: skip


@compiled(
    "float32[:, :], int64[:, :], int64[:], int64[:], int64[:], float32[:, :], float32[:, :, :], int64[:], "
    "int64[:, :], int32[:, :], int32[:, :], int64[:, :], float32[:, :], float32[:, :, :], int64[:, :, :], "
    "int64[:, :], int64[:, :], int64[:, :], float32[:, :], int64, int64, int64, int64, boolean",
    "int64",
)
def tree_grow(
    candidate_log_probs, candidate_tokens, rows, planned_depths, planned_widths, log_thresholds, width_bounds,
    next_free, tree_tokens, tree_parents, tree_depths, tree_ancestors, tree_log_probs,
    leftover_log_probs, leftover_tokens, leftover_parents, frontier_nodes, frontier_tokens, frontier_log_probs,
    level, budget, first_parent, num_next, trims,
):  # fmt: skip
    num_reqs, num_candidates = len(rows), candidate_tokens.shape[1]
    num_frontier = len(candidate_tokens) // num_reqs
    total = num_frontier * num_candidates
    # Of a request: the indices of what becomes a node, best first, and the paths' log-probabilities of all candidates.
    best, scores = np.empty(budget + 1, dtype=np.int64), np.empty(total, dtype=np.float32)
    parents = np.empty(num_frontier, dtype=np.int64)
    num_alive = np.zeros(num_reqs, dtype=np.int64)
    for b in range(num_reqs):
        row, first = rows[b], b * num_frontier
        depth, width = min(planned_depths[row], budget), planned_widths[row]
        log_threshold = log_thresholds[depth, level]
        is_growing = level < depth
        free = depth + 1 if level == 0 else next_free[b]  # the greedy path's nodes are reserved
        room = max(budget + 1 - free, 0)

        num_chosen = 0
        for f in range(num_frontier):
            parents[f], above = frontier_nodes[b, f], frontier_log_probs[b, f]
            for c in range(num_candidates):
                i = f * num_candidates + c
                score = above + candidate_log_probs[first + f, c]
                scores[i] = score
                if i == 0 or not (score > log_threshold and above >= width_bounds[width, level, c]):
                    continue
                # Among the best so far; of equal ones the earlier.
                if num_chosen == room and (room == 0 or not score > scores[best[room - 1]]):
                    continue
                place = min(num_chosen, room - 1)
                while place > 0 and score > scores[best[place - 1]]:
                    best[place] = best[place - 1]
                    place -= 1
                best[place] = i
                num_chosen = min(num_chosen + 1, room)

        for f in range(num_frontier):
            leftover_parents[b, first_parent + f] = parents[f]
            for c in range(num_candidates):
                leftover_log_probs[b, first_parent + f, c] = scores[f * num_candidates + c]
                leftover_tokens[b, first_parent + f, c] = candidate_tokens[first + f, c]
        is_full = free + num_chosen > budget  # no room: no children but the greedy one
        if level + 1 < depth:
            num_alive[b] = 1 + (0 if is_full else min(num_chosen, num_next - 1))
        for place in range(-1 if is_growing else 0, num_chosen):
            i = best[place] if place >= 0 else 0
            node = free + place if place >= 0 else level + 1
            f, c = i // num_candidates, i % num_candidates
            token, parent = candidate_tokens[first + f, c], parents[f]
            tree_tokens[b, node], tree_parents[b, node], tree_depths[b, node] = token, parent, level + 1
            tree_ancestors[b, node] = tree_ancestors[b, parent] | (np.int64(1) << (node - 1))
            tree_log_probs[b, node] = scores[i]
            leftover_log_probs[b, first_parent + f, c] = -np.inf
            if place + 1 < num_alive[b]:
                frontier_nodes[b, place + 1], frontier_tokens[b, place + 1] = node, token
                frontier_log_probs[b, place + 1] = scores[i]
        next_free[b] = free + num_chosen

    if trims:
        num_next = max(num_alive.max(), 1)
    for b in range(num_reqs):
        for f in range(num_alive[b], num_next):
            frontier_nodes[b, f], frontier_tokens[b, f], frontier_log_probs[b, f] = 0, 0, -np.inf
    return num_next


@compiled("int64[:, :], int64[:, :], int64[:], int64[:], int64[:], int64[:, :], int64")
def tree_place(tree_tokens, token_ids, sources, nodes, fed_sources, fed_tokens, num_reqs):
    num_candidates, num_frontier = token_ids.shape[1], len(token_ids) // num_reqs
    for b in range(num_reqs):
        for k in range(len(sources)):
            source = sources[k]
            row = b * num_frontier + source // num_candidates
            tree_tokens[b, nodes[k]] = token_ids[row, source % num_candidates]
        for k in range(len(fed_sources)):
            source = fed_sources[k]
            row = b * num_frontier + source // num_candidates
            fed_tokens[b, k] = token_ids[row, source % num_candidates]


@compiled("int32[:], int64[:], int64, int64[:], float32[:], int64[:], int64[:], float32[:], int64[:], int64[:]")
def _finish(
    num_nodes, next_free, num_reqs, rows,
    next_confidence, next_depths, next_widths, confidence, depths, widths,
):  # fmt: skip
    for b in range(num_reqs):
        if len(next_free) > 0:
            num_nodes[b] = next_free[b] - 1
        if len(rows) > 0:
            row = rows[b]
            confidence[row], depths[row], widths[row] = next_confidence[b], next_depths[b], next_widths[b]


@compiled(
    "float32[:, :, :], int64[:, :, :], int64[:, :], int64, int64, int64[:, :], int32[:, :], int32[:, :], int64[:, :], "
    "float32[:, :], int32[:]"
)
def _append_leaves(
    leaf_log_probs, leaf_tokens, leaf_parents, num_reqs, max_nodes, tokens, parents, depths, ancestors, log_probs,
    num_nodes,
):  # fmt: skip
    num_candidates = leaf_log_probs.shape[2]
    for b in range(num_reqs):
        room, num_kept = max_nodes - num_nodes[b], 0
        best, scores = np.empty(max(room, 1), dtype=np.int64), np.empty(max(room, 1), dtype=np.float32)
        for i in range(leaf_parents.shape[1] * num_candidates):
            score = leaf_log_probs[b, i // num_candidates, i % num_candidates]
            # Among the best so far; of equal ones the earlier.
            if not score > -np.inf or room == 0 or (num_kept == room and not score > scores[room - 1]):
                continue
            place = min(num_kept, room - 1)
            while place > 0 and score > scores[place - 1]:
                best[place], scores[place] = best[place - 1], scores[place - 1]
                place -= 1
            best[place], scores[place] = i, score
            num_kept = min(num_kept + 1, room)
        for place in range(num_kept):
            node, f, c = num_nodes[b] + 1 + place, best[place] // num_candidates, best[place] % num_candidates
            parent = leaf_parents[b, f]
            tokens[b, node], parents[b, node], depths[b, node] = leaf_tokens[b, f, c], parent, depths[b, parent] + 1
            ancestors[b, node] = ancestors[b, parent] | (np.int64(1) << (node - 1))
            log_probs[b, node] = scores[place]
        num_nodes[b] += num_kept


def tree_finish(
    tree: TreeTables, num_reqs: int, next_free: Tensor | None, leaves: Leaves | None, max_nodes: int,
    plans: TreePlans | None, rows: Tensor | None,
) -> None:  # fmt: skip
    adopted = (None,) * 7 if plans is None else (rows, *plans.adopted_arrays)
    _finish(tree.arrays[5], next_free, num_reqs, *adopted)
    if leaves is not None:
        _append_leaves(leaves.log_probs, leaves.token_ids, leaves.parents, num_reqs, max_nodes, *tree.arrays)
