"""What runs for `candidates` and `draw`: loops of `best`, and numpy where there is noise."""

from collections.abc import Callable

import torch
from torch import Tensor

from vidspec_kernels.candidates import candidate_scores
from vidspec_kernels.cpu.best import best_tokens, draw_greedily
from vidspec_kernels.cpu.compiled import NOTHING
from vidspec_kernels.draw import draw_reference
from vidspec_kernels.sampling import Noise

_NO_NOISE = NOTHING["float32[:]"]
# Scores of which a loop makes exponentials faster than a call of torch.
_FEW = 2048


def bind_candidates(
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    pos: Tensor | None = None,
    noise: Noise | None = None,
    *,
    log_probs: Tensor,
    ids: Tensor,
    width: int = 1,
    first: int = 0,
    with_log_probs: bool = True,
    apply_temperature: bool = True,
) -> Callable[[Tensor], None]:
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
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    noise: Noise,
    *,
    level: int | Tensor,
    out_tokens: Tensor,
    out_ids: Tensor,
    apply_temperature: bool = True,
) -> Callable[[Tensor], None]:
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
