"""`fastvid` and `dycoke`: hand-computed cases, slow references with plain cosines, ties, zero vectors and dtypes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner
from vllm_vidspec.pruning import temporal as temporal_module
from vllm_vidspec.pruning.temporal import novelty

TEMPORAL = ["fastvid", "dycoke"]
quick = settings(max_examples=150, deadline=None)


@st.composite
def videos(draw):
    """Draw random features in which some frames repeat the one before, and some tokens repeat or are zero vectors."""
    grid = TokenGrid(
        draw(st.integers(0, 11)), draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    features = torch.randn(grid.num_tokens, 5, generator=generator)
    per_frame = grid.tokens_per_frame
    framed = features[: grid.num_frames * per_frame].view(grid.num_frames, per_frame, 5)
    framed[torch.rand(framed.shape[:2], generator=generator) < draw(st.sampled_from([0.0, 0.2]))] = 0.0
    is_static = torch.rand(grid.num_frames, per_frame, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    for frame in range(1, grid.num_frames):
        if draw(st.integers(0, 3)) == 0:
            is_static[frame] = True
        framed[frame][is_static[frame]] = framed[frame - 1][is_static[frame]]
    return PruneInputs(grid, draw(st.integers(0, grid.num_tokens)), features=features)


# --- the specifications, slow ---


def novelty_by_loops(first, second):
    """Return 1 - cosine of two lists, rounded: equal vectors and equal pairs must be ties here too."""
    if first == second:
        return 0.0
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    norms = math.hypot(*first) * math.hypot(*second)
    return round(1 - dot / norms, 10) if norms else 1.0


def linspace_by_loops(candidates, num_keep):
    return [candidates[index * (len(candidates) - 1) // max(num_keep - 1, 1)] for index in range(num_keep)]


def fastvid_by_loops(inputs):
    grid, rows = inputs.grid, inputs.features.tolist()
    per_frame = grid.tokens_per_frame
    if per_frame == 0 or grid.num_frames == 0:
        return linspace_by_loops(range(grid.num_tokens), inputs.num_keep)
    tokens_of = [list(range(frame * per_frame, (frame + 1) * per_frame)) for frame in range(grid.num_frames)]
    change = {0: math.inf}
    for frame in range(1, grid.num_frames):
        change[frame] = round(
            sum(novelty_by_loops(rows[token], rows[token - per_frame]) for token in tokens_of[frame]) / per_frame, 10
        )
    tokens_of[-1] += range(grid.num_frames * per_frame, grid.num_tokens)
    kept = []
    for frame in sorted(change, key=lambda frame: (-change[frame], frame)):
        room = inputs.num_keep - len(kept)
        kept += linspace_by_loops(tokens_of[frame], min(room, len(tokens_of[frame])))
    return sorted(kept)


def dycoke_by_loops(inputs):
    grid, rows = inputs.grid, inputs.features.tolist()
    per_frame = grid.tokens_per_frame
    first, rank = [], {}
    for token in range(grid.num_tokens):
        if token >= grid.num_frames * per_frame:
            rank[token] = 1.0  # after every -novelty, which is at most 0
            continue
        group, phase = divmod(token // per_frame, 4)
        if phase == 0:
            first.append(token)
        else:
            reference = (4 * group + {1: 0, 2: 0, 3: 2}[phase]) * per_frame + token % per_frame
            rank[token] = -novelty_by_loops(rows[token], rows[reference])
    if not first:
        return linspace_by_loops(range(grid.num_tokens), inputs.num_keep)
    if inputs.num_keep <= len(first):
        return linspace_by_loops(first, inputs.num_keep)
    return sorted(first + sorted(rank, key=lambda token: (rank[token], token))[: inputs.num_keep - len(first)])


REFERENCES = {"fastvid": fastvid_by_loops, "dycoke": dycoke_by_loops}


def check_temporal(name, inputs):
    assert get_pruner(name)(inputs).tolist() == REFERENCES[name](inputs)


@pytest.mark.parametrize("name", TEMPORAL)
@settings(quick, max_examples=300)
@given(inputs=videos())
def test_temporal_is_the_reference(name, inputs):
    """Catches: the wrong reference frame or position, similar instead of different ones kept, ties by rounding."""
    check_temporal(name, inputs)


# --- by hand ---


def one_column(*values, num_keep, num_trailing=0):
    """Return a video of one token per frame; each value is an angle in degrees, None a zero vector."""
    rows = [[0.0, 0.0] if v is None else [math.cos(math.radians(v)), math.sin(math.radians(v))] for v in values]
    features = torch.tensor(rows, dtype=torch.float32)
    return PruneInputs(TokenGrid(len(values) - num_trailing, 1, 1, num_trailing), num_keep, features=features)


@pytest.mark.parametrize(
    ("num_keep", "kept"),
    [(1, [0]), (2, [0, 2]), (3, [0, 2, 4]), (4, [0, 2, 3, 4]), (5, [0, 1, 2, 3, 4])],
)
def test_fastvid_by_hand(num_keep, kept):
    """Catches: the earlier frame of a similar pair dropped, comparison with frame 0 instead of the previous one."""
    # Turns of 1, 90, 10 and 60 degrees; frame 4 is back near frame 0.
    assert get_pruner("fastvid")(one_column(0, 1, 91, 81, 21, num_keep=num_keep)).tolist() == kept


@pytest.mark.parametrize(
    ("num_keep", "kept"),
    [
        (1, [0]),
        (2, [0, 3]),  # a part of frame 0: at regular intervals
        (4, [0, 1, 2, 3]),
        (6, [0, 1, 2, 3, 8, 12]),  # frame 2 changed most: two of its five (the newline, 12, is its end)
        (9, [0, 1, 2, 3, 8, 9, 10, 11, 12]),
        (10, [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]),
        (13, list(range(13))),
    ],
)
def test_fastvid_frames_and_newline_by_hand(num_keep, kept):
    """Catches: a partial frame cut at one end, a newline that counts for no frame or for the wrong one."""
    features = torch.zeros(13, 2)
    features[:8, 0], features[8:, 1] = 1.0, 1.0
    assert get_pruner("fastvid")(PruneInputs(TokenGrid(3, 2, 2, 1), num_keep, features=features)).tolist() == kept


@pytest.mark.parametrize(
    ("num_keep", "kept"),
    [
        (1, [0]),
        (2, [0, 4]),
        (3, [0, 2, 4]),  # 2 is 50 from 0 (and 20 from 1)
        (4, [0, 1, 2, 4]),  # 1 is 30 from 0
        (5, [0, 1, 2, 4, 5]),  # 5 is 20 from 4; 3 is 10 from 2 (60 from 0)
        (6, [0, 1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 3, 4, 5, 6]),  # the trailing token has no reference: last
    ],
)
def test_dycoke_by_hand(num_keep, kept):
    """Catches: frame 3 compared with 2, frame 4 with 1, a group of another size, the newline before real tokens."""
    inputs = one_column(0, 30, 50, 60, 200, 220, 0, num_keep=num_keep, num_trailing=1)
    assert get_pruner("dycoke")(inputs).tolist() == kept


def test_dycoke_small_budgets_spread_over_the_first_frames():
    """Catches: the budget spent on the first frames of the video only."""
    grid = TokenGrid(128, 14, 14)
    kept = get_pruner("dycoke")(PruneInputs(grid, 2508, features=torch.ones(grid.num_tokens, 1)))
    frames = torch.unique(kept // 196)
    assert frames.tolist() == list(range(0, 128, 4))


@quick
@given(inputs=videos(), data=st.data())
def test_dycoke_budgets_are_nested_above_the_first_frames(inputs, data):
    """Catches: a larger budget that gives up a token of a smaller one."""
    num_first = -(-inputs.grid.num_frames // 4) * inputs.grid.tokens_per_frame or inputs.grid.num_tokens
    budgets = sorted(data.draw(st.lists(st.integers(num_first, inputs.grid.num_tokens), min_size=2, max_size=2)))
    low, high = (set(get_pruner("dycoke")(replace(inputs, num_keep=budget)).tolist()) for budget in budgets)
    assert low <= high


@quick
@given(inputs=videos(), data=st.data())
def test_fastvid_whole_frames_are_nested(inputs, data):
    """Catches: a ranking that depends on the budget."""
    grid = replace(inputs.grid, num_trailing=0)
    features = inputs.features[: grid.num_tokens]
    counts = sorted(data.draw(st.lists(st.integers(0, grid.num_frames), min_size=2, max_size=2)))
    low, high = (
        set(get_pruner("fastvid")(PruneInputs(grid, count * grid.tokens_per_frame, features=features)).tolist())
        for count in counts
    )
    assert low <= high


# --- numbers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 127, 128, 129, 300])
def test_novelty_is_one_minus_the_cosine(dtype, dim):
    """Catches: a lost column chunk or column, products rounded to half precision."""
    features = torch.randn(20, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    tokens, references = torch.arange(1, 20), torch.arange(19)
    expected = 1 - torch.nn.functional.cosine_similarity(features[1:].double(), features[:-1].double(), dim=1)
    torch.testing.assert_close(novelty(features, tokens, references), expected, rtol=0, atol=1e-12)


def test_novelty_of_zero_vectors_and_of_unchanged_tokens():
    """Catches: NaN from a zero norm, rounding noise that ranks unchanged or merely brighter tokens."""
    features = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.7, -0.3], [0.1, 0.7, -0.3], [0.3, 2.1, -0.9], [-0.1, -0.7, 0.3]])
    pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 2], [1, 3], [1, 4]])
    found = novelty(features, pairs[:, 0], pairs[:, 1])
    assert found[:5].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0] and abs(found[5] - 2) < 1e-12


def test_novelty_has_the_precision_for_small_changes():
    """Catches: 1 - cosine computed as a difference in float32, where turns below 0.0003 vanish."""
    turn = torch.tensor([0.0, 1e-4, 3e-4])
    features = torch.stack((turn.cos(), turn.sin()), dim=1)
    found = novelty(features, torch.tensor([1, 2]), torch.tensor([0, 0]))
    torch.testing.assert_close(found, torch.tensor([0.5e-8, 4.5e-8]).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", TEMPORAL)
@quick
@given(inputs=videos(), exponent=st.integers(-60, 60))
def test_scale_and_strides_do_not_matter(name, inputs, exponent):
    """Catches: an epsilon beside the norm, squares that leave float32's range, a walk through memory."""
    kept = get_pruner(name)(inputs)
    for features in (inputs.features * 2.0**exponent, inputs.features.t().contiguous().t()):
        assert torch.equal(get_pruner(name)(replace(inputs, features=features)), kept)
    apart = torch.stack((inputs.features, torch.full_like(inputs.features, 7.0)), dim=2)[:, :, 0]
    assert torch.equal(get_pruner(name)(replace(inputs, features=apart)), kept)


