"""Loops of `accept`, `loosen` and `place_trees`."""

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.accept import EPSILON, LOWEST, NUM_SUMS, SHIFT, WINDOW, Looseness, Tally, TreeShapes
from vidspec_kernels.cpu.compiled import NOTHING, compiled
from vidspec_kernels.loosen import CHANCE, RELEVANCE, LooseTables, loosen_reference
from vidspec_kernels.place_trees import TreePlaces

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
        stand = np.int64(0)  # bits of the drafts that stand
        for node in range(1, num_logits):
            bit = np.int64(1) << (node - 1)
            parent[node], depth[node], above[node] = node - 1, node, (bit << 1) - 1
            if has_trees:
                row = rows[r]
                parent[node], depth[node], above[node] = parents[row, node], depths[row, node], ancestors[row, node]
            draft = draft_tokens[start + node]
            kind[node] = 1 if draft >= 0 and draft == target_tokens[start + parent[node]] else 0
            if kind[node] != 0:
                stand |= bit
        if is_loose:
            row, exact = loose_rows[r], stand
            stand = np.int64(0)
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
                    stand |= np.int64(1) << (node - 1)

        last, last_depth = 0, 0
        for node in range(1, num_logits):
            if above[node] & ~stand == 0:
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
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    max_drafts: int,
    trees: TreeShapes | None = None,
    looseness: Looseness | None = None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
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


@compiled(
    "int64[:], int32[:], float32[:, :], int64[:], int32[:], int64[:], int32[:, :], int32[:, :], int32[:], int64[:], "
    "int32[:, :], float32[:], boolean, int64, int64, float32[:], boolean[:]"
)
def _loosen(
    target_tokens, draft_tokens, logits, req_rows, nodes, pos, protected, ends, sources, seeds,
    parents, relevance, is_predicting, by_relevance, by_chance, scores, may_loosen,
):  # fmt: skip
    for i in range(len(target_tokens)):
        row, node = req_rows[i], nodes[i]
        parent_row = i - min(node, 1)
        if len(parents) > 0:
            parent_row = i - node + max(parents[row, node], 0)
        draft, fed = max(draft_tokens[i], 0), max(draft_tokens[parent_row], 0)
        expected = max(target_tokens[parent_row], 0)
        found = protected[row, draft // 32] >> (draft % 32)
        found |= protected[row, expected // 32] >> (expected % 32)
        found |= ends[row, fed // 32] >> (fed % 32)
        may = np.isfinite(logits[parent_row, draft]) and found & 1 == 0
        score = np.float32(0.0)
        if len(relevance) > 0:
            score = relevance[parent_row if is_predicting else i]
            may = may and not (score != score and sources[row] == by_relevance)
        if sources[row] == by_chance:
            word = seeds[row] + pos[i] * np.int64(0x1E3779B97F4A7C15)
            word = (word ^ ((word >> 30) & np.int64(0x3FFFFFFFF))) * np.int64(-0x40A7B892E31B1A47)
            word = (word ^ ((word >> 27) & np.int64(0x1FFFFFFFFF))) * np.int64(-0x6B2FB644ECCEEE15)
            word = word ^ ((word >> 31) & np.int64(0x1FFFFFFFF))
            score = np.float32((word >> 40) & 0xFFFFFF) / np.float32(16777216.0)
        scores[i], may_loosen[i] = score, may


def loosen(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    logits: Tensor,
    req_rows: Tensor,
    nodes: Tensor,
    pos: Tensor,
    tables: LooseTables,
    parents: Tensor | None = None,
    relevance: Tensor | None = None,
    is_predicting: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do what `loosen` does; logits that are no float32 are the reference's."""
    if logits.dtype != torch.float32:
        return loosen_reference(
            target_tokens, draft_tokens, logits, req_rows, nodes, pos, tables, parents, relevance, is_predicting
        )
    scores = logits.new_empty(len(target_tokens))
    may_loosen = logits.new_empty(len(target_tokens), dtype=torch.bool)
    _loosen(
        target_tokens.numpy(), draft_tokens.numpy(), logits.numpy(), req_rows.numpy(), nodes.numpy(), pos.numpy(),
        *(table.numpy() for table in tables[:4]),
        NOTHING["int32[:, :]"] if parents is None else parents.numpy(),
        NOTHING["float32[:]"] if relevance is None else relevance.numpy(), is_predicting,
        RELEVANCE, CHANCE, scores.numpy(), may_loosen.numpy(),
    )  # fmt: skip
    return scores, may_loosen


@compiled(
    "int64[:], int32[:], int32[:], int32[:, :], int64[:, :], int64[:, :], int64[:, :], boolean, "
    "int32[:], int32[:], int32[:], int32[:], int64[:, :], int64"
)
def _place_trees(
    idx_mapping, query_start_loc, seq_lens, depths, ancestors, positions, out_positions, is_apart,
    query_start, num_queries, prefix_lens, roots, masks, size,
):  # fmt: skip
    num_reqs, num_cols = len(idx_mapping), depths.shape[1]
    for b in range(num_reqs):
        row, start = idx_mapping[b], query_start_loc[b]
        num_tokens = query_start_loc[b + 1] - start
        root, is_tree = seq_lens[b] - num_tokens, num_tokens <= num_cols
        query_start[b], num_queries[b] = start if is_tree else 0, num_tokens if is_tree else 0
        prefix_lens[b], roots[b] = root + 1 if is_tree else 0, root
        for node in range(num_cols):
            masks[b, node] = ancestors[row, node] if node < num_queries[b] else 0
        for axis in range(positions.shape[0]):
            first = positions[axis, start] if num_tokens > 0 else 0
            if is_apart:
                for token in range(start, start + num_tokens):
                    out_positions[axis, token] = positions[axis, token]
            for node in range(num_queries[b]):
                # A chain's node is at its own depth: its positions are right, and those of media in a prompt are none.
                if depths[row, node] != node:
                    out_positions[axis, start + node] = first + depths[row, node]
    for b in range(num_reqs, size):
        query_start[b], num_queries[b], prefix_lens[b], roots[b] = 0, 0, 0, 0
        masks[b, :] = 0


def place_trees(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    positions: Tensor,
    places: TreePlaces,
    *,
    size: int,
    out_positions: Tensor | None = None,
) -> None:
    """Do what `place_trees` does. `positions` has two dimensions."""
    before = positions.numpy()
    _place_trees(
        idx_mapping.numpy(), query_start_loc.numpy(), seq_lens.numpy(), depths.numpy(), ancestors.numpy(),
        before, before if out_positions is None else out_positions.numpy(), out_positions is not None,
        places.query_start.numpy(), places.num_queries.numpy(), places.prefix_lens.numpy(), places.roots.numpy(),
        places.masks.numpy(), size,
    )  # fmt: skip
