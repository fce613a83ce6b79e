"""`attention`, `uv` and `specvlm`: hand-computed cases, slow exact references, and mutations of stage I."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner
from vllm_vidspec.pruning import guided as guided_module
from vllm_vidspec.pruning.indices import descending_order

TOP_K = ["attention", "uv"]
quick = settings(max_examples=150, deadline=None)


def inputs_of(scores, num_keep, lambda_r=0.4):
    """Return inputs of one flat row."""
    return PruneInputs(
        TokenGrid(1, 1, len(scores)), num_keep, scores=torch.tensor(scores, dtype=torch.float32), lambda_r=lambda_r
    )


@st.composite
def flat_inputs(draw, low=0, integer=None):
    """Draw integer scores, with many ties and sums that are exact, or real ones; lambda_r is a multiple of 1/64."""
    num_tokens = draw(st.integers(0, 60))
    if draw(st.booleans()) if integer is None else integer:
        scores = draw(st.lists(st.integers(low, draw(st.integers(0, 20))), min_size=num_tokens, max_size=num_tokens))
    else:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        scores = torch.rand(num_tokens, generator=generator).pow(draw(st.integers(1, 9))).tolist()
    return inputs_of(scores, draw(st.integers(0, num_tokens)), draw(st.integers(0, 64)) / 64)


# --- the specifications, slow and exact ---


def top_k_by_loops(inputs):
    ranked = sorted(range(inputs.grid.num_tokens), key=lambda index: (-inputs.scores[index].item(), index))
    return sorted(ranked[: inputs.num_keep])


def stage_one_by_loops(inputs):
    """Return V_R of SpecVLM eq. 6 in score order, in rational arithmetic."""
    scores = [Fraction(score) for score in inputs.scores.tolist()]
    threshold = Fraction(inputs.lambda_r) * sum(scores)
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    retained, held = [], Fraction(0)
    while held < threshold:
        held += scores[ranked[len(retained)]]
        retained.append(ranked[len(retained)])
    return retained


def specvlm_by_loops(inputs):
    """Return SpecVLM's choice: eq. 6, then integer linspace over the remaining tokens in sequence order (eq. 7)."""
    retained = stage_one_by_loops(inputs)
    if len(retained) > inputs.num_keep:
        return sorted(retained[: inputs.num_keep])
    rest = [index for index in range(inputs.grid.num_tokens) if index not in retained]
    num_spread = inputs.num_keep - len(retained)
    step = Fraction(len(rest) - 1, max(num_spread - 1, 1))
    return sorted(retained + [rest[int(step * index)] for index in range(num_spread)])


def check_specvlm(pruner, inputs):
    assert pruner(inputs).tolist() == specvlm_by_loops(inputs)


# --- Top-K ---


@pytest.mark.parametrize("name", TOP_K)
@quick
@given(inputs=flat_inputs(low=-20))
def test_top_k_is_the_reference(name, inputs):
    """Catches: the lowest instead of the highest scores, ties to a higher index, negative scores dropped."""
    assert get_pruner(name)(inputs).tolist() == top_k_by_loops(inputs)


@pytest.mark.parametrize("name", TOP_K)
@quick
@given(inputs=flat_inputs(low=-20), data=st.data())
def test_top_k_budgets_are_nested(name, inputs, data):
    """Catches: a larger budget that gives up a token of a smaller one."""
    smaller = replace(inputs, num_keep=data.draw(st.integers(0, inputs.num_keep)))
    assert set(get_pruner(name)(smaller).tolist()) <= set(get_pruner(name)(inputs).tolist())


@pytest.mark.parametrize("name", [*TOP_K, "specvlm"])
@quick
@given(inputs=flat_inputs(), exponent=st.integers(-30, 30))
def test_scale_does_not_matter(name, inputs, exponent):
    """Catches: a threshold or an epsilon on absolute scores. Powers of two: the scaling itself must round nothing."""
    scaled = replace(inputs, scores=inputs.scores * 2.0**exponent)
    assert torch.equal(get_pruner(name)(inputs), get_pruner(name)(scaled))


