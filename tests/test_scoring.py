"""The strict scorer against chains worked out by hand."""

import pytest
import torch

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.scoring import ScoreInputs, get_scorer, register_scorer, scorer_names


def score(requests: list[tuple[list[int], list[int]]], max_drafts: int) -> list[list[int]]:
    """Score `(target tokens by row, draft tokens)` requests; return the emitted tokens of each."""
    target = [token for rows, _ in requests for token in rows]
    draft = [token for rows, drafts in requests for token in [7777, *drafts][: len(rows)]]
    ends = torch.tensor([0, *(len(rows) for rows, _ in requests)]).cumsum(0).to(torch.int32)
    sampled, num_sampled = get_scorer("strict")(
        ScoreInputs(torch.tensor(target), torch.tensor(draft), ends, max_drafts)
    )
    return [row[:count].tolist() for row, count in zip(sampled, num_sampled, strict=True)]


def test_longest_agreeing_prefix_and_the_targets_token():
    """Catches: comparing a draft with its own row instead of its parent's, and going on after a mismatch."""
    assert score(
        [
            ([5, 6, 7], [5, 6]),  # all stand, one more token
            ([5, 6, 7], [4, 6]),  # the first is wrong: only the target's own
            ([5, 6, 7], [5, 9]),
            ([5], []),  # no drafts
            ([5, 6, 7, 8], [5, 9, 7]),
        ],
        max_drafts=3,
    ) == [[5, 6, 7], [5], [5, 6], [5], [5, 6]]


def test_invalid_drafts_never_stand():
    """Catches: a -1 that equals a sampled token by wrap-around or padding."""
    assert score([([5, 6, 7], [5, -1]), ([-1, 6], [-1])], max_drafts=2) == [[5, 6], [-1]]


def test_every_configured_scorer_exists():
    """Catches: a `scorer` that the configuration accepts and no code implements."""
    assert set(VidSpecConfig.model_fields["scorer"].annotation.__args__) <= set(scorer_names())
    with pytest.raises(ValueError, match="registered already"):
        register_scorer("strict", get_scorer("strict"))
