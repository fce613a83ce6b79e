"""The strict scorer against chains worked out by hand."""

import math

import pytest
import torch

from vllm_vidspec import scoring
from vllm_vidspec.config import ScoreKnobs, VidSpecConfig
from vllm_vidspec.scoring import RULES, ScoreInputs, TreeShapes


def score(requests: list[tuple[list[int], list[int]]], max_drafts: int) -> list[list[int]]:
    """Score `(target tokens by row, draft tokens)` requests; return the emitted tokens of each."""
    target = [token for rows, _ in requests for token in rows]
    draft = [token for rows, drafts in requests for token in [7777, *drafts][: len(rows)]]
    ends = torch.tensor([0, *(len(rows) for rows, _ in requests)]).cumsum(0).to(torch.int32)
    scored = scoring.score(ScoreInputs(torch.tensor(target), torch.tensor(draft).int(), ends, max_drafts))
    assert scored.path is None
    return [row[:count].tolist() for row, count in zip(scored.sampled, scored.num_sampled, strict=True)]


def test_longest_agreeing_prefix_and_the_targets_token():
    """Catches: comparing a draft with its own row instead of its parent's, and going on after a mismatch; a -1 that
    equals a sampled token by wrap-around or padding."""
    assert score(
        [
            ([5, 6, 7], [5, 6]),  # all accepted, one more token
            ([5, 6, 7], [4, 6]),  # the first is wrong: only the target's own
            ([5, 6, 7], [5, 9]),
            ([5], []),  # no drafts
            ([5, 6, 7, 8], [5, 9, 7]),
            ([5, 6, 7], [5, -1]),  # invalid drafts are never accepted
            ([-1, 6], [-1]),
        ],
        max_drafts=3,
    ) == [[5, 6, 7], [5], [5, 6], [5], [5, 6], [5, 6], [-1]]


def test_the_longest_path_of_a_tree_and_the_nodes_behind_it():
    """Two requests with one tree (nodes 1 and 2 under the root, 3 under 2), on rows 4 and 0; the second is cut to 2.

    Catches: tables read by batch row, a first match that is a dead end, a cut node that is accepted.
    """
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32).repeat(5, 1)
    depths = torch.tensor([0, 1, 1, 2], dtype=torch.int32).repeat(5, 1)
    ancestors = torch.tensor([0, 0b001, 0b010, 0b110]).repeat(5, 1)
    trees = TreeShapes(torch.tensor([4, 0]), parents, depths, ancestors)
    target = torch.tensor([7, 1, 8, 9, 7, 1, 8])
    drafts = torch.tensor([5, 7, 7, 8, 5, 6, 7]).int()  # both children of the first root match, the second continues
    scored = scoring.score(ScoreInputs(target, drafts, torch.tensor([0, 4, 7], dtype=torch.int32), 3, trees))
    assert scored.sampled.tolist() == [[7, 8, 9, 0], [7, 8, 0, 0]]
    assert scored.num_sampled.tolist() == [3, 2]
    assert scored.path.tolist() == [[0, 2, 3, 3], [0, 2, 2, 3]]


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
