"""Budgets, grids, the score-free pruners by hand, what every pruner refuses, and the registry."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_vidspec.config import PRUNERS
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import (
    PruneInputs,
    Pruner,
    TokenGrid,
    budget,
    get_pruner,
    linspace_indices,
    pruner_names,
    register_pruner,
)
from vllm_vidspec.pruning.base import _REGISTRY

NEEDS = {
    "specvlm": {"attention"},
    "attention": {"attention"},
    "uv": {"uv"},
    "fastvid": {"features"},
    "dycoke": {"features"},
}

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
    assert get_pruner("uniform")(PruneInputs(TokenGrid(1, 1, num_tokens), num_keep)).tolist() == kept


def test_uniform_is_exact_for_long_videos():
    """Catches: a linspace in float32 (it has no odd numbers beyond 2**24)."""
    assert linspace_indices(2**25 + 2, 2).tolist() == [0, 2**25 + 1]
    assert linspace_indices(2**25 + 3, 3).tolist() == [0, 2**24 + 1, 2**25 + 2]


def test_uniform_spreads():
    """Catches: gaps that differ by more than rounding."""
    gaps = get_pruner("uniform")(PruneInputs(TokenGrid(64, 14, 14, 1), 1255)).diff()
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
    assert get_pruner(name)(PruneInputs(TokenGrid(2, 2, 2, 1), num_keep)).tolist() == kept


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
    assert get_pruner("frame")(PruneInputs(grid, num_keep)).tolist() == kept


def test_frame_keeps_whole_frames_of_a_long_video():
    """Catches: tokens of one frame mixed with another's at the real geometry (64 frames of 196, 6 of them kept)."""
    kept = get_pruner("frame")(PruneInputs(TokenGrid(64, 14, 14, 1), 6 * 196))
    frames, counts = torch.unique(kept // 196, return_counts=True)
    assert frames.tolist() == [0, 12, 25, 37, 50, 63] and counts.tolist() == [196] * 6


def test_random_seeds():
    """Catches: an ignored seed, and a choice that favours a part of the video."""
    grid, pruner = TokenGrid(10, 10, 10), get_pruner("random")
    assert not torch.equal(pruner(PruneInputs(grid, 100, seed=0)), pruner(PruneInputs(grid, 100, seed=1)))
    drawn = torch.cat([pruner(PruneInputs(grid, 100, seed=seed)) for seed in range(200)])
    # 20,000 draws: each tenth expects 2,000, standard deviation about 42.
    assert torch.histc(drawn.float(), bins=10, min=0, max=1000).sub(2000).abs().max() < 250


def test_none_keeps_everything():
    """Catches: `none` that prunes."""
    assert get_pruner("none")(PruneInputs(TokenGrid(2, 1, 2, 1), 2)).tolist() == [0, 1, 2, 3, 4]


# --- what every pruner refuses ---


def measured(num_tokens):
    """Return scores and features that any pruner accepts."""
    return {"scores": torch.arange(num_tokens, dtype=torch.float32), "features": torch.ones(num_tokens, 3)}


def inputs_of(num_keep=2, **changes):
    """Return valid inputs of 4 tokens for any pruner, with `changes`."""
    return PruneInputs(**{"grid": TokenGrid(2, 1, 2), "num_keep": num_keep, **measured(4), **changes})


@pytest.mark.parametrize("name", pruner_names())
@pytest.mark.parametrize("num_keep", [-1, 5])
def test_budget_outside_the_grid(name, num_keep):
    """Catches: a budget larger than the item silently cut."""
    with pytest.raises(ValueError, match=rf"^pruner {name}: num_keep must be in \[0, 4\], got {num_keep}"):
        get_pruner(name)(inputs_of(num_keep))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.tensor([0.0, 1.0, float("nan"), 3.0]), "scores must be finite, got NaN or inf"),
        (torch.tensor([0.0, 1.0, float("inf"), 3.0]), "scores must be finite"),
        (torch.tensor([0.0, 1.0, float("-inf"), 3.0]), "scores must be finite"),
        (torch.zeros(3), r"float32 \[4\]"),
        (torch.zeros(2, 2), r"float32 \[4\]"),
        (torch.zeros(4, dtype=torch.float64), r"float32 \[4\]"),
        (torch.zeros(4, dtype=torch.float16), r"float32 \[4\]"),
        (torch.zeros(4, dtype=torch.int64), r"float32 \[4\]"),
    ],
)
@pytest.mark.parametrize("num_keep", [0, 2])
@pytest.mark.parametrize("name", ["uniform", "specvlm", "attention", "uv", "dycoke"])
def test_bad_scores_are_refused(name, scores, message, num_keep):
    """Catches: NaN or misshapen guidance that would sort arbitrarily; a check skipped for an empty budget."""
    with pytest.raises(ValueError, match=rf"^pruner {name}: .*{message}"):
        get_pruner(name)(inputs_of(num_keep, scores=scores))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.tensor([[0.0], [1.0], [float("nan")], [3.0]]), "features must be finite, got NaN or inf"),
        (torch.tensor([[0.0], [1.0], [float("nan")], [3.0]], dtype=torch.bfloat16), "features must be finite"),
        (torch.tensor([[0.0], [1.0], [float("inf")], [3.0]], dtype=torch.float16), "features must be finite"),
        (torch.tensor([[0.0], [1.0], [float("-inf")], [3.0]]), "features must be finite"),
        (torch.zeros(3, 4), r"\[4, dim\]"),
        (torch.zeros(4), r"\[4, dim\]"),
        (torch.zeros(4, 0), r"\[4, dim\]"),
        (torch.zeros(1, 4, 3), r"\[4, dim\]"),
        (torch.zeros(4, 3, dtype=torch.float64), "float16, bfloat16 or float32"),
        (torch.zeros(4, 3, dtype=torch.int64), "float16, bfloat16 or float32"),
    ],
)
@pytest.mark.parametrize("num_keep", [0, 2])
@pytest.mark.parametrize("name", ["uniform", "attention", "fastvid", "dycoke"])
def test_bad_features_are_refused(name, features, message, num_keep):
    """Catches: NaN that would make every comparison of frames arbitrary, embeddings of another item."""
    with pytest.raises(ValueError, match=rf"^pruner {name}: .*{message}"):
        get_pruner(name)(inputs_of(num_keep, features=features))


