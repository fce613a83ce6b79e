"""What a scorer is given and returns, and the table of scorers by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ScoreInputs:
    """One verify step of a batch.

    A request has one logits row for its root (the last committed token) and one for each draft token, in chain order.

    Attributes:
        target_tokens: `[num_logits]` int64, what the target samples after the row's input token, under vanilla's noise.
        draft_tokens: `[num_logits]` int64 input token of each row; a draft row of -1 is invalid and never stands.
        cu_num_logits: `[num_reqs + 1]` int32, where each request's rows begin.
        max_drafts: K, the most drafts that a request can have.
    """

    target_tokens: Tensor
    draft_tokens: Tensor
    cu_num_logits: Tensor
    max_drafts: int


# (inputs) -> (sampled int64 [num_reqs, K + 1], num_sampled int32 [num_reqs]); entries past num_sampled are 0
Scorer = Callable[[ScoreInputs], tuple[Tensor, Tensor]]

_SCORERS: dict[str, Scorer] = {}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Add a scorer under a name that `VidSpecConfig.scorer` can take.

    Raises:
        ValueError: The name is taken.
    """
    if name in _SCORERS:
        raise ValueError(f"scorer {name!r} is registered already")
    _SCORERS[name] = scorer


def get_scorer(name: str) -> Scorer:
    """Return a scorer by name.

    Raises:
        KeyError: No such scorer.
    """
    return _SCORERS[name]


def scorer_names() -> tuple[str, ...]:
    """Return the registered names."""
    return tuple(_SCORERS)
