"""What the pruners that look at nothing keep, worked out by hand; test_references.py has the guided ones."""

import pytest
import torch

from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner, linspace_indices

BLOCK, FIVE_FRAMES, NEWLINE = TokenGrid(2, 2, 2, 1), TokenGrid(5, 2, 2), TokenGrid(5, 2, 2, 1)
FIRST, LAST = [0, 1, 2, 3], [16, 17, 18, 19]  # of five frames
CASES = [
    # Catches: a stride that misses the last token, rounding where the paper's code truncates.
    ("uniform", TokenGrid(1, 1, 10), {1: [0], 2: [0, 9], 3: [0, 4, 9], 4: [0, 3, 6, 9]}),  # 4.5 goes down
    ("uniform", TokenGrid(1, 1, 5), {4: [0, 1, 2, 4]}),
    # Catches: front and end exchanged, a middle off its centre, a trailing token that does not count.
    ("window:front", BLOCK, {3: [0, 1, 2]}),
    ("window:end", BLOCK, {3: [6, 7, 8]}),
    ("window:middle", BLOCK, {3: [3, 4, 5], 4: [2, 3, 4, 5], 9: list(range(9))}),  # 2.5 before it: the earlier one
    # Catches: neighbouring instead of spread frames, a partial frame cut at the wrong end.
    ("frame", FIVE_FRAMES, {2: [0, 1], 4: FIRST, 5: [*FIRST, 16], 8: FIRST + LAST, 10: [*FIRST, 8, 9, 10, 11, 16, 17]}),
    # Catches: a misplaced newline (20): it belongs to the last frame and is the first to go.
    ("frame", NEWLINE, {8: FIRST + LAST, 9: [*FIRST, *LAST, 20], 10: [*FIRST, 8, 9, 10, 11, 16, 17]}),
    ("frame", TokenGrid(1, 2, 2, 1), {5: [0, 1, 2, 3, 4]}),
    # Catches: `none` that prunes.
    ("none", TokenGrid(2, 1, 2, 1), {2: [0, 1, 2, 3, 4]}),
]


@pytest.mark.parametrize(("name", "grid", "choices"), CASES)
def test_by_hand(name, grid, choices):
    """Catches what the comment above each case says."""
    for num_keep, kept in choices.items():
        assert get_pruner(name)(PruneInputs(grid, num_keep)).tolist() == kept


def test_uniform_is_exact_for_long_videos():
    """Catches: a linspace in float32 (it has no odd numbers beyond 2**24); gaps that differ by more than rounding."""
    assert linspace_indices(2**25 + 3, 3).tolist() == [0, 2**24 + 1, 2**25 + 2]
    gaps = get_pruner("uniform")(PruneInputs(TokenGrid(64, 14, 14, 1), 1255)).diff()
    assert gaps.min() >= 10 and gaps.max() <= 11  # 12544 / 1254 = 10.003...


def test_frames_of_a_long_video():
    """Catches: tokens of one frame mixed with another's at the real geometry."""
    kept = get_pruner("frame")(PruneInputs(TokenGrid(64, 14, 14, 1), 6 * 196))
    frames, counts = torch.unique(kept // 196, return_counts=True)
    assert frames.tolist() == [0, 12, 25, 37, 50, 63] and set(counts.tolist()) == {196}


def test_random_seeds():
    """Catches: an ignored seed, and a choice that favours a part of the video."""
    grid, pruner = TokenGrid(10, 10, 10), get_pruner("random")
    drawn = [pruner(PruneInputs(grid, 100, seed=seed)) for seed in range(200)]
    assert not torch.equal(*drawn[:2])
    # 20,000 draws: each tenth expects 2,000, standard deviation about 42.
    assert torch.histc(torch.cat(drawn).float(), bins=10, min=0, max=1000).sub(2000).abs().max() < 250
