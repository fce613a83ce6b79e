"""Budgets and pruners: exact sizes, order, determinism, and what each pruner keeps in hand-computed cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_vidspec.config import PRUNERS
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import TokenGrid, budget, get_pruner, linspace_indices, pruner_names, register_pruner
from vllm_vidspec.pruning.pruners import _REGISTRY, FunctionPruner

CHOOSING = [name for name in PRUNERS if name != "none"]

grids = st.builds(
    TokenGrid,
    num_frames=st.integers(1, 9),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    num_trailing=st.integers(0, 2),
)
quick = settings(max_examples=60, deadline=None)


# --- budget ---


@pytest.mark.parametrize(
    ("num_tokens", "prune_ratio", "kept"),
    [
        (10, 0.9, 1),  # 0.99... in binary floating point: SpecVLM's code keeps none
        (5, 0.5, 2),  # 2.5 goes down: the budget is an upper bound
        (20, 0.35, 13),
        (7, 0.5, 3),  # 3.5: any rounding to the nearest would exceed the bound
        (45, 0.9, 4),
        (15, 0.9, 1),
        (19, 0.9, 1),  # 1.9
        (25088, 0.9, 2508),  # 128 frames of 196: 2508.8
        (12545, 0.9, 1254),  # 64 frames of 196 and the newline: 1254.5
        (1, 0.99, 1),  # never empty below 1.0
        (3, 0.9999999, 1),
        (10, 1e-12, 9),
        (1000, 0.0, 1000),
        (1000, 1.0, 0),
        (0, 0.5, 0),
        (0, 0.0, 0),
    ],
)
def test_budget_by_hand(num_tokens, prune_ratio, kept):
    """Catches: rounding up or to nearest, binary instead of decimal ratios, a lost minimum of 1."""
    assert budget(num_tokens, prune_ratio) == kept


@quick
@given(st.integers(0, 10**6), st.integers(0, 1000))
def test_budget_is_the_largest_within_the_bound(num_tokens, permille):
    """Catches: a budget above (1 - r) n, which the memory promise forbids, and one that wastes a token of it."""
    kept = budget(num_tokens, permille / 1000)
    exact = num_tokens * (1000 - permille)  # in thousandths
    if kept > 1:
        assert 1000 * kept <= exact < 1000 * (kept + 1)
    else:
        assert kept == (0 if permille == 1000 or num_tokens == 0 else 1)


@quick
@given(st.integers(0, 5000), st.floats(0, 1), st.floats(0, 1))
def test_budget_bounds_and_monotony(num_tokens, first, second):
    """Catches: a budget above the item's size, and more pruning that keeps more."""
    low, high = sorted((first, second))
    assert 0 <= budget(num_tokens, high) <= budget(num_tokens, low) <= num_tokens


@pytest.mark.parametrize(("num_tokens", "ratio"), [(-1, 0.5), (5, -0.1), (5, 1.5), (5, float("nan"))])
def test_budget_refuses(num_tokens, ratio):
    """Catches: a dropped range check."""
    with pytest.raises(ValueError, match="must be"):
        budget(num_tokens, ratio)


# --- grid ---


def test_grid_counts():
    """Catches: trailing tokens left out of the size."""
    assert TokenGrid(64, 14, 14, 1).num_tokens == 12545
    assert TokenGrid(64, 14, 14, 1).tokens_per_frame == 196
    assert TokenGrid(1, 1, 0).num_tokens == 0


def test_grid_refuses_negative_extents():
    """Catches: a negative token count that would index from the end."""
    with pytest.raises(ValueError, match="negative"):
        TokenGrid(2, 2, 2, -1)


# --- what holds for every pruner ---


def test_every_configured_pruner_exists():
    """Catches: a name that the configuration accepts and the engine cannot find."""
    assert pruner_names() == PRUNERS
    for name in PRUNERS:
        assert get_pruner(name).name == name
        assert get_pruner(name).needs_scores is False


@pytest.mark.parametrize("name", CHOOSING)
@quick
@given(grid=grids, data=st.data(), seed=st.integers(0, 2**32))
def test_kept_indices_invariants(name, grid, data, seed):
    """Catches: a wrong size, duplicates, disorder, indices outside the grid, an unseeded choice."""
    num_keep = data.draw(st.integers(0, grid.num_tokens))
    kept = get_pruner(name)(grid, num_keep, seed=seed)
    assert kept.dtype == torch.int64 and kept.shape == (num_keep,)
    assert (kept.diff() > 0).all()
    assert num_keep == 0 or (kept[0] >= 0 and kept[-1] < grid.num_tokens)
    torch.manual_seed(seed + 1)  # the global generator must not matter
    assert torch.equal(kept, get_pruner(name)(grid, num_keep, seed=seed))


