"""Bandit: which of several ways to prune serves this model and this traffic best, learned from request to request.

Each way is an arm: a pruner at a ratio. Its worth is the tokens that a verify step emits, over what a step costs beside
one without any draft. Thompson sampling: draw each arm's mean from what is known of it, take the best. What is old is
slowly forgotten, as traffic changes. Seeded: the same requests in the same order are given the same arms.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST_REQUESTS = 3  # of each arm before any is preferred
_MEMORY = 0.998  # what is left of a request's weight after the next one
_PRIOR_SPREAD = 1.5  # tokens a step, between requests, before it is known


@dataclass
class Arm:
    """One way to prune, and what is known of it."""

    pruner: str  # Its name
    ratio: float  # Of video tokens that are dropped
    num_requests: int = 0  # Requests that were pruned so; the next three are discounted sums
    weight: float = 0.0  # Of its requests
    total: float = 0.0  # Of their tokens per verify step
    squares: float = 0.0  # Of the squares of these

    @property
    def mean(self) -> float:
        """Tokens per verify step."""
        return self.total / self.weight if self.weight else 0.0

    @property
    def deviation(self) -> float:
        """Standard error of the mean."""
        spread = _PRIOR_SPREAD
        if self.num_requests >= _LEAST_REQUESTS and self.weight:  # a file may have the one without the other
            spread = math.sqrt(max(self.squares / self.weight - self.mean**2, 0.01))
        return spread / math.sqrt(max(self.weight, 1.0))


class Bandit:
    """Chooses an arm for each request.

    Args:
        ways: The arms' `(pruner, ratio)`.
        seed: Of the draws.
    """

    def __init__(self, ways: Sequence[tuple[str, float]], seed: int = 0):
        self.arms = [Arm(pruner, ratio) for pruner, ratio in ways]
        self._given = [0] * len(self.arms)  # requests that were given each arm, finished or not
        self._rng = random.Random(seed)

    def choose(self, costs: Sequence[float] | None = None) -> int:
        """Return the arm of the next request.

        Args:
            costs: Of a step by arm, over that of a step without drafts; None: all the same.
        """
        least = min(self._given)
        if least < _LEAST_REQUESTS:
            place = self._given.index(least)
        else:
            place = self._best([self._rng.gauss(arm.mean, arm.deviation) for arm in self.arms], costs)
        self._given[place] += 1
        return place

    def best(self, costs: Sequence[float] | None = None) -> int:
        """Return the arm that is the best as far as is known."""
        return self._best([arm.mean for arm in self.arms], costs)

    def _best(self, means: Sequence[float], costs: Sequence[float] | None) -> int:
        values = [mean / cost for mean, cost in zip(means, costs or [1.0] * len(means), strict=True)]
        return max(range(len(values)), key=values.__getitem__)

    def observe(self, place: int, tokens_per_step: float, num_steps: int) -> None:
        """Learn from a finished request; one of few steps counts for less.

        Args:
            place: Its arm.
            tokens_per_step: Tokens that its verify steps emitted, on average.
            num_steps: How many these were; nothing is learned of none.
        """
        if num_steps <= 0 or not math.isfinite(tokens_per_step):
            return
        for arm in self.arms:
            arm.weight, arm.total, arm.squares = (_MEMORY * part for part in (arm.weight, arm.total, arm.squares))
        arm, weight = self.arms[place], min(1.0, num_steps / 8)
        arm.num_requests += 1
        arm.weight += weight
        arm.total += weight * tokens_per_step
        arm.squares += weight * tokens_per_step**2

    def state(self) -> list[dict[str, Any]]:
        """Return what is known, as JSON takes it."""
        return [dict(vars(arm)) for arm in self.arms]

    def restore(self, state: Any) -> None:
        """Go on from what `state` returned in another run, as far as it tells of these arms.

        Raises:
            ValueError: It is not what `state` returns.
        """
        try:
            known = {(item["pruner"], float(item["ratio"])): Arm(**item) for item in state}
            for arm in known.values():
                numbers = (arm.num_requests, arm.weight, arm.total, arm.squares)
                if not all(isinstance(number, int | float) and 0 <= number < 1e12 for number in numbers):
                    raise ValueError
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ValueError("it does not tell what was learned of pruners") from None
        self.arms = [known.get((arm.pruner, arm.ratio), arm) for arm in self.arms]
        self._given = [arm.num_requests for arm in self.arms]
