"""Index choices that pruners share: even intervals and stable ranking. Pure torch, touches nothing else."""

import torch
from torch import Tensor


def linspace_indices(num_candidates: int, num_keep: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `num_keep` indices at regular intervals over `num_candidates`, both ends included.

    SpecVLM eq. 7 as its code has it, integer linspace(0, n - 1, k), in exact integers: index i is i (n - 1) // (k - 1).
    One index alone is 0.

    Args:
        num_candidates: n >= num_keep.
        num_keep: k >= 0.
        device: Where the result lives.

    Returns:
        int64 [num_keep], strictly ascending.
    """
    steps = torch.arange(num_keep, dtype=torch.int64, device=device)
    return steps * (num_candidates - 1) // max(num_keep - 1, 1)


def descending_order(scores: Tensor) -> Tensor:
    """Return the indices that sort `scores` from highest to lowest. Of equal ones the lower index comes first.

    Args:
        scores: float [n], without NaN.

    Returns:
        int64 [n], a permutation; the same on every device.
    """
    # + 0.0 turns -0.0 into 0.0: a radix sort on the bits may tell them apart.
    return (scores + 0.0).sort(descending=True, stable=True).indices


def top_k_indices(scores: Tensor, num_keep: int) -> Tensor:
    """Return the indices of the `num_keep` highest scores. Of equal ones the lower index wins.

    Args:
        scores: float [n], without NaN.
        num_keep: In [0, n].

    Returns:
        int64 [num_keep], strictly ascending.
    """
    return descending_order(scores)[:num_keep].sort().values