@pytest.mark.parametrize("name", TEMPORAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@quick
@given(inputs=videos())
def test_half_precision_is_computed_as_float32(name, dtype, inputs):
    """Catches: similarities rounded to the features' dtype."""
    features = inputs.features.to(dtype)
    half = get_pruner(name)(replace(inputs, features=features))
    assert torch.equal(half, get_pruner(name)(replace(inputs, features=features.float())))


@pytest.mark.parametrize("name", TEMPORAL)
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_still_video_keeps_the_earliest(name, value):
    """Catches: noise instead of a rule where nothing changes, NaN where everything is zero."""
    grid = TokenGrid(8, 3, 3)
    kept = get_pruner(name)(PruneInputs(grid, 27, features=torch.full((72, 300), value)))
    assert kept.tolist() == (list(range(27)) if name == "fastvid" else [*range(18), *range(36, 45)])


# --- the references can fail the pruners ---

MUTATIONS = {
    "similar kept": lambda features, tokens, references: -novelty(features, tokens, references),
    "wrong reference": lambda features, tokens, references: novelty(features, tokens, (references + 1) % len(features)),
    "no norm": lambda features, tokens, references: -(features[tokens] * features[references]).double().sum(1),
}


@pytest.mark.parametrize("name", TEMPORAL)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_of_novelty(monkeypatch, name, mutation):
    """Mutations: the most similar kept, the next position's reference, the dot product. Each seen to fail."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randn(48, 1, generator=generator).mul(2).exp()
    inputs = PruneInputs(TokenGrid(8, 2, 3), 24, features=torch.randn(48, 5, generator=generator) * lengths)
    check_temporal(name, inputs)
    monkeypatch.setattr(temporal_module, "novelty", MUTATIONS[mutation])
    with pytest.raises(AssertionError):
        check_temporal(name, inputs)
