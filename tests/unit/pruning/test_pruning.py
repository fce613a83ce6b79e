"""Budgets, grids, what every pruner refuses, the registry; what those that look at nothing keep, by hand."""

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.pruning.test_pruner_invariants import measure
from vllm_vidspec.config import PRUNERS
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import PruneInputs, TokenGrid, budget, get_pruner, linspace_indices
from vllm_vidspec.pruning.pruners import ALL_PRUNERS

NEEDS = dict.fromkeys(("specvlm", "specvlm:stride", "attention"), "attention")
NEEDS |= {"uv": "uv", "fastvid": "features", "dycoke": "features"}
MEASURED = {name: "features" if need == "features" else "scores" for name, need in NEEDS.items()}


@settings(max_examples=120, deadline=None)
@example(10, 0.9)  # 0.99... in binary floating point: SpecVLM's code keeps none
@example(25088, 0.9)  # 128 frames of 196: 2508.8
@example(3, 0.9999999)  # never empty below 1.0
@example(10, 1e-12)
@given(st.integers(0, 10**6), st.integers(0, 1000).map(lambda permille: permille / 1000) | st.floats(0, 1))
def test_budget_is_the_largest_within_the_bound(num_tokens, ratio):
    """Catches: a budget above (1 - r) n, or a token below; binary instead of decimal ratios; a lost minimum of 1."""
    within = int((1 - Fraction(str(ratio))) * num_tokens)
    assert budget(num_tokens, ratio) == (0 if ratio == 1 or num_tokens == 0 else max(1, within)) <= num_tokens


@pytest.mark.parametrize(("num_tokens", "ratio"), [(-1, 0.5), (5, -0.1), (5, 1.5), (5, float("nan"))])
def test_budget_refuses(num_tokens, ratio):
    """Catches: a dropped range check."""
    with pytest.raises(ValueError, match="must be"):
        budget(num_tokens, ratio)


def test_a_grid_has_no_negative_extent():
    """Catches: a negative token count that would index from the end."""
    with pytest.raises(ValueError, match="negative"):
        TokenGrid(2, 2, 2, -1)


def inputs_of(num_keep=2, **changes):
    """Return valid inputs of 4 tokens for any pruner, with `changes`."""
    return PruneInputs(**{"grid": TokenGrid(2, 1, 2), "num_keep": num_keep, **measure(4, seed=0), **changes})


def fourth(value, dtype=torch.float32):
    return torch.tensor([0.0, 1.0, value, 3.0], dtype=dtype)


NAN, INF = float("nan"), float("inf")
BAD = [
    # Catches: a budget larger than the item silently cut.
    *(({"num_keep": wrong}, rf"num_keep must be in \[0, 4\], got {wrong}") for wrong in (-1, 5)),
    # Catches: a share in percent, a share of NaN that retains nothing.
    *(({"lambda_r": wrong}, r"lambda_r must be in \[0, 1\]") for wrong in (-0.1, 1.5, NAN)),
    # Catches: NaN or misshapen guidance that would sort arbitrarily.
    *(({"scores": fourth(wrong)}, "scores must be finite, got NaN or inf") for wrong in (NAN, INF, -INF)),
    *(({"scores": torch.zeros(shape)}, r"float32 \[4\]") for shape in ((3,), (2, 2))),
    *(
        ({"scores": torch.zeros(4).to(dtype)}, r"float32 \[4\]")
        for dtype in (torch.float64, torch.float16, torch.int64)
    ),
    # Catches: NaN that would make every comparison of frames arbitrary, embeddings of another item.
    *(
        ({"features": fourth(wrong, dtype)[:, None]}, "features must be finite, got NaN or inf")
        for wrong, dtype in ((NAN, torch.float32), (NAN, torch.bfloat16), (INF, torch.float16), (-INF, torch.float32))
    ),
    *(({"features": torch.zeros(shape)}, r"\[4, dim\]") for shape in ((3, 4), (4,), (4, 0), (1, 4, 3))),
    *(
        ({"features": torch.zeros(4, 3, dtype=dtype)}, "float16, bfloat16 or float32")
        for dtype in (torch.float64, torch.int64)
    ),
    # Catches: an error from deep inside a pruner, or indices on a device of chance.
    ({"scores": torch.zeros(4, device="meta")}, "scores are on meta, features on cpu"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *((name, *bad) for name in PRUNERS for bad in BAD),
        # Catches: a guided pruner that runs blind.
        *((name, {MEASURED[name]: None}, f"needs {MEASURED[name]}") for name in NEEDS),
        # Catches: a share of a sum with cancellations.
        ("specvlm", {"scores": fourth(-1e-9)}, "scores must be >= 0"),
    ],
)
def test_bad_inputs_are_refused(name, changes, message):
    """Catches: what the comments above say, and a check skipped for an empty budget or by one pruner."""
    for num_keep in (0, 2):
        with pytest.raises(ValueError, match=rf"^pruner {name}: .*{message}"):
            get_pruner(name)(inputs_of(**{"num_keep": num_keep} | changes))


