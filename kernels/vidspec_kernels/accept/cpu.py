"""Compiled loops of `accept`."""

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.accept.tables import EPSILON, LOWEST, NUM_SUMS, SHIFT, WINDOW, Looseness, Tally, TreeShapes
from vidspec_kernels.compiled import NOTHING, compiled

# Of chains, and where all is strict.
_NO_SHAPES = (NOTHING["int64[:]"], NOTHING["int32[:, :]"], NOTHING["int32[:, :]"], NOTHING["int64[:, :]"])
_NO_RULES = tuple(
    NOTHING[f"{dtype}[:]"] for dtype in ("int64", "int32", "float32", "int32", "float32", "float32", "bool")
)


@compiled(
    "int64[:], int32[:], int32[:], int64, int64[:], int32[:, :], int32[:, :], int64[:, :], "
    "int64[:], int32[:], float32[:], int32[:], float32[:], float32[:], boolean[:], float32, "
    "int64, int64, int64, float64, int64[:, :], int32[:], int32[:, :], int8[:, :]"
)
def _accept(
    target_tokens, draft_tokens, cu_num_logits, num_cols, rows, parents, depths, ancestors,
    loose_rows, rules, shares, windows, scores, entropies, may_loosen, min_entropy,
    lowest, next_match, shift, epsilon, sampled, num_sampled, path, kinds,
):  # fmt: skip
    has_trees, is_loose = len(rows) > 0, len(loose_rows) > 0
    # Of a request, by node: what it is, and what is above it.
    parent, depth = np.zeros(num_cols, dtype=np.int64), np.zeros(num_cols, dtype=np.int64)
    above, kind = np.zeros(num_cols, dtype=np.int64), np.zeros(num_cols, dtype=np.int8)
    mismatches, branch = np.zeros(num_cols, dtype=np.int64), np.zeros(num_cols, dtype=np.int64)
    for r in range(len(cu_num_logits) - 1):
        start = cu_num_logits[r]
        num_logits = min(cu_num_logits[r + 1] - start, num_cols)
        passing = np.int64(0)  # bits of the drafts that pass
        for node in range(1, num_logits):
            bit = np.int64(1) << (node - 1)
            parent[node], depth[node], above[node] = node - 1, node, (bit << 1) - 1
            if has_trees:
                row = rows[r]
                parent[node], depth[node], above[node] = parents[row, node], depths[row, node], ancestors[row, node]
            draft = draft_tokens[start + node]
            kind[node] = 1 if draft >= 0 and draft == target_tokens[start + parent[node]] else 0
            if kind[node] != 0:
                passing |= bit
        if is_loose:
            row, exact = loose_rows[r], passing
            passing = np.int64(0)
            for node in range(1, num_logits):
                wrong, mismatches[node] = above[node] & ~exact, 0
                while wrong != 0:
                    wrong &= wrong - 1
                    mismatches[node] += 1
                branch[node] = above[node] & -above[node]
            for node in range(1, num_logits):
                draft, expected = draft_tokens[start + node], target_tokens[start + parent[node]]
                if kind[node] == 0 and draft >= 0 and may_loosen[start + node]:
                    score, place, num_peers, is_drafted, in_window = scores[start + node], 0, 0, False, False
                    if score != score:
                        score = np.float32(np.inf)
                    for other in range(1, num_logits):
                        if draft_tokens[start + other] >= 0 and branch[other] == branch[node]:
                            num_peers += 1
                            theirs = scores[start + other]
                            if theirs != theirs:
                                theirs = np.float32(np.inf)
                            if theirs < score or (theirs == score and other <= node):
                                place += 1
                            is_drafted |= draft_tokens[start + other] == expected
                        if (above[other] >> (node - 1)) & 1 != 0 and depth[other] - depth[node] == windows[row]:
                            in_window |= mismatches[other] == mismatches[node]
                    may_differ = in_window and entropies[start + parent[node]] > min_entropy
                    is_low = place <= np.float64(shares[row]) * num_peers + epsilon
                    if (rules[row] & lowest != 0 and is_low) or (rules[row] & next_match != 0 and may_differ):
                        kind[node] = 2
                    elif rules[row] & shift != 0 and is_drafted:
                        kind[node] = 3
                if kind[node] != 0:
                    passing |= np.int64(1) << (node - 1)

        last, last_depth = 0, 0
        for node in range(1, num_logits):
            if above[node] & ~passing == 0:
                is_better = not has_trees or depth[node] > last_depth
                if has_trees and is_loose and depth[node] == last_depth:
                    is_better = mismatches[node] < mismatches[last]
                if is_better:
                    last, last_depth = node, depth[node]
        num_sampled[r] = min(last_depth + 1, num_logits)
        for col in range(num_cols):
            sampled[r, col] = 0
            if has_trees:
                path[r, col] = col
            if is_loose:
                kinds[r, col] = 0
        if num_logits > 0:
            sampled[r, last_depth] = target_tokens[start + last]
        if has_trees:
            path[r, 0] = 0
        node = last
        while node > 0:
            place = depth[node]
            sampled[r, place - 1] = draft_tokens[start + node]
            if has_trees:
                path[r, place] = node
            if is_loose:
                kinds[r, place - 1] = kind[node]
            node = parent[node]


