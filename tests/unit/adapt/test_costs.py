"""Costs of steps and what is tried: the estimates themselves, apart from decisions."""

import numpy as np
import pytest

from vllm_vidspec.adapt.costs import FEATURES, StepCosts
from vllm_vidspec.adapt.trials import TRIAL_STEPS, WORTH, Situation, Trials


def features(num_reqs: int, num_tokens: int) -> np.ndarray:
    """Return those of a chain of so many tokens for each of so many requests, of 300 tokens."""
    rows, drafts = num_reqs * num_tokens, num_tokens > 0
    found = np.array([1, num_reqs, 0.3 * num_reqs, drafts, rows, 0.3 * rows, num_tokens, rows, 0.1 * rows], dtype=float)
    assert len(found) == len(FEATURES)
    return found


def measured(*kinds: tuple[int, int], steps: int = 8) -> StepCosts:
    """Return costs that know these kinds (requests, tokens), on an engine whose steps are linear in both."""
    costs = StepCosts()
    for _ in range(steps):
        for num_reqs, num_tokens in kinds:
            costs.observe((num_reqs, num_tokens), features(num_reqs, num_tokens), truth(num_reqs, num_tokens))
    return costs


def truth(num_reqs: int, num_tokens: int) -> float:
    return 2e-3 + 2e-4 * num_reqs + (num_tokens > 0) * 1e-3 + num_tokens * (6e-4 + 1e-4 * num_reqs)


def test_neighbours_predict_what_was_not_measured():
    """Catches: a number of tokens, or a batch size, of which nothing is known until it was measured itself."""
    costs = measured((1, 0), (1, 5), (1, 2), (16, 5), (16, 0))
    for kind in ((1, 3), (16, 3), (8, 5)):
        assert costs.seconds([kind], features(*kind)[None])[0] == pytest.approx(truth(*kind), rel=0.1), kind


def test_doubt_falls_with_what_is_measured():
    """Catches: a doubt that stays, which keeps trials going, and one that never was, which prevents them."""
    costs, x = measured((1, 5)), np.stack([features(1, 5), features(1, 0)])
    before = costs.doubt([(1, 5), (1, 0)], x, 0)[1]
    for _ in range(TRIAL_STEPS):
        costs.observe((1, 0), features(1, 0), truth(1, 0))
    after = costs.doubt([(1, 5), (1, 0)], x, 0)[1]
    assert before > 0.1 and after < 0.08, (before, after)


def test_no_step_is_free():
    """Catches: a fit in which a step without drafts takes nothing, as its constant was dropped."""
    costs = StepCosts()
    for num_tokens, seconds in ((2, 1e-3), (5, 1e-2)):  # more than proportional to the tokens
        for _ in range(8):
            costs.observe(num_tokens, features(1, num_tokens), seconds)
    assert costs.seconds([0], features(1, 0)[None])[0] > 0.9e-4


def test_what_cannot_be_better_is_not_tried():
    """And what may be is tried as long as the allowance lasts."""
    trials, situation = Trials(), Situation()
    trials.step_s = 0.01
    rates, seconds = np.array([100.0, 90.0]), np.array([0.02, 0.02])
    assert trials.begin(situation, rates, np.array([100.0, WORTH * 99.0]), seconds, 0) == 0
    assert trials.begin(situation, rates, np.array([100.0, WORTH * 101.0]), seconds, 0) == 1
    num_trials = sum(trials.begin(situation, rates, np.array([100.0, 110.0]), seconds, 0) for _ in range(100))
    assert 1 < num_trials < 20
