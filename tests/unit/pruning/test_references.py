"""The guided pruners against slow, exact references, and at a real geometry."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner, pruners
from vllm_vidspec.pruning.pruners import novelty


def inputs_of(scores, num_keep, lambda_r=0.4):
    """Return inputs of one flat row."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    return PruneInputs(TokenGrid(1, 1, len(scores)), num_keep, scores=scores, lambda_r=lambda_r)


@st.composite
def flat_inputs(draw, low=0):
    """Draw integer scores, with many ties and sums that are exact, or real ones, at any power of two and stride."""
    num_tokens = draw(st.integers(0, 60))
    if draw(st.booleans()):
        scores = draw(st.lists(st.integers(low, draw(st.integers(0, 20))), min_size=num_tokens, max_size=num_tokens))
        scores = torch.tensor(scores, dtype=torch.float32)
    else:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        scores = torch.rand(num_tokens, generator=generator).pow(draw(st.integers(1, 9)))
    scores = scores * 2.0 ** draw(st.integers(-30, 30))
    if draw(st.booleans()):
        scores = torch.stack((scores, -scores), dim=1)[:, 0]
    lambda_r = draw(st.sampled_from([0, 64]) | st.integers(0, 64)) / 64
    return inputs_of(scores, draw(st.integers(0, num_tokens)), lambda_r)


@st.composite
def videos(draw):
    """Draw features of any dtype, power of two and strides; some frames and tokens repeat, some are zero vectors."""
    grid = TokenGrid(*(draw(st.integers(*ends)) for ends in ((0, 11), (0, 3), (1, 3), (0, 7))))
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
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    exponent = 0 if dtype == torch.float16 else draw(st.integers(-60, 60))
    features = (features * 2.0**exponent).to(dtype)
    layout = draw(st.sampled_from(["rows", "columns", "apart"]))
    if layout == "columns":
        features = features.t().contiguous().t()
    elif layout == "apart":
        features = torch.stack((features, torch.full_like(features, 7.0)), dim=2)[:, :, 0]
    return PruneInputs(grid, draw(st.integers(0, grid.num_tokens)), features=features)


