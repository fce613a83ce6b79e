"""Pruners that need nothing but the grid: SpecVLM's score-free baselines (METHODS 1). Pure torch."""

import torch
from torch import Tensor

from vllm_vidspec.pruning.base import PruneInputs, Pruner, SelectFn
from vllm_vidspec.pruning.indices import linspace_indices


def _select_none(inputs: PruneInputs) -> Tensor:
    # Keeps everything whatever the (positive) budget: PruneKnobs.ratio_for gives this pruner ratio 0.
    return torch.arange(inputs.grid.num_tokens, dtype=torch.int64, device=inputs.device)


def _select_uniform(inputs: PruneInputs) -> Tensor:
    return linspace_indices(inputs.grid.num_tokens, inputs.num_keep, inputs.device)


def _select_random(inputs: PruneInputs) -> Tensor:
    # Drawn on the CPU on every device, so that one seed is one choice on every machine and rank.
    generator = torch.Generator(device="cpu").manual_seed(inputs.seed)
    drawn = torch.randperm(inputs.grid.num_tokens, generator=generator, dtype=torch.int64)[: inputs.num_keep]
    return drawn.sort().values.to(inputs.device)


def _window(share_before: tuple[int, int]) -> SelectFn:
    numerator, denominator = share_before

    def select(inputs: PruneInputs) -> Tensor:
        start = (inputs.grid.num_tokens - inputs.num_keep) * numerator // denominator
        return torch.arange(start, start + inputs.num_keep, dtype=torch.int64, device=inputs.device)

    return select


def _select_frame(inputs: PruneInputs) -> Tensor:
    """Keep whole frames at regular intervals. What exceeds the budget is cut from the end of the last chosen frame.

    As few frames as can hold the budget, first and last included (a single one is frame 0). The trailing tokens are
    the end of the last frame, hence the first to go.
    """
    grid, num_keep, device = inputs.grid, inputs.num_keep, inputs.device
    per_frame = grid.tokens_per_frame
    if per_frame == 0 or grid.num_frames == 0:
        return torch.arange(num_keep, dtype=torch.int64, device=device)
    if num_keep <= per_frame or grid.num_frames == 1:
        num_chosen = 1
    else:
        num_chosen = max(2, -(-(num_keep - grid.num_trailing) // per_frame))
    frames = linspace_indices(grid.num_frames, num_chosen, device)
    # [num_chosen * per_frame + num_trailing]; where the last frame is not chosen the cut removes the trailing ones.
    within = torch.arange(per_frame, dtype=torch.int64, device=device)
    tokens = (frames[:, None] * per_frame + within).flatten()
    trailing = torch.arange(grid.num_frames * per_frame, grid.num_tokens, dtype=torch.int64, device=device)
    return torch.cat((tokens, trailing))[:num_keep]


UNGUIDED: tuple[Pruner, ...] = (
    Pruner("none", _select_none),
    Pruner("uniform", _select_uniform),
    Pruner("random", _select_random),
    Pruner("window:front", _window((0, 1))),
    Pruner("window:middle", _window((1, 2))),
    Pruner("window:end", _window((1, 1))),
    Pruner("frame", _select_frame),
)
