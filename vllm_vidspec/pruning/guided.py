"""Pruners that follow the target: scores -> kept_indices (METHODS 1 and 3). Pure torch, measures no scores itself."""

import torch
from torch import Tensor

from vllm_vidspec.pruning.base import PruneInputs, Pruner
from vllm_vidspec.pruning.indices import descending_order, linspace_indices, top_k_indices


def top_p_size(ordered_scores: Tensor, lambda_r: float) -> int:
    """Return the size of the smallest prefix whose sum reaches `lambda_r` times the total (SpecVLM eq. 6).

    Summed in float64, where 25,000 float32 scores lose nothing that a threshold could notice, and on the CPU, because
    CUDA's floating point prefix sum may differ from run to run, hence from rank to rank.

    Args:
        ordered_scores: float32 [n], descending, finite, >= 0; any device.
        lambda_r: In [0, 1].

    Returns:
        The size, in [0, n]: 0 for `lambda_r` 0 or a total of 0; for `lambda_r` 1 the number of positive scores.
    """
    ordered_scores = ordered_scores.cpu()
    if lambda_r == 1.0:  # exactly, even where a tiny score no longer changes the float64 sum
        return int((ordered_scores > 0).sum())
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), ordered_scores.double().cumsum(0)))  # [n + 1]
    return int((sums < lambda_r * sums[-1]).sum())


def default_uv_layer(num_layers: int) -> int:
    """Return the paper's Lmax, 20 of 28 layers and more, or as far into a shallower model."""
    return max(1, min(20, round(0.7 * num_layers)))


def _select_top_k(inputs: PruneInputs) -> Tensor:
    """Keep the highest scores. Of equal ones the lower index wins."""
    return top_k_indices(inputs.scores, inputs.num_keep)


def _select_specvlm(inputs: PruneInputs) -> Tensor:
    """Keep the top tokens that hold `lambda_r` of the score, and of the others as many as fit, evenly spaced.

    SpecVLM, eq. 6 (stage I, Top-P retention) and eq. 7 (stage II, spatially uniform reduction), as its code reads
    them: stage II fills the budget that stage I leaves, from the other tokens in sequence order, both ends included;
    stage I alone is cut to the budget, the highest scores first. Of equal scores the lower index ranks higher. Without
    any score, and at `lambda_r` 0, stage I is empty and the choice is that of `uniform`.
    """
    scores, num_tokens = inputs.scores, inputs.grid.num_tokens
    assert scores is not None  # checked
    order = descending_order(scores)  # [num_tokens]
    retained = order[: min(top_p_size(scores[order], inputs.lambda_r), inputs.num_keep)]
    is_rest = torch.ones(num_tokens, dtype=torch.bool, device=inputs.device)
    is_rest[retained] = False
    rest = is_rest.nonzero()[:, 0]  # [num_tokens - |V_R|], in sequence order
    spread = rest[linspace_indices(len(rest), inputs.num_keep - len(retained), inputs.device)]
    return torch.cat((retained, spread)).sort().values


# `attention` and `uv` are one rule on two measurements: SpecVLM's guidance (eq. 5) without stage II, its ablation; and
# ParallelVLM's UV-Prune (eq. 2-4), whose scores may be negative.
GUIDED: tuple[Pruner, ...] = (
    Pruner("specvlm", _select_specvlm, needs=frozenset({"attention"}), refuses_negative=True),
    Pruner("attention", _select_top_k, needs=frozenset({"attention"})),
    Pruner("uv", _select_top_k, needs=frozenset({"uv"})),
)