@pytest.mark.parametrize("name", TOP_K)
def test_ties_go_to_the_lower_index(name):
    """Catches: an unstable sort (visible from some hundred tokens on), and -0.0 ranked below 0.0."""
    assert get_pruner(name)(inputs_of([1, 2, 1, 2, 1], 3)).tolist() == [0, 1, 3]
    assert get_pruner(name)(inputs_of([0.0, -0.0, 0.0, -0.0], 2)).tolist() == [0, 1]
    assert get_pruner(name)(inputs_of([7.0] * 25_088, 2508)).tolist() == list(range(2508))
    assert get_pruner(name)(inputs_of([0.0, 3.0] * 12_544, 2508)).tolist() == list(range(1, 5016, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*TOP_K, "specvlm"])
def test_the_choice_is_the_same_on_the_gpu(name):
    """Catches: ties, signed zeros or a threshold that another device decides otherwise."""
    for scores in (torch.rand(25_088), torch.randint(0, 5, (25_088,)).float(), torch.zeros(25_088).mul(-1.0)):
        inputs = PruneInputs(TokenGrid(128, 14, 14), 2508, scores=scores)
        on_gpu = get_pruner(name)(replace(inputs, scores=scores.cuda()))
        assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), get_pruner(name)(inputs))


def test_order_reads_strided_scores():
    """Catches: a sort that walks memory instead of the tensor."""
    assert descending_order(torch.tensor([[1.0, 9.0], [3.0, 0.0], [2.0, 5.0]])[:, 0]).tolist() == [1, 2, 0]


# --- specvlm ---


@pytest.mark.parametrize(
    ("scores", "num_keep", "lambda_r", "kept"),
    [
        # Total 10. Half of it: 4 + 3 >= 5. The rest 0 2 3 5 gives both ends.
        ([1, 4, 1, 0, 3, 1], 4, 0.5, [0, 1, 4, 5]),
        # 4 alone reaches 0.4; one more from 0 2 3 4 5: the first.
        ([1, 4, 1, 0, 3, 1], 2, 0.4, [0, 1]),
        # Exactly at the threshold stops: 4 + 3 = 0.7 * 10.
        ([1, 4, 1, 0, 3, 1], 3, 0.7, [0, 1, 4]),
        # Stage I of three (4, 3, 1 at index 0) cut to two: the highest, no stage II.
        ([1, 4, 1, 0, 3, 1], 2, 0.75, [1, 4]),
        # lambda_r 1: every positive score, then the zero.
        ([1, 4, 1, 0, 3, 1], 5, 1.0, [0, 1, 2, 4, 5]),
        # ... and no zero by its index: stage II spreads them.
        ([0, 0, 0, 0, 5], 3, 1.0, [0, 3, 4]),
        ([5], 1, 0.4, [0]),
        ([0], 1, 0.4, [0]),
        ([1, 2], 1, 0.4, [1]),
        ([1, 2], 1, 0.0, [0]),
        ([1, 2], 2, 0.4, [0, 1]),
    ],
)
def test_specvlm_by_hand(scores, num_keep, lambda_r, kept):
    """Catches: a strict threshold, stage II over all tokens, a truncation that keeps the first instead of the top."""
    assert get_pruner("specvlm")(inputs_of(scores, num_keep, lambda_r)).tolist() == kept


@settings(quick, max_examples=400)
@given(inputs=flat_inputs())
def test_specvlm_is_the_reference(inputs):
    """Catches: any departure from eq. 6 and 7, at exact ties with the threshold above all."""
    check_specvlm(get_pruner("specvlm"), inputs)


