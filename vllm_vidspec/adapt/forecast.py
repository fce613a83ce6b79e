"""Forecast: what each option is expected to give the requests of a batch, and how long its step takes; numpy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_vidspec.adapt.acceptance import AcceptanceTable
from vllm_vidspec.adapt.costs import FEATURES, StepCosts, features
from vllm_vidspec.adapt.options import REST, Option
from vllm_vidspec.adapt.requests import Batch


class Steps(NamedTuple):
    """Steps that a batch may take, one for each option."""

    kinds: list[tuple]  # `[m]` keys of StepCosts
    features: np.ndarray  # `[m, len(FEATURES)]`
    seconds: np.ndarray  # `[m]` predicted


def useful(lengths: np.ndarray, answer_tokens: np.ndarray | float) -> np.ndarray:
    """Return how many draft tokens of a step are of use, of those that are expected to be accepted, in answers of so
    many tokens: the step of the first token drafts and verifies nothing, and half of what the last step's drafts give
    comes after the end.
    """
    num_steps = np.minimum(answer_tokens, 1 + (answer_tokens - 1 + lengths / 2) / (1 + lengths))
    return answer_tokens / num_steps - 1


class Forecast:
    """What is expected of one engine's steps. An option is known by its place.

    Args:
        options: What may be drafted, `REST` included.
        num_slots: As of `Controller`,
        pads: and this.

    Attributes:
        num_tokens: `[m]` draft tokens of a request.
        rest: Place of `REST`.
        acceptance: How many draft tokens are accepted.
        costs: How long steps take.
    """

    def __init__(self, options: Sequence[Option], num_slots: int, pads: bool):
        self._pads = pads
        self._places = {option: place for place, option in enumerate(options)}
        self.rest = self._places[REST]
        self.num_tokens = np.array([option.num_tokens for option in options])
        self._num_levels = np.array([option.num_levels for option in options])
        self._is_prefix = np.array([option.is_prefix for option in options])
        self._has_trees, self._has_chains = not self._is_prefix.all(), bool(self.num_tokens[self._is_prefix].any())
        most = int(self.num_tokens[self._is_prefix].max(initial=1))
        self.acceptance, self.costs = AcceptanceTable(num_slots, max(most, 1)), StepCosts()

    def place(self, option: Option) -> int:
        """Return the place of an option, that of `REST` if it is none of ours."""
        return self._places.get(option, self.rest)

    # ---- accepted tokens -------------------------------------------------------------------------------------------

    def lengths(self, batch: Batch, places: np.ndarray, hopeful_from: int | None = None) -> np.ndarray:
        """Return `[m, n]` draft tokens that are expected to be of use, or hoped for beyond a number that is verified
        anyway. A token counts as what it takes without drafts: many of short contexts do not make up for few long ones.
        """
        slots, is_prefix = batch.slots, self._is_prefix[places]
        found = self.acceptance.expected(slots, hopeful_from)[:, np.where(is_prefix, self.num_tokens[places], 0)].T
        if self._has_trees:
            found[~is_prefix] = self.acceptance.expected_tree(slots, hopeful_from is not None)
        return useful(found, batch.answer_tokens) * self.costs.worth(batch)

    def lengths_of_class(self, class_index: int) -> np.ndarray:
        """Return `[m]` the same of each option, of a request of a class that nothing is known of."""
        chains, tree = self.acceptance.expected_of_class(class_index)
        return np.where(self._is_prefix, chains[np.where(self._is_prefix, self.num_tokens, 0)], tree)

    def longest_of_class(self, class_index: int) -> float:
        """Return the tokens of a verify step of a class, its own included, that are expected of the longest draft."""
        chains, tree = self.acceptance.expected_of_class(class_index)
        return 1 + (float(chains[-1]) if self._has_chains else tree)

    # ---- time ------------------------------------------------------------------------------------------------------

    def steps(self, batch: Batch, places: np.ndarray, drafted: np.ndarray) -> Steps:
        """Return a step of each of these options, given `[m, n]` bool for whom it drafts."""
        x = features(batch, self.num_tokens[places], self._num_levels[places], drafted, self._pads)
        # Steps of one kind: size and context of the batch, option, and quarters of the batch that are drafted for.
        quarters = -(-4 * drafted.sum(axis=1) // max(len(batch.slots), 1))
        kinds = [(*batch.place, place, share) for place, share in zip(places.tolist(), quarters.tolist(), strict=True)]
        return Steps(kinds, x, self.costs.seconds(kinds, x))

    def step(self, batch: Batch, place: int, drafted: np.ndarray) -> Steps:
        """Return a step of one option, given `[n]` bool for whom it drafts."""
        return self.steps(batch, np.array([place]), drafted[None])

    def own_seconds(self, batch: Batch, places: np.ndarray) -> np.ndarray:
        """Return `[m, n]` seconds that the drafts of each request add by themselves; what all of them take together is
        the option's.
        """
        rates = dict(zip(FEATURES, self.costs.weights.tolist(), strict=True))
        most, levels = self.num_tokens[places, None], self._num_levels[places, None]
        each_s = most * (levels > 0) * rates["draft_rows"] + levels * rates["draft_context"] * batch.draft_context
        if not self._pads:
            each_s = each_s + most * (rates["rows"] + rates["row_context"] * batch.context)
        return each_s