@pytest.mark.parametrize("name", pruner_names())
@pytest.mark.parametrize("lambda_r", [-0.1, 1.5, float("nan")])
def test_bad_lambda_is_refused(name, lambda_r):
    """Catches: a share in percent, a share of NaN that retains nothing."""
    with pytest.raises(ValueError, match=rf"^pruner {name}: lambda_r must be in \[0, 1\]"):
        get_pruner(name)(inputs_of(lambda_r=lambda_r))


def test_only_specvlm_refuses_negative_scores():
    """Catches: a share of a sum with cancellations; `uv`, whose scores are differences, refused with it."""
    scores = torch.tensor([0.5, -1e-9, 0.0, 0.1])
    with pytest.raises(ValueError, match=r"^pruner specvlm: scores must be >= 0"):
        get_pruner("specvlm")(inputs_of(scores=scores))
    assert get_pruner("specvlm")(inputs_of(scores=torch.tensor([0.5, -0.0, 0.0, 0.1]))).shape == (2,)
    for name in ("attention", "uv"):
        assert get_pruner(name)(inputs_of(3, scores=scores)).tolist() == [0, 2, 3]


@pytest.mark.parametrize(("name", "needs"), NEEDS.items())
@pytest.mark.parametrize("num_keep", [0, 2])
def test_missing_measurements_are_refused(name, needs, num_keep):
    """Catches: a guided pruner that runs blind."""
    missing = "features" if needs == {"features"} else "scores"
    with pytest.raises(ValueError, match=f"^pruner {name}: needs {missing}"):
        get_pruner(name)(inputs_of(num_keep, **{missing: None}))