@pytest.mark.parametrize("name", PRUNERS)
@quick
@given(grid=grids)
def test_full_budget_keeps_everything_and_zero_nothing(name, grid):
    """Catches: a lost first, last or trailing token at prune_ratio 0; a token left at prune_ratio 1."""
    assert get_pruner(name)(grid, grid.num_tokens).tolist() == list(range(grid.num_tokens))
    empty = get_pruner(name)(grid, 0)
    assert empty.dtype == torch.int64 and empty.shape == (0,)


@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("grid", [TokenGrid(1, 1, 0), TokenGrid(1, 1, 1), TokenGrid(0, 0, 0, 1), TokenGrid(3, 0, 4, 2)])
def test_tiny_grids(name, grid):
    """Catches: a division by zero tokens, frames or intervals."""
    for num_keep in range(grid.num_tokens + 1):
        expected = grid.num_tokens if name == "none" and num_keep else num_keep
        assert get_pruner(name)(grid, num_keep).shape == (expected,)


@pytest.mark.parametrize("name", PRUNERS)
def test_budget_outside_the_grid(name):
    """Catches: a budget larger than the item silently cut."""
    for num_keep in (-1, 13):
        with pytest.raises(ValueError, match=rf"num_keep must be in \[0, 12\], got {num_keep}"):
            get_pruner(name)(TokenGrid(3, 2, 2), num_keep)


def test_none_keeps_everything():
    """Catches: `none` that prunes."""
    assert get_pruner("none")(TokenGrid(2, 1, 2, 1), 2).tolist() == [0, 1, 2, 3, 4]


# --- what each pruner keeps ---


@pytest.mark.parametrize(
    ("num_tokens", "num_keep", "kept"),
    [
        (10, 1, [0]),
        (10, 2, [0, 9]),
        (10, 3, [0, 4, 9]),  # 4.5 down
        (11, 3, [0, 5, 10]),
        (10, 4, [0, 3, 6, 9]),
        (5, 4, [0, 1, 2, 4]),
    ],
)
def test_uniform_by_hand(num_tokens, num_keep, kept):
    """Catches: a stride that misses the last token, rounding where the paper's code truncates."""
    assert get_pruner("uniform")(TokenGrid(1, 1, num_tokens), num_keep).tolist() == kept


def test_uniform_is_exact_for_long_videos():
    """Catches: a linspace in float32 (it has no odd numbers beyond 2**24)."""
    assert linspace_indices(2**25 + 2, 2).tolist() == [0, 2**25 + 1]
    assert linspace_indices(2**25 + 3, 3).tolist() == [0, 2**24 + 1, 2**25 + 2]


def test_uniform_spreads():
    """Catches: gaps that differ by more than rounding."""
    gaps = get_pruner("uniform")(TokenGrid(64, 14, 14, 1), 1255).diff()
    assert gaps.min() >= 10 and gaps.max() <= 11  # 12544 / 1254 = 10.003...


@pytest.mark.parametrize(
    ("name", "num_keep", "kept"),
    [
        ("window:front", 3, [0, 1, 2]),
        ("window:end", 3, [6, 7, 8]),
        ("window:middle", 3, [3, 4, 5]),
        ("window:middle", 4, [2, 3, 4, 5]),  # 2.5 before it: the earlier one
        ("window:middle", 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_window_by_hand(name, num_keep, kept):
    """Catches: front and end exchanged, a middle off its centre, a trailing token that does not count."""
    assert get_pruner(name)(TokenGrid(2, 2, 2, 1), num_keep).tolist() == kept


@pytest.mark.parametrize(
    ("grid", "num_keep", "kept"),
    [
        # 5 frames of 2 x 2: frame f holds tokens 4f .. 4f + 3.
        (TokenGrid(5, 2, 2), 4, [0, 1, 2, 3]),
        (TokenGrid(5, 2, 2), 8, [0, 1, 2, 3, 16, 17, 18, 19]),
        (TokenGrid(5, 2, 2), 12, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]),
        # Not a whole number of frames: the last chosen frame gives its first tokens.
        (TokenGrid(5, 2, 2), 2, [0, 1]),
        (TokenGrid(5, 2, 2), 5, [0, 1, 2, 3, 16]),
        (TokenGrid(5, 2, 2), 10, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17]),
        # The newline (20) belongs to the last frame and is the first to go.
        (TokenGrid(5, 2, 2, 1), 8, [0, 1, 2, 3, 16, 17, 18, 19]),
        (TokenGrid(5, 2, 2, 1), 9, [0, 1, 2, 3, 16, 17, 18, 19, 20]),
        (TokenGrid(5, 2, 2, 1), 10, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17]),
        (TokenGrid(1, 2, 2, 1), 5, [0, 1, 2, 3, 4]),
    ],
)
def test_frame_by_hand(grid, num_keep, kept):
    """Catches: neighbouring instead of spread frames, a partial frame cut at the wrong end, a misplaced newline."""
    assert get_pruner("frame")(grid, num_keep).tolist() == kept