@quick
@given(inputs=flat_inputs())
def test_specvlm_at_the_ends_of_lambda(inputs):
    """Catches: a stage I that retains one token at lambda_r 0, or misses one with weight at lambda_r 1."""
    pruner, uniform = get_pruner("specvlm"), get_pruner("uniform")(inputs)
    assert torch.equal(pruner(replace(inputs, lambda_r=0.0)), uniform)
    assert torch.equal(pruner(replace(inputs, scores=torch.zeros_like(inputs.scores))), uniform)
    kept = set(pruner(replace(inputs, lambda_r=1.0)).tolist())
    positive = set(inputs.scores.nonzero()[:, 0].tolist())
    assert kept <= positive or positive <= kept


def test_specvlm_at_lambda_one_sees_scores_that_no_sum_does():
    """Catches: lambda_r 1 decided by a float64 sum, in which 1e-30 beside 1 vanishes."""
    assert get_pruner("specvlm")(inputs_of([0, 0, 0, 1e-30, 1], 2, 1.0)).tolist() == [3, 4]


def test_specvlm_threshold_among_25_000_tokens():
    """Catches: a prefix sum in float32, which does not grow when 1 is added to 2**25."""
    scores = [float(2**25)] + [1.0] * 25_087
    lambda_r = (2**25 + 999.5) / (2**25 + 25_087)  # reached by the large one and 1,000 others
    assert guided_module.top_p_size(torch.tensor(scores), lambda_r) == 1001
    kept = get_pruner("specvlm")(inputs_of(scores, 2508, lambda_r))
    assert kept[:1001].tolist() == list(range(1001)) and kept[1001] == 1001 and kept[-1] == 25_087
    assert kept[1001:].diff().min() >= 15  # 24,086 / 1,506 = 15.99


def test_specvlm_does_both_on_a_real_geometry():
    """Catches: stages mixed up: a long-tailed score keeps its peaks, and what is left covers the whole video."""
    scores = torch.rand(25_088, generator=torch.Generator().manual_seed(0)).pow(40)
    inputs = PruneInputs(TokenGrid(128, 14, 14), 2508, scores=scores)
    kept = get_pruner("specvlm")(inputs)
    retained = stage_one_by_loops(inputs)
    assert 50 < len(retained) < 1000 and set(retained) <= set(kept.tolist())
    spread = torch.tensor(sorted(set(kept.tolist()) - set(retained)))
    assert len(spread) == 2508 - len(retained) and spread.diff().max() < 2 * 25_088 / len(spread)


STAGE_ONE_EXAMPLES = [
    inputs_of([1, 4, 1, 0, 3, 1, 0, 2], 5, 0.5),
    inputs_of([0, 0, 9, 8, 7, 6, 5, 0, 0], 4, 0.5),
    inputs_of([5, 0, 0, 0, 0, 0, 0, 3, 3], 4, 0.25),
]


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("inputs", STAGE_ONE_EXAMPLES)
def test_mutation_stage_one_off_by_one(monkeypatch, inputs, wrong):
    """Mutation: stage I stops one token early, or takes one too many. Seen to fail `check_specvlm` on each example."""
    right = guided_module.top_p_size
    check_specvlm(get_pruner("specvlm"), inputs)
    monkeypatch.setattr(guided_module, "top_p_size", lambda scores, lambda_r: right(scores, lambda_r) + wrong)
    with pytest.raises(AssertionError):
        check_specvlm(get_pruner("specvlm"), inputs)


def test_mutation_strict_threshold(monkeypatch):
    """Mutation: stage I must exceed the share, not reach it. Seen to fail `check_specvlm` (8 of 16 at lambda_r 0.5)."""
    inputs = inputs_of([0, 8, 0, 4, 0, 4, 0, 0], 3, 0.5)

    def exceeds(ordered_scores, lambda_r):
        sums = ordered_scores.double().cumsum(0)
        return int((sums <= lambda_r * sums[-1]).sum()) + 1

    check_specvlm(get_pruner("specvlm"), inputs)
    monkeypatch.setattr(guided_module, "top_p_size", exceeds)
    with pytest.raises(AssertionError):
        check_specvlm(get_pruner("specvlm"), inputs)
