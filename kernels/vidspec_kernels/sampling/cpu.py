"""Loops of `candidates` and `draw`; numpy where there is noise."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.compiled import jitted, precedes
from vidspec_kernels.sampling.candidates import candidate_scores
from vidspec_kernels.sampling.draw import draw_reference
from vidspec_kernels.sampling.noise import Noise


@jitted("float32[:, :], float32[:], int64, int64, boolean, float32[:, :], int64[:, :]", "boolean")
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
                if not precedes(score, last):
                    continue
            place = min(num_kept, num_candidates - 1)
            while place > 0:
                other = log_probs[row, place - 1]
                if not precedes(score, other):
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


@jitted("float32[:, :], float32[:], int64, int64[:, :], int32[:]", "boolean")
def draw_greedily(logits, temperature, level, out_tokens, out_ids):
    """Write the highest logit's token of each row; return False, and nothing is written, if any row has noise."""
    for row in range(logits.shape[0]):
        if temperature[row] != 0.0:
            return False
    for row in range(logits.shape[0]):
        best = 0
        for token in range(1, logits.shape[1]):
            score, highest = logits[row, token], logits[row, best]
            if precedes(score, highest):
                best = token
        out_tokens[row, level] = best
        out_ids[row] = best
    return True


_NO_NOISE = np.zeros(0, dtype=np.float32)
# Scores of which a loop makes exponentials faster than a call of torch.
_FEW = 2048


def bind_candidates(
    temperature: Tensor | None = None, seeds: Tensor | None = None, pos: Tensor | None = None,
    noise: Noise | None = None, *, log_probs: Tensor, ids: Tensor, width: int = 1, first: int = 0,
    with_log_probs: bool = True, apply_temperature: bool = True,
) -> Callable[[Tensor], None]:  # fmt: skip
    """Return what does `candidates` of logits; of equal scores the lower token first.

    Noise is numpy's, as its bits are vLLM's.
    """
    outs = (log_probs.numpy(), ids.numpy())
    heats = _NO_NOISE if temperature is None else temperature.numpy()

    def run(logits: Tensor) -> None:
        is_few = logits.numel() <= _FEW
        sums = with_log_probs and is_few
        scores = logits if logits.dtype == torch.float32 else logits.float()
        if not best_tokens(scores.numpy(), heats, width, first, sums, *outs):
            scores = candidate_scores(logits, temperature, seeds, pos, noise, width, first, apply_temperature)
            best_tokens(scores.numpy(), _NO_NOISE, width, first, sums, *outs)
        if with_log_probs and not is_few:
            log_probs[: len(logits)].sub_(scores.logsumexp(dim=-1, keepdim=True))

    return run


def bind_draw(
    temperature: Tensor, seeds: Tensor, pos: Tensor, noise: Noise, *, level: int | Tensor, out_tokens: Tensor,
    out_ids: Tensor, apply_temperature: bool = True,
) -> Callable[[Tensor], None]:  # fmt: skip
    """Return what does `draw` of logits; a batch with noise is numpy's."""
    heats, outs = temperature.numpy(), (out_tokens.numpy(), out_ids.numpy())
    column = level.numpy() if isinstance(level, Tensor) else (level,)

    def run(logits: Tensor) -> None:
        scores = logits if logits.dtype == torch.float32 else logits.float()
        if not draw_greedily(scores.numpy(), heats, column[0], *outs):
            draw_reference(
                logits, temperature, seeds, pos, noise,
                level=level, out_tokens=out_tokens, out_ids=out_ids, apply_temperature=apply_temperature,
            )  # fmt: skip

    return run
