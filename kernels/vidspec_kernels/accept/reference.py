"""`accept` in numpy or torch: the specification."""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.accept.tables import EPSILON, LOWEST, NUM_SUMS, SHIFT, WINDOW, Looseness, Tally, TreeShapes
from vidspec_kernels.arrays import array_module, as_array, at_least, at_most
from vidspec_kernels.dispatch import has_cpu_twin


@has_cpu_twin
def accept_reference(
    target_tokens: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor, max_drafts: int,
    trees: TreeShapes | None = None, looseness: Looseness | None = None, tally: Tally | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Do what `accept` does, in numpy or torch without a loop: the specification. Same arguments and results."""
    device = target_tokens.device
    xp, num_cols = array_module(device), max_drafts + 1
    col = _arange(num_cols, device)
    node = col[1:]  # [K]
    place = _places(xp, cu_num_logits, target_tokens.shape[0], col)
    target, draft = place.spread(target_tokens), place.spread(draft_tokens)[:, 1:]  # [R, K + 1] and [R, K]
    shape = _shapes(xp, trees, place, col)
    expected = target[shape.parent_index]
    passes = (draft >= 0) & (draft == expected) & place.has_row
    kind = mismatches = path = kinds = None
    if looseness is not None:
        kind, mismatches = _judge(xp, looseness, node, shape, place, draft, expected)
        passes = kind != 0
    if trees is None:
        num_accepted = passes.cumprod(1).sum(1)[:, None]  # [R, 1]
    else:
        num_accepted, path = _deepest(xp, shape, passes, mismatches, place.has_row, col)
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
        torch.as_tensor(sampled), _as(torch.int32, num_sampled[:, 0]), None if path is None else _as(torch.int32, path),
        None if kinds is None else _as(torch.int8, kinds),
    )  # fmt: skip
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
        """Return a vector's entry of each node's row, [R, K + 1]."""
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
    if place.row is not None:  # nodes without a row may hold anything; none is the ancestor of one that has a row
        parent = at_most(at_least(parent, 0), num_cols - 1)
    return _Shapes((req_idx, parent), depth, words[:, 1:], words, req_idx)


def _deepest(xp: ModuleType, shape: _Shapes, passes: Any, mismatches: Any, has_row: Any, col: Any) -> tuple[Any, Any]:
    """Return how many drafts of trees are accepted, [R, 1], and the path to the last, [R, K + 1]."""
    num_cols, bit = len(col), 1 << col[:-1]
    alive = has_row & ((shape.above & ~(passes * bit).sum(1)[:, None]) == 0)  # distinct bits: the sum is the union
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
        kinds: [R, K + 1]; None where only exact matches are accepted.
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
