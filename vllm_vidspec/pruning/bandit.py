"""Bandit: which of several ways to prune serves this model and this traffic best, learned from request to request.

Each way is an arm. Its worth is the tokens that a verify step emits. Thompson sampling: draw each arm's mean from what
is known of it, take the best. What is old is slowly forgotten, as traffic changes. Seeded: the same requests in the
same order are given the same arms.
"""

import math
import random
from dataclasses import dataclass

_LEAST_REQUESTS = 3  # of each arm before any is preferred
_MEMORY = 0.998  # what is left of a request's weight after the next one
_PRIOR_SPREAD = 1.5  # tokens a step, between requests, before it is known


@dataclass
class Arm:
    """What is known of one way to prune."""

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
        if self.num_requests >= _LEAST_REQUESTS:
            spread = math.sqrt(max(self.squares / self.weight - self.mean**2, 0.01))
        return spread / math.sqrt(max(self.weight, 1.0))


class Bandit:
    """Chooses one of `num_arms` arms for each request; `seed` is of the draws."""

    def __init__(self, num_arms: int, seed: int = 0):
        self.arms = [Arm() for _ in range(num_arms)]
        self._given = [0] * num_arms  # requests that were given each arm, finished or not
        self._rng = random.Random(seed)

    def choose(self) -> int:
        """Return the arm of the next request."""
        least = min(self._given)
        if least < _LEAST_REQUESTS:
            place = self._given.index(least)
        else:
            drawn = [self._rng.gauss(arm.mean, arm.deviation) for arm in self.arms]
            place = drawn.index(max(drawn))
        self._given[place] += 1
        return place

    def observe(self, place: int, tokens_per_step: float, num_steps: int) -> None:
        """Learn from a finished request of an arm; one of few steps counts for less.

        Its `num_steps` verify steps, at least one, emitted `tokens_per_step` on average.
        """
        for arm in self.arms:
            arm.weight, arm.total, arm.squares = (_MEMORY * part for part in (arm.weight, arm.total, arm.squares))
        arm, weight = self.arms[place], min(1.0, num_steps / 8)
        arm.num_requests += 1
        arm.weight += weight
        arm.total += weight * tokens_per_step
        arm.squares += weight * tokens_per_step**2
