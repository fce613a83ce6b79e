"""Pruners that compare a frame with an earlier one: features -> kept_indices (METHODS 1). Pure torch, runs no tower.

SpecVLM's temporal baselines, after FastVID (frame level) and DyCoke (token level), each with the exact budget.
"""

import torch
from torch import Tensor

from vllm_vidspec.pruning.base import PruneInputs, Pruner
from vllm_vidspec.pruning.indices import descending_order, linspace_indices

_COLUMNS = 128  # features widened to float64 at a time: 25,000 tokens need some 150 MB instead of some 4 GB
_SAME = 1e-12  # below the precision of any feature; makes an unchanged token's novelty 0 on every device
_GROUP = 4  # frames of a DyCoke group


def novelty(features: Tensor, tokens: Tensor, references: Tensor) -> Tensor:
    """Return 1 - cosine between each token and its reference.

    As half the squared distance of the unit vectors, which is exact where they are equal and precise where they nearly
    are. A zero vector has cosine 0 with any other, and 1 with another zero vector: nothing changed.

    Args:
        features: float16, bfloat16 or float32 [num_tokens, dim], finite, any strides.
        tokens: int64 [n], rows of `features`.
        references: int64 [n], the row that each is compared with.

    Returns:
        float64 [n], in [0, 2] up to rounding, never NaN.
    """
    squares = torch.zeros(len(features), dtype=torch.float64, device=features.device)
    for columns in features.split(_COLUMNS, dim=1):
        squares += columns.double().square().sum(1)
    is_zero = squares == 0
    scale = torch.where(is_zero, 0.0, squares.rsqrt())  # [num_tokens]
    distance = torch.zeros(len(tokens), dtype=torch.float64, device=features.device)
    for columns in features.split(_COLUMNS, dim=1):
        unit = columns * scale[:, None]  # float64 [num_tokens, <= _COLUMNS]
        distance += (unit[tokens] - unit[references]).square().sum(1)
    distance = torch.where(distance < _SAME, 0.0, distance / 2)
    return torch.where(is_zero[tokens] != is_zero[references], 1.0, distance)


def _select_fastvid(inputs: PruneInputs) -> Tensor:
    """Keep the frames that differ most from the one before them, whole.

    SpecVLM's SD-FastVID drops the later frame of the most similar consecutive ones. Ours ranks: frame 0 first, then by
    the mean over positions of `novelty` against the same position in the previous frame (kept or not), of equal ones
    the earlier. Whole frames are kept in that order; the one that no longer fits fills the budget with its own tokens
    at regular intervals. The trailing tokens are the end of the last frame. One frame, or tokens without frames, are
    pruned like `uniform`.
    """
    grid, num_keep, per_frame = inputs.grid, inputs.num_keep, inputs.grid.tokens_per_frame
    if grid.num_frames <= 1 or per_frame == 0:
        return linspace_indices(grid.num_tokens, num_keep, inputs.device)
    later = torch.arange(per_frame, grid.num_frames * per_frame, dtype=torch.int64, device=inputs.device)
    change = novelty(inputs.features, later, later - per_frame).view(-1, per_frame).mean(1)  # [num_frames - 1]
    # From here on a few numbers per frame: on the CPU, where the sizes are needed anyway.
    order = torch.cat((torch.zeros(1, dtype=torch.int64), descending_order(change.cpu()) + 1))  # [num_frames]
    sizes = torch.full((grid.num_frames,), per_frame, dtype=torch.int64)
    sizes[-1] += grid.num_trailing
    filled = sizes[order].cumsum(0)  # [num_frames]
    num_whole = int((filled <= num_keep).sum())
    is_whole = torch.zeros(grid.num_frames, dtype=torch.bool)
    is_whole[order[:num_whole]] = True
    is_kept = is_whole.repeat_interleave(sizes)  # [num_tokens]
    num_left = num_keep - (int(filled[num_whole - 1]) if num_whole else 0)
    if num_left:
        frame = int(order[num_whole])
        is_kept[frame * per_frame + linspace_indices(int(sizes[frame]), num_left)] = True
    return is_kept.nonzero()[:, 0].to(inputs.device)


def _select_dycoke(inputs: PruneInputs) -> Tensor:
    """Keep the first frame of every group of four, then the tokens that differ most from their reference.

    SpecVLM's SD-DyCoke: frames 2, 3 and 4 of a group are compared with its frames 1, 1 and 3, position by position.
    Its code keeps every first frame, about 30 % at ratio 0.9; ours keeps the budget: all tokens of first frames, then
    by `novelty`, of equal ones the lower index, then the trailing tokens (they have no reference). A budget below the
    first frames' tokens, as any below a quarter, takes these at regular intervals, and similarity has no say. Tokens
    without frames are pruned like `uniform`.
    """
    grid, num_keep, per_frame = inputs.grid, inputs.num_keep, inputs.grid.tokens_per_frame
    num_framed = grid.num_frames * per_frame
    if num_framed == 0:
        return linspace_indices(grid.num_tokens, num_keep, inputs.device)
    tokens = torch.arange(grid.num_tokens, dtype=torch.int64, device=inputs.device)
    phase = tokens[:num_framed] // per_frame % _GROUP
    first = (phase == 0).nonzero()[:, 0]
    if num_keep <= len(first):
        return first[linspace_indices(len(first), num_keep, inputs.device)]
    other = (phase != 0).nonzero()[:, 0]
    frames_back = torch.where(phase[other] == 2, 2, 1)  # 2 -> 1, 3 -> 1, 4 -> 3; phases count from 0
    ranked = other[descending_order(novelty(inputs.features, other, other - frames_back * per_frame))]
    return torch.cat((first, ranked, tokens[num_framed:]))[:num_keep].sort().values


TEMPORAL: tuple[Pruner, ...] = (
    Pruner("fastvid", _select_fastvid, needs=frozenset({"features"})),
    Pruner("dycoke", _select_dycoke, needs=frozenset({"features"})),
)
