"""Payoff against a world whose best number of drafts is known: it is found, kept, and left when the world changes."""

import numpy as np
import pytest

from vllm_vidspec.adapt import Payoff

CHOICES = (6, 3, 0)


class World:
    """A target and a draft that take time, on a clock with noise; drafts stand with a probability each.

    Args:
        forward: Seconds of a forward of the draft.
        stands: Probability that a draft stands where all before it do.
        per_draft: Seconds that verifying one more token of one request takes.
    """

    def __init__(self, forward: float, stands: float, per_draft: float = 0.0, seed: int = 0):
        self.forward, self.stands, self.per_draft = forward, stands, per_draft
        self.rng = np.random.default_rng(seed)

    def step(self, num_reqs: int, num_drafts: int) -> tuple[np.ndarray, float]:
        """Return how many drafts of each request stand, and how long the step took."""
        stands = self.rng.random((num_reqs, max(num_drafts, 1))) < self.stands
        accepted = np.cumprod(stands, axis=1).sum(axis=1) if num_drafts else np.zeros(num_reqs, dtype=np.int64)
        seconds = 1.0 + self.forward * num_drafts + self.per_draft * num_drafts * num_reqs
        return accepted, seconds * self.rng.uniform(0.925, 1.075)

    def value(self, num_reqs: int, num_drafts: int) -> float:
        """Return tokens per request and second."""
        tokens = 1 + sum(self.stands**k for k in range(1, num_drafts + 1))
        return tokens / (1.0 + self.forward * num_drafts + self.per_draft * num_drafts * num_reqs)


def run(payoff: Payoff, world: World, num_steps: int, num_reqs: int = 4) -> tuple[float, float]:
    """Return tokens per request and second over all steps, and the share of them with the number in use at the end."""
    tokens = seconds = 0.0
    used = []
    for _ in range(num_steps):
        num_drafts = payoff.choose(num_reqs)
        accepted, took = world.step(num_reqs, num_drafts)
        payoff.hear(num_reqs, num_drafts, accepted, took)
        tokens, seconds = tokens + 1 + accepted.mean(), seconds + took
        used.append(num_drafts)
    return tokens / seconds, float(np.mean(np.array(used) == payoff.in_use(num_reqs)))


@pytest.mark.parametrize(
    ("world", "best"),
    [
        (World(0.05, 0.9), 6),  # a sound draft
        (World(0.5, 0.05), 0),  # one that errs, and is slow
        (World(0.25, 0.6), 3),  # half of the drafts are worth it
        (World(0.02, 0.7, per_draft=0.2), 0),  # verification is what costs, at this batch size
    ],
)
def test_the_best_number_is_found_and_kept(world, best):
    assert max(CHOICES, key=lambda k: world.value(4, k)) == best
    payoff = Payoff(CHOICES)
    run(payoff, world, 3000)
    assert payoff.in_use(4) == best
    changes = payoff.num_changes
    rate, share = run(payoff, world, 8000)
    assert payoff.num_changes == changes, "it went back and forth"
    assert share > 0.97
    assert rate > 0.96 * world.value(4, best)


def test_what_changes_is_noticed():
    """The draft gets worse, and drafting stops; it gets better, and drafting begins again."""
    payoff, good, bad = Payoff(CHOICES), World(0.05, 0.9), World(0.5, 0.05)
    run(payoff, good, 2000)
    assert payoff.in_use(4) == 6
    run(payoff, bad, 6000)
    assert payoff.in_use(4) == 0
    run(payoff, good, 40_000)
    assert payoff.in_use(4) == 6


def test_nearly_equal_numbers_are_left_alone():
    world = World(0.151, 0.5)  # 6, 3 and 0 drafts within four per cent of each other
    values = [world.value(4, k) for k in CHOICES]
    payoff = Payoff((6, 0))
    assert abs(values[0] / values[2] - 1) < 0.05
    run(payoff, world, 20_000)
    assert payoff.num_changes <= 1


def test_batch_sizes_are_apart():
    """Many requests make verification dear: drafting stops for them alone."""
    payoff, world = Payoff(CHOICES), World(0.05, 0.8, per_draft=0.02)
    for _ in range(40):
        run(payoff, world, 200, num_reqs=1)
        run(payoff, world, 200, num_reqs=64)
    assert (payoff.in_use(1), payoff.in_use(64)) == (6, 0)
    assert payoff.in_use(33) == 0 and payoff.in_use(2) == 6  # 33 to 64 are one class; of 2 nothing is known


def test_trees_are_not_cut():
    payoff, world = Payoff((25, 0), is_prefix=False), World(0.2, 0.1)
    run(payoff, world, 3000)
    assert payoff.in_use(4) == 0


def test_steps_of_another_number_are_no_news():
    """What was scheduled before a change is not taken for what came after it."""
    payoff = Payoff(CHOICES)
    assert not payoff.hear(4, 3, np.zeros(4, dtype=np.int64), 1.0)
    assert not payoff.hear(4, 5, np.zeros(4, dtype=np.int64), 1.0)
    assert payoff.choose(4) == 6


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 4, 5, 8, 9, 300])
def test_classes_of_batch_sizes(num_reqs):
    assert num_reqs in Payoff.sizes_of(Payoff.load_of(num_reqs))
    assert sum(num_reqs in Payoff.sizes_of(load) for load in range(12)) == 1
