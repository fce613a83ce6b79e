"""Loop of `loosen`."""

import numpy as np

from vidspec_kernels.compiled import compiled


@compiled(
    "int64[:], int32[:], int64[:], int32[:], int64[:], float32[:, :], int32[:, :], int32[:, :], int32[:], int64[:], "
    "int32[:, :], float32[:], boolean, int64, int64, float32[:], boolean[:]"
)
def loosen(
    target_tokens, draft_tokens, req_rows, nodes, pos, logits, protected, ends, sources, seeds,
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