@compiled(
    "int32[:], int64[:], boolean[:], int64[:], int64[:, :], int32[:, :], int32[:], "
    "int64[:], int32[:, :], int8[:, :], int32[:, :], int32[:], int64, int64"
)
def _count(
    cu_num_logits, rows, has_draft, totals, by_kind, kept_path, kept_accepted,
    tree_rows, depths, kinds, path, num_sampled, num_cols, num_sums,
):  # fmt: skip
    found = np.zeros(3, dtype=np.int64)
    for r in range(len(rows)):
        row = rows[r]
        num_logits = min(cu_num_logits[r + 1] - cu_num_logits[r], num_cols)
        num_drafts = max(num_logits - 1, 0) if has_draft[row] else 0
        accepted = max(num_sampled[r] - 1, 0)
        if len(kept_accepted) > 0:
            for col in range(num_cols):
                kept_path[row, col] = path[r, col] if len(path) > 0 else col
            kept_accepted[row] = num_sampled[r] - 1
        found[:] = 0
        if num_drafts > 0:
            found[0] = accepted
            if len(kinds) > 0:
                for col in range(accepted):
                    if kinds[r, col] > 1:
                        found[kinds[r, col] - 1] += 1
                        found[0] -= 1
            deepest = num_drafts
            if len(tree_rows) > 0:
                deepest = 0
                for node in range(1, num_logits):
                    deepest = max(deepest, depths[tree_rows[r], node])
            totals[0] += 1
            totals[1] += num_drafts
            totals[2] += accepted
            totals[3] += deepest
            for kind in range(3):
                totals[4 + kind] += found[kind]
            for col in range(accepted):
                totals[num_sums + col] += 1
        if len(by_kind) > 0:
            by_kind[r, :] = found


def accept(
    target_tokens: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor, max_drafts: int,
    trees: TreeShapes | None = None, looseness: Looseness | None = None, tally: Tally | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Do what `accept` does."""
    num_reqs, num_cols = cu_num_logits.shape[0] - 1, max_drafts + 1
    sampled = target_tokens.new_empty(num_reqs, num_cols)
    num_sampled, bounds = cu_num_logits.new_empty(num_reqs), cu_num_logits.numpy()
    path = kinds = None
    shapes, rules, min_entropy = _NO_SHAPES, _NO_RULES, 0.0
    path_array, kinds_array = NOTHING["int32[:, :]"], NOTHING["int8[:, :]"]
    if trees is not None:
        path = cu_num_logits.new_empty(num_reqs, num_cols)
        shapes, path_array = tuple(table.numpy() for table in trees), path.numpy()
    if looseness is not None:
        kinds = cu_num_logits.new_empty(num_reqs, num_cols, dtype=torch.int8)
        *vectors, min_entropy = looseness
        rules, kinds_array = tuple(vector.numpy() for vector in vectors), kinds.numpy()
    _accept(
        target_tokens.numpy(), draft_tokens.numpy(), bounds, num_cols, *shapes, *rules, min_entropy,
        LOWEST, WINDOW, SHIFT, EPSILON, sampled.numpy(), num_sampled.numpy(), path_array, kinds_array,
    )  # fmt: skip
    if tally is not None:
        by_kind, kept = NOTHING["int64[:, :]"], (NOTHING["int32[:, :]"], NOTHING["int32[:]"])
        if tally.by_kind is not None:
            by_kind = tally.by_kind.numpy()
        if tally.path is not None and tally.num_accepted is not None:
            kept = (tally.path.numpy(), tally.num_accepted.numpy())
        _count(
            bounds, tally.rows.numpy(), tally.has_draft.numpy(), tally.totals.numpy(), by_kind, *kept,
            shapes[0], shapes[2], kinds_array, path_array, num_sampled.numpy(), num_cols, NUM_SUMS,
        )  # fmt: skip
    return sampled, num_sampled, path, kinds
