"""StepCosts: what a step takes, learned from steps."""

import numpy as np
import pytest

from tests.unit.adapt.simulated import like_a_small_pair
from vllm_vidspec.adapt.costs import FEATURES, StepCosts, features
from vllm_vidspec.adapt.requests import Batch


def test_what_contexts_cost_is_not_taken_for_the_speed_of_the_machine():
    """Sixteen requests at rest, of which one in eight steps is replaced by a longer or a shorter one. Catches: steps
    compared after they were put down to the machine's speed, which follows them (0.86 of what contexts cost)."""

    def found(seed: int) -> float:
        random, costs, num_long = np.random.default_rng(seed), StepCosts(), 8
        for step in range(1000):
            num_long += random.integers(-1, 2) * (step % 8 == 0) * (2 < num_long < 14)
            context = np.array([4.2] * num_long + [0.4] * (16 - num_long))
            total = float(context.sum())
            batch = Batch(
                np.arange(16), (4, int(total / 4).bit_length()), context, total, context / 10, np.full(16, 128.0)
            )
            x = features(batch, np.zeros(1), np.zeros(1), np.zeros((1, 16), dtype=bool), False)[0]
            seconds = like_a_small_pair(16, context, np.zeros(16), 0) * np.exp(random.normal(0, 0.08))
            costs.observe(batch.place, x, seconds, 0)
        return costs.weights[FEATURES.index("context")] * costs._slowness

    assert np.mean([found(seed) for seed in range(8)]) == pytest.approx(3e-4, rel=0.07)


def test_what_was_found_the_same_is_measured_more_seldom():
    """Steps with drafts between a hundred without, again and again. Catches: what they take in as much doubt after a
    while each time, and what has changed in as little doubt as what never did."""
    costs, features_of = StepCosts(), np.eye(len(FEATURES))

    def drift_after(seconds: float) -> float:
        for _ in range(6):
            costs.observe("drafts", features_of[3], seconds, 1)
        for _ in range(100):
            costs.observe("rest", features_of[0], 4e-3, 0)
        return float(costs.drift(["drafts"])[0])

    drifts = [drift_after(5e-3) for _ in range(5)]
    assert drifts[1:] == pytest.approx([drifts[0] / share for share in (2, 4, 4, 4)])
    assert drift_after(6.5e-3) == pytest.approx(drifts[0])