@pytest.mark.parametrize("name", pruner_names())
def test_unneeded_measurements_change_nothing(name):
    """Catches: an unguided pruner led by scores; one that takes the measurement of another."""
    grid, pruner, given = TokenGrid(3, 2, 2, 1), get_pruner(name), measured(13)
    needed = {} if name not in NEEDS else {"features" if "features" in NEEDS[name] else "scores"}
    alone = PruneInputs(grid, 6, **{key: given[key] for key in needed})
    assert torch.equal(pruner(PruneInputs(grid, 6, **given)), pruner(alone))


@pytest.mark.parametrize("name", pruner_names())
def test_measurements_carry_the_device(name):
    """Catches: indices that land on another device than what was measured."""
    grid, pruner = TokenGrid(5, 2, 2, 1), get_pruner(name)
    given = {"scores": torch.rand(21), "features": torch.randn(21, 5)}
    on_cpu = pruner(PruneInputs(grid, 11, **given))
    assert on_cpu.device == torch.device("cpu")
    if torch.cuda.is_available():
        moved = {key: value.cuda() for key, value in given.items()}
        on_gpu = pruner(PruneInputs(grid, 11, **moved))
        assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), on_cpu)
        assert pruner(PruneInputs(grid, 0, **moved)).is_cuda


def test_measurements_on_two_devices_are_refused():
    """Catches: an error from deep inside a pruner, or indices on a device of chance."""
    with pytest.raises(ValueError, match=r"^pruner dycoke: scores are on meta, features on cpu"):
        get_pruner("dycoke")(inputs_of(scores=torch.zeros(4, device="meta")))


def test_inputs_are_frozen():
    """Catches: a pruner that could change what the next one sees; a comparison of tensors that raises."""
    inputs = inputs_of()
    with pytest.raises(FrozenInstanceError):
        inputs.num_keep = 3
    assert inputs == inputs and inputs != inputs_of()


# --- registry ---


def test_every_configured_pruner_exists():
    """Catches: a name that the configuration accepts and the engine cannot find; a need that nobody hears of."""
    assert pruner_names() == PRUNERS
    for name in PRUNERS:
        assert get_pruner(name).name == name
        assert get_pruner(name).needs == NEEDS.get(name, set())


def test_a_guided_pruner_plugs_in(monkeypatch):
    """Catches: an interface that a Top-K pruner cannot join, and one that runs without the scores it needs."""

    def top_k(inputs):
        return inputs.scores.topk(inputs.num_keep).indices.sort().values

    monkeypatch.setattr("vllm_vidspec.pruning.base._REGISTRY", dict(_REGISTRY))
    register_pruner(Pruner("mine", top_k, needs=frozenset({"attention"})))
    pruner, grid = get_pruner("mine"), TokenGrid(1, 1, 5)
    assert pruner.needs == {"attention"}
    assert pruner(PruneInputs(grid, 2, scores=torch.tensor([0.1, 5.0, -1.0, 0.2, 4.0]))).tolist() == [1, 4]
    assert pruner(PruneInputs(grid, 0, scores=torch.zeros(5))).tolist() == []
    with pytest.raises(ValueError, match="pruner mine: needs scores"):
        pruner(PruneInputs(grid, 2))


@pytest.mark.parametrize("needs", [{"scores"}, {"attention", "uv"}, {"features", "colour"}])
def test_impossible_needs_are_refused(needs):
    """Catches: a misspelt need that nobody would measure; two kinds of scores for one field."""
    with pytest.raises(ValueError, match="pruner 'mine' needs"):
        register_pruner(Pruner("mine", lambda inputs: None, needs=frozenset(needs)))
    assert "mine" not in pruner_names()


def test_unknown_name():
    """Catches: a bare KeyError for a typo."""
    with pytest.raises(VidSpecError) as caught:
        get_pruner("unifrom")
    assert str(caught.value) == f"unknown pruner 'unifrom' (did you mean 'uniform'?); known: {', '.join(PRUNERS)}"


def test_double_registration():
    """Catches: one pruner silently replacing another."""
    with pytest.raises(ValueError, match="registered twice"):
        register_pruner(get_pruner("uniform"))
