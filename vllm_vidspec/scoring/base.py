"""What a scorer is given and returns, and the table of scorers by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TreeShapes:
    """The shapes of the drafts by persistent row; a chain is a tree too.

    Attributes:
        rows: `[num_reqs]` int64 persistent row of each request.
        parents: `[max_num_reqs, K + 1]` int32 parent of each node, -1 for the root (node 0).
        depths: `[max_num_reqs, K + 1]` int32.
        ancestors: `[max_num_reqs, K + 1]` int64; bit j - 1 of node i is set iff node j is i or one of its ancestors.
    """

    rows: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor


@dataclass(frozen=True)
class Looseness:
    """Which mismatches of a verify step may stand.

    Attributes:
        rows: `[num_reqs]` int64 persistent row of each request.
        rules: `[max_num_reqs]` int32 by persistent row, flags of `accept_loose`; 0: none.
        shares: `[max_num_reqs]` float32, lambda: the share of a request's drafts with the lowest scores that may.
        windows: `[max_num_reqs]` int32, drafts after a mismatch that must be exact.
        scores: `[num_logits]` float32 of the draft of each row.
        entropies: `[num_logits]` float32, normalised, of what the target samples after each row.
        may_loosen: `[num_logits]` bool: nothing forbids that a mismatch of this row's draft stands.
        min_entropy: Above it the target is unsure.
    """

    rows: Tensor
    rules: Tensor
    shares: Tensor
    windows: Tensor
    scores: Tensor
    entropies: Tensor
    may_loosen: Tensor
    min_entropy: float


@dataclass(frozen=True)
class ScoreInputs:
    """One verify step of a batch.

    A request has one logits row for its root (the last committed token) and one for each draft token, in node order.

    Attributes:
        target_tokens: `[num_logits]` int64, what the target samples after the row's input token, under vanilla's noise.
        draft_tokens: `[num_logits]` int64 input token of each row; a draft row of -1 is invalid and never stands.
        cu_num_logits: `[num_reqs + 1]` int32, where each request's rows begin.
        max_drafts: K, the most drafts that a request can have.
        trees: The drafts' shapes; None where all are chains.
        looseness: What may stand though it is not what the target samples; None: nothing.
    """

    target_tokens: Tensor
    draft_tokens: Tensor
    cu_num_logits: Tensor
    max_drafts: int
    trees: TreeShapes | None = None
    looseness: Looseness | None = None


@dataclass(frozen=True)
class Scored:
    """What stands.

    Attributes:
        sampled: `[num_reqs, K + 1]` int64 emitted tokens, zeros past `num_sampled`.
        num_sampled: `[num_reqs]` int32, accepted drafts + 1.
        path: `[num_reqs, K + 1]` int32: the node behind output j, and j itself past the accepted ones; None for chains.
        kinds: `[num_reqs, K + 1]` int8: why output j stands: 1 it is exact, 2 loosened, 3 shifted; 0: it is the
            target's own token, or there is none. None where all drafts that stand are exact.
    """

    sampled: Tensor
    num_sampled: Tensor
    path: Tensor | None = None
    kinds: Tensor | None = None


Scorer = Callable[[ScoreInputs], Scored]

_SCORERS: dict[str, Scorer] = {}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Add a scorer under a name that `ScoreKnobs.scorer` can take.

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