def test_scores_that_are_not_refused():
    """Catches: `uv`, whose scores are differences, refused for negative ones; a negative zero taken for one."""
    assert get_pruner("specvlm")(inputs_of(scores=torch.tensor([0.5, -0.0, 0.0, 0.1]))).shape == (2,)
    for name in ("attention", "uv"):
        assert get_pruner(name)(inputs_of(3, scores=torch.tensor([0.5, -1e-9, 0.0, 0.1]))).tolist() == [0, 2, 3]


@pytest.mark.parametrize("name", PRUNERS)
def test_what_was_measured(name):
    """Catches: an unguided pruner led by scores, one that takes the measurement of another."""
    grid, pruner, given = TokenGrid(5, 2, 2, 1), get_pruner(name), measure(21, seed=0)
    alone = {key: value for key, value in given.items() if key == MEASURED.get(name)}
    assert torch.equal(pruner(PruneInputs(grid, 11, **alone)), pruner(PruneInputs(grid, 11, **given)))


def test_every_configured_pruner_exists():
    """Catches: a name that the configuration accepts and the engine cannot find; a need that is not measured; a bare
    KeyError for a typo.
    """
    assert set(ALL_PRUNERS) == set(PRUNERS)
    for name in PRUNERS:
        assert get_pruner(name).name == name
        assert get_pruner(name).needs == ({NEEDS[name]} if name in NEEDS else set())
    with pytest.raises(VidSpecError) as caught:
        get_pruner("unifrom")
    assert str(caught.value) == f"unknown pruner 'unifrom' (did you mean 'uniform'?); known: {', '.join(PRUNERS)}"


BLOCK, FIVE_FRAMES, NEWLINE = TokenGrid(2, 2, 2, 1), TokenGrid(5, 2, 2), TokenGrid(5, 2, 2, 1)
FIRST, LAST = [0, 1, 2, 3], [16, 17, 18, 19]  # of five frames
CASES = [
    # Catches: a stride that misses the last token, rounding where the paper's code truncates.
    ("uniform:stride", TokenGrid(1, 1, 10), {1: [0], 2: [0, 9], 3: [0, 4, 9], 4: [0, 3, 6, 9]}),  # 4.5 goes down
    ("uniform:stride", TokenGrid(1, 1, 5), {4: [0, 1, 2, 4]}),
    # Ranks are x .819 + y .671 + t .550, of that the fraction. Catches: exchanged axes, a threshold of the wrong side.
    ("uniform", TokenGrid(2, 2, 2), {1: [0], 2: [0, 7], 4: [0, 5, 6, 7], 5: [0, 3, 5, 6, 7]}),
    ("uniform", TokenGrid(0, 0, 0, 4), {1: [0], 2: [0, 2]}),  # without frames: 0, .550, .099, .649
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
    gaps = get_pruner("uniform:stride")(PruneInputs(TokenGrid(64, 14, 14, 1), 1255)).diff()
    assert gaps.min() >= 10 and gaps.max() <= 11  # 12544 / 1254 = 10.003...


def seen_of(kept, grid):
    """Return the shares of a frame's columns, and of its cells, that some of the first four frames keep."""
    places = kept[kept < 4 * grid.tokens_per_frame] % grid.tokens_per_frame
    return len((places % grid.width).unique()) / grid.width, len(places.unique()) / grid.tokens_per_frame


@pytest.mark.parametrize("width", range(6, 41))
def test_even_choices_reach_every_column(width):
    """Catches: a choice that returns to the same columns, as a stride does where the grid's width is a multiple of it;
    one that returns to the same cells frame after frame; frames or halves of a frame that get more than others.
    """
    grid, scores = TokenGrid(64, 12, width), torch.zeros(64 * 12 * width)
    for name in ("uniform", "specvlm"):  # without any score the latter is stage II alone
        kept = get_pruner(name)(PruneInputs(grid, budget(grid.num_tokens, 0.9), scores=scores))
        columns, cells = seen_of(kept, grid)
        assert columns == 1.0 and cells > 0.36  # of 0.4 at most
        frames = torch.bincount(kept // grid.tokens_per_frame, minlength=64)
        assert (frames - len(kept) / 64).abs().max() < 7
        assert ((kept % width < width // 2).sum() / len(kept) - width // 2 / width).abs() < 0.02
        assert ((kept // width % 12 < 6).sum() / len(kept) - 0.5).abs() < 0.02


@pytest.mark.parametrize("width", [10, 20, 30])
def test_a_stride_is_seen_to_miss_columns(width):
    """The check above would not pass whatever the choice was: the authors' stride keeps few columns of such grids."""
    grid = TokenGrid(64, 12, width)
    kept = get_pruner("uniform:stride")(PruneInputs(grid, budget(grid.num_tokens, 0.9)))
    columns, cells = seen_of(kept, grid)
    assert columns <= 0.2 and cells < 0.2


def test_random_seeds():
    """Catches: an ignored seed, and a choice that favours a part of the video."""
    grid, pruner = TokenGrid(10, 10, 10), get_pruner("random")
    drawn = [pruner(PruneInputs(grid, 100, seed=seed)) for seed in range(200)]
    assert not torch.equal(*drawn[:2])
    # 20,000 draws: each tenth expects 2,000, standard deviation about 42.
    assert torch.histc(torch.cat(drawn).float(), bins=10, min=0, max=1000).sub(2000).abs().max() < 250
