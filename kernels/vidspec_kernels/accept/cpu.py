"""Loops of `accept`."""

import numpy as np
from torch import Tensor

from vidspec_kernels.accept.tables import FLAGS, NUM_SUMS, Looseness, Tally, TreeShapes
from vidspec_kernels.compiled import compiled


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
    "int32[:], int64[:], boolean[:], int64[:], int32[:, :], int32[:], "
    "int64[:], int32[:, :], int8[:, :], int32[:, :], int32[:], int64, int64"
)
def _count(
    cu_num_logits, rows, has_draft, totals, kept_path, kept_accepted,
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


def accept(
    target_tokens: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor, trees: TreeShapes | None,
    looseness: Looseness | None, tally: Tally | None, sampled: Tensor, num_sampled: Tensor, path: Tensor | None,
    kinds: Tensor | None,
) -> None:  # fmt: skip
    """Do what `accept` does; the last four are written."""
    bounds, num_cols, shapes = cu_num_logits.numpy(), sampled.shape[1], trees or (None,) * 4
    rules = looseness or (*(None,) * 7, 0.0)
    _accept(target_tokens, draft_tokens, bounds, num_cols, *shapes, *rules, *FLAGS, sampled, num_sampled, path, kinds)
    if tally is not None:
        _count(bounds, *tally[:5], shapes[0], shapes[2], kinds, path, num_sampled, num_cols, NUM_SUMS)
