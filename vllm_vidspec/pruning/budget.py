"""budget: how many visual tokens the draft keeps. Exact integer arithmetic, no tensors."""

from fractions import Fraction
from math import floor


def budget(num_tokens: int, prune_ratio: float) -> int:
    """Return how many of `num_tokens` visual tokens the draft keeps.

    (1 - prune_ratio) * num_tokens rounded down, because the draft's memory is promised as an upper bound; with the
    ratio taken as the decimal that the user wrote: binary floating point would turn 10 tokens at 0.9 into 0.99... and
    keep none (as SpecVLM's code does). Where the budget is positive at all, at least one token stays.

    Args:
        num_tokens: Visual tokens of the item, >= 0.
        prune_ratio: Share dropped, 0.0 (keep all) to 1.0 (keep none).

    Returns:
        The budget, in [0, num_tokens]; 0 only for `prune_ratio` 1.0 or no tokens.

    Raises:
        ValueError: `num_tokens` is negative or `prune_ratio` is outside [0, 1] or NaN.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be >= 0, got {num_tokens}")
    if not 0.0 <= prune_ratio <= 1.0:
        raise ValueError(f"prune_ratio must be in [0, 1], got {prune_ratio}")
    if num_tokens == 0 or prune_ratio == 1.0:
        return 0
    return max(1, floor((1 - Fraction(repr(float(prune_ratio)))) * num_tokens))
