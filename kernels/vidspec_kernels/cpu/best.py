"""Loops that find the best scores: of a row's tokens, of a text row's cosines."""

import numpy as np

from vidspec_kernels.cpu.compiled import compiled


@compiled("float32, float32", "boolean")
def _precedes(score, other):
    """Return whether a score comes before another that was found earlier; NaN comes first."""
    return score > other or (score != score and other == other)


@compiled("float32[:, :], float32[:], int64, int64, boolean, float32[:, :], int64[:, :]", "boolean")
def best_tokens(scores, temperature, width, first, with_log_probs, log_probs, ids):
    """Write the best of each row, best first; of equal ones the lower token, NaN before all others.

    Return False, and nothing is written, if the temperature of any row's request is not 0.
    """
    num_rows, num_candidates = scores.shape[0], ids.shape[1]
    if len(temperature) > 0:
        for req_idx in range(first // width, (first + num_rows - 1) // width + 1):
            if temperature[req_idx] != 0.0:
                return False
    for row in range(num_rows):
        num_kept = 0
        for token in range(scores.shape[1]):
            score = scores[row, token]
            if num_kept == num_candidates:
                last = log_probs[row, num_candidates - 1]
                if not _precedes(score, last):
                    continue
            place = min(num_kept, num_candidates - 1)
            while place > 0:
                other = log_probs[row, place - 1]
                if not _precedes(score, other):
                    break
                log_probs[row, place], ids[row, place] = other, ids[row, place - 1]
                place -= 1
            log_probs[row, place], ids[row, place] = score, token
            num_kept = min(num_kept + 1, num_candidates)
        if with_log_probs:
            most, total = log_probs[row, 0], 0.0
            shift = most if np.abs(most) != np.inf else np.float32(0.0)
            for token in range(scores.shape[1]):
                total += np.exp(scores[row, token] - shift)
            normaliser = np.float32(shift + np.log(total))
            for place in range(num_candidates):
                log_probs[row, place] -= normaliser
    return True


@compiled("float32[:, :], float32[:], int64, int64[:, :], int32[:]", "boolean")
def draw_greedily(logits, temperature, level, out_tokens, out_ids):
    """Write the highest logit's token of each row; return False, and nothing is written, if any row has noise."""
    for row in range(logits.shape[0]):
        if temperature[row] != 0.0:
            return False
    for row in range(logits.shape[0]):
        best = 0
        for token in range(1, logits.shape[1]):
            score, highest = logits[row, token], logits[row, best]
            if _precedes(score, highest):
                best = token
        out_tokens[row, level] = best
        out_ids[row] = best
    return True


@compiled("float32[:, :, :], int32[:], int64[:, :], float32, float32[:, :]")
def select_cosines(cosines, cu_num_logits, sizes, scale, top):
    """Put the largest cosines of each row into `top`, descending, NaN before all others."""
    top_n = top.shape[1]
    for r in range(len(sizes)):
        for i in range(sizes[r, 0]):
            best = top[cu_num_logits[r] + i]
            for key in range(sizes[r, 1]):
                score = cosines[r, i, key] / scale
                if not _precedes(score, best[top_n - 1]):
                    continue
                place = top_n - 1
                while place > 0 and _precedes(score, best[place - 1]):
                    best[place] = best[place - 1]
                    place -= 1
                best[place] = score
