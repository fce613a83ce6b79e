"""What each pruner keeps, worked out by hand: for one item, the choice at each budget."""

import math
from dataclasses import replace

import pytest
import torch

from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner, linspace_indices


def row(num_tokens):
    return PruneInputs(TokenGrid(1, 1, num_tokens), 0)


def scored(scores, lambda_r=0.4):
    scores = torch.tensor(scores, dtype=torch.float32)
    return replace(row(len(scores)), scores=scores, lambda_r=lambda_r)


def turned(*degrees, num_trailing=0):
    """Return a video of one token per frame, which points in a direction."""
    angles = torch.tensor([math.radians(angle) for angle in degrees])
    features = torch.stack((angles.cos(), angles.sin()), dim=1)
    return PruneInputs(TokenGrid(len(degrees) - num_trailing, 1, 1, num_trailing), 0, features=features)


def still(value):
    return PruneInputs(TokenGrid(8, 3, 3), 0, features=torch.full((72, 300), value))


BLOCK = PruneInputs(TokenGrid(2, 2, 2, 1), 0)
FIVE_FRAMES = PruneInputs(TokenGrid(5, 2, 2), 0)  # frame f holds tokens 4f .. 4f + 3
FIVE_AND_NEWLINE = PruneInputs(TokenGrid(5, 2, 2, 1), 0)
ONE_CUT = PruneInputs(TokenGrid(3, 2, 2, 1), 0, features=torch.tensor([[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 5))
PEAKS = [1, 4, 1, 0, 3, 1]  # total 10

CASES = [
    # Catches: a stride that misses the last token, rounding where the paper's code truncates.
    ("uniform", row(10), {1: [0], 2: [0, 9], 3: [0, 4, 9], 4: [0, 3, 6, 9]}),  # 4.5 goes down
    ("uniform", row(11), {3: [0, 5, 10]}),
    ("uniform", row(5), {4: [0, 1, 2, 4]}),
    # Catches: front and end exchanged, a middle off its centre, a trailing token that does not count.
    ("window:front", BLOCK, {3: [0, 1, 2]}),
    ("window:end", BLOCK, {3: [6, 7, 8]}),
    ("window:middle", BLOCK, {3: [3, 4, 5], 4: [2, 3, 4, 5], 9: list(range(9))}),  # 2.5 before it: the earlier one
    # Catches: neighbouring instead of spread frames, a partial frame cut at the wrong end, a misplaced newline.
    ("frame", FIVE_FRAMES, {4: [0, 1, 2, 3], 8: [0, 1, 2, 3, 16, 17, 18, 19]}),
    ("frame", FIVE_FRAMES, {12: [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]}),
    # Not a whole number of frames: the last chosen frame gives its first tokens.
    ("frame", FIVE_FRAMES, {2: [0, 1], 5: [0, 1, 2, 3, 16], 10: [0, 1, 2, 3, 8, 9, 10, 11, 16, 17]}),
    # The newline (20) belongs to the last frame and is the first to go.
    ("frame", FIVE_AND_NEWLINE, {8: [0, 1, 2, 3, 16, 17, 18, 19], 9: [0, 1, 2, 3, 16, 17, 18, 19, 20]}),
    ("frame", FIVE_AND_NEWLINE, {10: [0, 1, 2, 3, 8, 9, 10, 11, 16, 17]}),
    ("frame", PruneInputs(TokenGrid(1, 2, 2, 1), 0), {5: [0, 1, 2, 3, 4]}),
    # Catches: `none` that prunes.
    ("none", PruneInputs(TokenGrid(2, 1, 2, 1), 0), {2: [0, 1, 2, 3, 4]}),
    # Catches: an unstable sort (visible from some hundred tokens on), and -0.0 ranked below 0.0.
    *(
        (name, scored(scores), {num_keep: kept})
        for name in ("attention", "uv")
        for scores, num_keep, kept in (
            ([1, 2, 1, 2, 1], 3, [0, 1, 3]),
            ([0.0, -0.0, 0.0, -0.0], 2, [0, 1]),
            ([7.0] * 25_088, 2508, list(range(2508))),
            ([0.0, 3.0] * 12_544, 2508, list(range(1, 5016, 2))),
        )
    ),
    # Catches: a strict threshold, stage II over all tokens, a truncation that keeps the first instead of the top.
    ("specvlm", scored(PEAKS, 0.5), {4: [0, 1, 4, 5]}),  # 4 + 3 >= 5; the rest 0 2 3 5 gives both ends
    ("specvlm", scored(PEAKS, 0.4), {2: [0, 1]}),  # 4 alone reaches it; one more from 0 2 3 4 5: the first
    ("specvlm", scored(PEAKS, 0.7), {3: [0, 1, 4]}),  # exactly at the threshold stops: 4 + 3 = 7
    ("specvlm", scored(PEAKS, 0.75), {2: [1, 4]}),  # stage I (4, 3, 1 at index 0) cut to the highest, no stage II
    ("specvlm", scored(PEAKS, 1.0), {5: [0, 1, 2, 4, 5]}),  # every positive score, then the zero
    ("specvlm", scored([0, 0, 0, 0, 5], 1.0), {3: [0, 3, 4]}),  # ... by no index: stage II spreads the zeros
    ("specvlm", scored([5]), {1: [0]}),
    ("specvlm", scored([0]), {1: [0]}),
    ("specvlm", scored([1, 2]), {1: [1], 2: [0, 1]}),
    ("specvlm", scored([1, 2], 0.0), {1: [0]}),
    # Catches: lambda_r 1 decided by a float64 sum, in which 1e-30 beside 1 vanishes.
    ("specvlm", scored([0, 0, 0, 1e-30, 1], 1.0), {2: [3, 4]}),
    # Catches: the earlier frame of a similar pair dropped, comparison with frame 0 instead of the previous one.
    # Turns of 1, 90, 10 and 60 degrees; frame 4 is back near frame 0.
    ("fastvid", turned(0, 1, 91, 81, 21), {1: [0], 2: [0, 2], 3: [0, 2, 4], 4: [0, 2, 3, 4], 5: [0, 1, 2, 3, 4]}),
    # Catches: a partial frame cut at one end, a newline that counts for no frame or for the wrong one.
    ("fastvid", ONE_CUT, {1: [0], 2: [0, 3], 4: [0, 1, 2, 3]}),  # a part of frame 0: at regular intervals
    # Frame 2 changed most: two of its five (the newline, 12, is its end).
    ("fastvid", ONE_CUT, {6: [0, 1, 2, 3, 8, 12], 9: [0, 1, 2, 3, 8, 9, 10, 11, 12]}),
    ("fastvid", ONE_CUT, {10: [0, 1, 2, 3, 4, 8, 9, 10, 11, 12], 13: list(range(13))}),
    # Catches: frame 3 compared with 2, frame 4 with 1, a group of another size, the newline before real tokens.
    (
        "dycoke",
        turned(0, 30, 50, 60, 200, 220, 0, num_trailing=1),
        {
            1: [0],
            2: [0, 4],
            3: [0, 2, 4],  # 2 is 50 from 0 (and 20 from 1)
            4: [0, 1, 2, 4],  # 1 is 30 from 0
            5: [0, 1, 2, 4, 5],  # 5 is 20 from 4; 3 is 10 from 2 (60 from 0)
            6: [0, 1, 2, 3, 4, 5],
            7: [0, 1, 2, 3, 4, 5, 6],  # the trailing token has no reference: last
        },
    ),
    # Catches: noise instead of a rule where nothing changes, NaN where everything is zero.
    *(("fastvid", still(value), {27: list(range(27))}) for value in (0.0, 3.0)),
    *(("dycoke", still(value), {27: [*range(18), *range(36, 45)]}) for value in (0.0, 3.0)),
]


@pytest.mark.parametrize(("name", "item", "choices"), CASES)
def test_by_hand(name, item, choices):
    """Catches what the comment above each case says."""
    for num_keep, kept in choices.items():
        assert get_pruner(name)(replace(item, num_keep=num_keep)).tolist() == kept


def test_uniform_is_exact_for_long_videos():
    """Catches: a linspace in float32 (it has no odd numbers beyond 2**24)."""
    assert linspace_indices(2**25 + 2, 2).tolist() == [0, 2**25 + 1]
    assert linspace_indices(2**25 + 3, 3).tolist() == [0, 2**24 + 1, 2**25 + 2]


def test_uniform_spreads():
    """Catches: gaps that differ by more than rounding."""
    gaps = get_pruner("uniform")(PruneInputs(TokenGrid(64, 14, 14, 1), 1255)).diff()
    assert gaps.min() >= 10 and gaps.max() <= 11  # 12544 / 1254 = 10.003...


@pytest.mark.parametrize(
    ("name", "grid", "num_keep", "frames", "per_frame"),
    [
        # Catches: tokens of one frame mixed with another's at the real geometry.
        ("frame", TokenGrid(64, 14, 14, 1), 6 * 196, [0, 12, 25, 37, 50, 63], [196]),
        # Catches: the budget spent on the first frames of the video only.
        ("dycoke", TokenGrid(128, 14, 14), 2508, list(range(0, 128, 4)), [78, 79]),
    ],
)
def test_frames_of_long_videos(name, grid, num_keep, frames, per_frame):
    kept = get_pruner(name)(PruneInputs(grid, num_keep, features=torch.ones(grid.num_tokens, 1)))
    found, counts = torch.unique(kept // 196, return_counts=True)
    assert found.tolist() == frames and set(counts.tolist()) <= set(per_frame)


def test_random_seeds():
    """Catches: an ignored seed, and a choice that favours a part of the video."""
    grid, pruner = TokenGrid(10, 10, 10), get_pruner("random")
    assert not torch.equal(pruner(PruneInputs(grid, 100, seed=0)), pruner(PruneInputs(grid, 100, seed=1)))
    drawn = torch.cat([pruner(PruneInputs(grid, 100, seed=seed)) for seed in range(200)])
    # 20,000 draws: each tenth expects 2,000, standard deviation about 42.
    assert torch.histc(drawn.float(), bins=10, min=0, max=1000).sub(2000).abs().max() < 250
