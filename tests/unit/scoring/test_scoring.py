"""Scorers, FLy's measure and its window; tests/kernels/test_accept.py has what is accepted."""

import math

import pytest
import torch

from vllm_vidspec import scoring
from vllm_vidspec.config import ScoreKnobs, VidSpecConfig
from vllm_vidspec.scoring import RULES


def test_every_configured_scorer_exists():
    """Catches: a `scorer` that the configuration accepts and no code implements."""
    assert set(ScoreKnobs.model_fields["scorer"].annotation.__args__) == set(RULES)


def test_the_entropy_of_the_most_likely_tokens():
    """Catches: tokens that are renormalised among themselves, a share of the greatest possible instead of nats."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    terms = [0.5 * math.log(2), 0.25 * math.log(4), 0.125 * math.log(8), 0.125 * math.log(8)]
    for top_k, wanted in ((1, terms[:1]), (3, terms[:3]), (0, terms), (9, terms)):
        found = scoring.top_entropy(probs.log(), top_k)
        torch.testing.assert_close(found, torch.tensor([sum(wanted), 0.0]))


@pytest.mark.parametrize(
    ("knobs", "window"),
    [
        ({"num_speculative_tokens": 5}, 4),
        ({"num_speculative_tokens": 10}, 6),
        ({"num_speculative_tokens": 1}, 1),
        ({"draft_shape": "tree-static", "num_speculative_tokens": 25}, 4),  # five deep
        ({"draft_shape": "tree-adaptive", "num_speculative_tokens": 25}, 6),
        ({"num_speculative_tokens": 10, "fly_window": 2}, 2),
    ],
)
def test_the_window_of_fly_is_shorter_than_a_path(knobs, window):
    """vLLM's default, `min(6, K - 1)` of a chain. Catches: a window of a tree's nodes, which no path ever fills."""
    assert VidSpecConfig(model="self", scorer="fly", **knobs).fly_window == window