def ranked_by_loops(scores):
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def linspace_by_loops(candidates, num_keep):
    return [candidates[index * (len(candidates) - 1) // max(num_keep - 1, 1)] for index in range(num_keep)]


def top_k_by_loops(inputs):
    return sorted(ranked_by_loops(inputs.scores.tolist())[: inputs.num_keep])


def stage_one_by_loops(inputs):
    """Return V_R of SpecVLM eq. 6 in score order, in rational arithmetic."""
    scores = [Fraction(score) for score in inputs.scores.tolist()]
    threshold = Fraction(inputs.lambda_r) * sum(scores)
    retained, held, ranked = [], Fraction(0), ranked_by_loops(scores)
    while held < threshold:
        retained.append(ranked[len(retained)])
        held += scores[retained[-1]]
    return retained


def lattice_by_loops(grid, candidates, num_keep):
    """Return the candidates of the least fractions of x / g + y / g^2 + t / g^3, each rounded to 2 ** -32."""
    g = 1.2207440846057596  # g^4 = g + 1
    steps = [round(2**32 / g**power) for power in (1, 2, 3)]
    ranked = []
    for t in range(grid.num_frames):
        for y in range(grid.height):
            ranked += [(x * steps[0] + y * steps[1] + t * steps[2]) % 2**32 for x in range(grid.width)]
    per_frame, width = max(grid.height * grid.width, 1), max(grid.width, 1)
    for index in range(len(ranked), grid.num_tokens):  # trailing ones: as if the last frame went on
        x, y, t = index % width, index // width % max(grid.height, 1), index // per_frame
        ranked.append((x * steps[0] + y * steps[1] + t * steps[2]) % 2**32)
    return sorted(sorted(candidates, key=lambda index: (ranked[index], index))[:num_keep])


def specvlm_by_loops(inputs, by_stride=False):
    """Return SpecVLM's choice: eq. 6, then of the remaining tokens an even spread, or the authors' integer linspace in
    sequence order (eq. 7)."""
    retained = stage_one_by_loops(inputs)
    if len(retained) > inputs.num_keep:
        return sorted(retained[: inputs.num_keep])
    rest, left = [i for i in range(inputs.grid.num_tokens) if i not in retained], inputs.num_keep - len(retained)
    return sorted(
        retained + (linspace_by_loops(rest, left) if by_stride else lattice_by_loops(inputs.grid, rest, left))
    )


def novelty_by_loops(first, second):
    """Return 1 - cosine of two lists, rounded: equal vectors and equal pairs must be ties here too."""
    if first == second:
        return 0.0
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    norms = math.hypot(*first) * math.hypot(*second)
    return round(1 - dot / norms, 10) if norms else 1.0


def fastvid_by_loops(inputs):
    grid, rows = inputs.grid, inputs.features.tolist()
    per_frame = grid.tokens_per_frame
    if per_frame == 0 or grid.num_frames <= 1:
        return lattice_by_loops(grid, range(grid.num_tokens), inputs.num_keep)
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
        return lattice_by_loops(grid, range(grid.num_tokens), inputs.num_keep)
    if inputs.num_keep <= len(first):
        return linspace_by_loops(first, inputs.num_keep)
    return sorted(first + sorted(rank, key=lambda token: (rank[token], token))[: inputs.num_keep - len(first)])


# Of each pruner: its specification, and the inputs on which the two must agree.
REFERENCES = {
    "attention": (top_k_by_loops, flat_inputs(low=-20)),
    "uv": (top_k_by_loops, flat_inputs(low=-20)),
    "specvlm": (specvlm_by_loops, flat_inputs()),
    "specvlm:stride": (partial(specvlm_by_loops, by_stride=True), flat_inputs()),
    "uniform": (lambda it: lattice_by_loops(it.grid, range(it.grid.num_tokens), it.num_keep), videos()),
    "fastvid": (fastvid_by_loops, videos()),
    "dycoke": (dycoke_by_loops, videos()),
}


PEAKS = [1, 4, 1, 0, 3, 1]  # total 10
BY_HAND = [
    (PEAKS, 0.5, 4, [0, 1, 4, 5]),  # 4 + 3 >= 5; the rest 0 2 3 5 gives both ends
    (PEAKS, 0.4, 2, [0, 1]),  # 4 alone reaches it; one more from 0 2 3 4 5: the first
    (PEAKS, 0.7, 3, [0, 1, 4]),  # exactly at the threshold stops: 4 + 3 = 7
    (PEAKS, 0.75, 2, [1, 4]),  # stage I (4, 3, 1 at index 0) cut to the highest, no stage II
    ([0, 0, 0, 1e-30, 1], 1.0, 2, [3, 4]),  # decided by a sum in which 1e-30 beside 1 does not vanish
]


def check_reference(name, inputs):
    assert get_pruner(name)(inputs).tolist() == REFERENCES[name][0](inputs)


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_the_choice_is_the_reference(name, data):
    """Catches, Top-K: ties to a higher index, negative scores dropped, a threshold or an epsilon on absolute scores, a
    sort that walks memory. SpecVLM: any departure from eq. 6 and 7, at exact ties with the threshold. Temporal: the
    wrong reference frame or position, ties by rounding, an epsilon beside the norm, squares that leave float32's range,
    similarities rounded to the features' dtype, an item without anything to compare cut to its first tokens."""
    check_reference(name, data.draw(REFERENCES[name][1]))


@pytest.mark.parametrize("name", ["attention", "uv"])
@pytest.mark.parametrize("scores", [[7.0] * 25_088, [0.0, 3.0] * 12_544, [0.0, -0.0] * 12_544])
def test_ties_of_a_long_video_go_to_the_first(name, scores):
    """Catches: an unstable sort (visible from some hundred tokens on), and -0.0 ranked below 0.0."""
    check_reference(name, inputs_of(scores, 2508))


@pytest.mark.parametrize(("scores", "lambda_r", "num_keep", "kept"), BY_HAND)
def test_specvlm_by_hand(scores, lambda_r, num_keep, kept):
    assert get_pruner("specvlm:stride")(inputs_of(scores, num_keep, lambda_r)).tolist() == kept


def test_specvlm_threshold_among_25_000_tokens():
    """Catches: a prefix sum in float32, which does not grow when 1 is added to 2**25."""
    scores = [float(2**25)] + [1.0] * 25_087
    lambda_r = (2**25 + 999.5) / (2**25 + 25_087)  # reached by the large one and 1,000 others
    assert pruners.top_p_size(torch.tensor(scores), lambda_r) == 1001
    kept = get_pruner("specvlm:stride")(inputs_of(scores, 2508, lambda_r))
    assert kept[:1001].tolist() == list(range(1001)) and kept[1001] == 1001 and kept[-1] == 25_087
    assert kept[1001:].diff().min() >= 15  # 24,086 / 1,506 = 15.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 127, 128, 129, 300])
def test_novelty_is_one_minus_the_cosine(dtype, dim):
    """Catches: a lost column chunk or column, products rounded to half precision."""
    features = torch.randn(20, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    tokens, references = torch.arange(1, 20), torch.arange(19)
    expected = 1 - torch.nn.functional.cosine_similarity(features[1:].double(), features[:-1].double(), dim=1)
    torch.testing.assert_close(novelty(features, tokens, references), expected, rtol=0, atol=1e-12)


def test_novelty_of_zero_vectors_and_of_small_changes():
    """Catches: NaN from a zero norm, rounding noise that ranks, 1 - cosine as a float32 difference."""
    features = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.7, -0.3], [0.1, 0.7, -0.3], [0.3, 2.1, -0.9], [-0.1, -0.7, 0.3]])
    pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 2], [1, 3], [1, 4]])
    found = novelty(features, pairs[:, 0], pairs[:, 1])
    assert found[:5].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0] and abs(found[5] - 2) < 1e-12
    turn = torch.tensor([0.0, 1e-4, 3e-4])
    features = torch.stack((turn.cos(), turn.sin()), dim=1)
    found = novelty(features, torch.tensor([1, 2]), torch.tensor([0, 0]))
    torch.testing.assert_close(found, torch.tensor([0.5e-8, 4.5e-8]).double(), rtol=1e-3, atol=0)