def test_frame_keeps_whole_frames_of_a_long_video():
    """Catches: tokens of one frame mixed with another's at the real geometry (64 frames of 196, 6 of them kept)."""
    kept = get_pruner("frame")(TokenGrid(64, 14, 14, 1), 6 * 196)
    frames, counts = torch.unique(kept // 196, return_counts=True)
    assert frames.tolist() == [0, 12, 25, 37, 50, 63] and counts.tolist() == [196] * 6


def test_random_seeds():
    """Catches: an ignored seed, and a choice that favours a part of the video."""
    grid, pruner = TokenGrid(10, 10, 10), get_pruner("random")
    assert not torch.equal(pruner(grid, 100, seed=0), pruner(grid, 100, seed=1))
    drawn = torch.cat([pruner(grid, 100, seed=seed) for seed in range(200)])
    # 20,000 draws: each tenth expects 2,000, standard deviation about 42.
    assert torch.histc(drawn.float(), bins=10, min=0, max=1000).sub(2000).abs().max() < 250


# --- scores ---


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.tensor([0.0, 1.0, float("nan"), 3.0]), "NaN"),
        (torch.zeros(3), r"float32 \[4\]"),
        (torch.zeros(2, 2), r"float32 \[4\]"),
        (torch.zeros(4, dtype=torch.float64), r"float32 \[4\]"),
        (torch.zeros(4, dtype=torch.float16), r"float32 \[4\]"),
    ],
)
@pytest.mark.parametrize("num_keep", [0, 2])
def test_bad_scores_are_refused(scores, message, num_keep):
    """Catches: NaN or misshapen guidance that would sort arbitrarily; a check skipped for an empty budget."""
    with pytest.raises(ValueError, match=message):
        get_pruner("uniform")(TokenGrid(1, 2, 2), num_keep, scores=scores)


@pytest.mark.parametrize("name", PRUNERS)
def test_scores_are_optional_and_carry_the_device(name):
    """Catches: an unguided pruner led by scores; indices that land on another device than the scores."""
    grid, pruner = TokenGrid(3, 2, 2, 1), get_pruner(name)
    scores = torch.arange(13, dtype=torch.float32)
    assert torch.equal(pruner(grid, 6, scores=scores), pruner(grid, 6))
    assert pruner(grid, 6, scores=scores).device == scores.device
    if torch.cuda.is_available():
        assert torch.equal(pruner(grid, 6, scores=scores.cuda()).cpu(), pruner(grid, 6))


def test_a_guided_pruner_plugs_in(monkeypatch):
    """Catches: an interface that a Top-K pruner cannot join, and one that runs without the scores it needs."""

    def top_k(grid, num_keep, scores, seed, device):
        return scores.topk(num_keep).indices.sort().values

    monkeypatch.setattr("vllm_vidspec.pruning.pruners._REGISTRY", dict(_REGISTRY))
    register_pruner(FunctionPruner("attention", top_k, needs_scores=True))
    pruner, grid = get_pruner("attention"), TokenGrid(1, 1, 5)
    assert pruner.needs_scores
    assert pruner(grid, 2, scores=torch.tensor([0.1, 5.0, -1.0, 0.2, 4.0])).tolist() == [1, 4]
    assert pruner(grid, 0, scores=torch.zeros(5)).tolist() == []
    with pytest.raises(ValueError, match="pruner attention needs scores"):
        pruner(grid, 2)


# --- registry ---


def test_unknown_name():
    """Catches: a bare KeyError for a typo."""
    with pytest.raises(VidSpecError) as caught:
        get_pruner("unifrom")
    assert str(caught.value).startswith("unknown pruner 'unifrom' (did you mean 'uniform'?); known: none, uniform, ")


def test_double_registration():
    """Catches: one pruner silently replacing another."""
    with pytest.raises(ValueError, match="registered twice"):
        register_pruner(get_pruner("uniform"))
