"""draw and candidates: kernel and loop against whole rows in order."""

import pytest
import torch

from tests.kernels.sampling_case import VOCAB_SIZES, SamplingCase, toy
from vidspec_kernels import candidates, draw
from vidspec_kernels.sampling import candidates as candidates_module
from vidspec_kernels.sampling.noise import BLOCK

SENTINEL = -7


def draw_of(case, impl, noise=None, **changes):
    """Return the columns of tokens and the ids that a draw leaves."""
    arguments = case.draw_arguments(noise or toy(), level=2) | changes
    draw(**arguments, impl=impl)
    return arguments["out_tokens"], arguments["out_ids"]


def check_draw(case, left, expected):
    """Assert that a draw left these tokens, in its column and for the next forward, and nothing else."""
    tokens, ids = (tensor.clone() for tensor in left)
    assert tokens[: case.num_rows, 2].tolist() == ids[: case.num_rows].tolist() == expected
    tokens[: case.num_rows, 2] = SENTINEL
    assert (tokens == SENTINEL).all() and (ids[case.num_rows :] == SENTINEL).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draw_equals_the_argmax(device, impl, vocab_size, dtype):
    """Catches: an unmasked tail, a block's place for a token, ties upwards, noise at 0 or of another request."""
    for num_rows in (5, 1, 0):
        case = SamplingCase(num_rows, vocab_size, device, dtype)
        check_draw(case, draw_of(case, impl), case.scores(toy()).argmax(1).tolist())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_batch_without_noise(device, impl, vocab_size):
    """Catches: a way of its own for greedy batches that takes the higher of two equal tokens, or does not see NaN."""
    case = SamplingCase(6, vocab_size, device, step=1)
    case.temperature[:], case.logits[0, vocab_size // 2 :] = 0.0, float("nan")
    check_draw(case, draw_of(case, impl), case.logits.cpu().argmax(1).tolist())


@pytest.mark.parametrize("changes", [{"salt": 1 << 30}, {"use_fp64": True}, {"apply_temperature": False}])
def test_noise_of_its_own(device, impl, changes):
    """Catches: a salt that is dropped, partial results of another precision, a temperature that is applied twice."""
    case, options = SamplingCase(6, 1500, device, seed=1), dict(changes)
    applies = options.pop("apply_temperature", True)
    noise = toy(**options)
    expected = case.scores(noise, apply_temperature=applies).argmax(1).tolist()
    check_draw(case, draw_of(case, impl, noise=noise, apply_temperature=applies), expected)
    assert "use_fp64" in changes or expected != case.scores(toy()).argmax(1).tolist()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_draws_of_no_numbers(device, impl, poison):
    """Catches: a token behind the vocabulary; a number before NaN in one of the two, so that they draw differently."""
    case = SamplingCase(4, 1030, device)
    case.logits[0], case.logits[1], case.logits[2:, 7] = poison, poison, poison
    left = draw_of(case, impl)
    check_draw(case, left, left[1][:4].tolist())
    assert (left[1][:2] == 0).all() and ((left[1][2:4] == 7) == (poison != -float("inf"))).all()


def candidates_of(case, num_candidates, impl, noise=None, **changes):
    """Return the log-probabilities and the ids; `noise` None: logits are scores."""
    arguments = case.candidates_arguments(num_candidates, noise) | changes
    candidates(**arguments, impl=impl)
    return arguments["log_probs"], arguments["ids"]


def check(case, left, scores, with_log_probs=True):
    """Assert that candidates are the best of these scores in order, and that nothing else is written."""
    log_probs, ids = (tensor.cpu() for tensor in left)
    assert (log_probs[case.num_rows :] == SENTINEL).all() and (ids[case.num_rows :] == SENTINEL).all()
    log_probs, ids = log_probs[: case.num_rows], ids[: case.num_rows]
    # Stable: of equal scores the lower token first.
    ordered = scores.sort(dim=1, descending=True, stable=True)
    expected, best = ordered.values[:, : ids.shape[1]], ordered.indices[:, : ids.shape[1]]
    assert torch.equal(ids, best)
    if with_log_probs:
        torch.testing.assert_close(log_probs, expected - scores.logsumexp(1, keepdim=True), atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(log_probs, expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_the_order_of_whole_rows(device, impl, vocab_size):
    """Catches: a tail that is not masked, a token lost between two blocks, the higher of two that tie put first."""
    case = SamplingCase(2, vocab_size, device, torch.bfloat16)
    check(case, candidates_of(case, min(10, vocab_size), impl), case.logits.float().cpu())


@pytest.mark.parametrize("num_candidates", [1, 2, 8, 64])
def test_numbers_of_candidates(device, impl, num_candidates):
    """Catches: ranks past those asked for, or the best of a block when more than a block's share are in one."""
    case = SamplingCase(1, BLOCK + 70, device, seed=num_candidates, step=1e4)
    case.logits[:, BLOCK:] += 100.0  # all of the best lie in the second block
    check(case, candidates_of(case, num_candidates, impl, with_log_probs=False), case.logits.cpu(), False)


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_merges_of_several_turns(device, monkeypatch, num_blocks):
    """Catches: what an earlier turn has found lost by a later one."""
    monkeypatch.setattr(candidates_module, "_LOG_MERGE", 3)
    case = SamplingCase(1, num_blocks * BLOCK - 3, device, seed=2)
    check(case, candidates_of(case, 7, "triton"), case.logits.float().cpu())


@pytest.mark.parametrize(("width", "first"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("apply_temperature", [True, False])
def test_noise_of_candidates(device, impl, width, first, apply_temperature):
    """Catches: another's temperature, seed or position, noise at 0, a temperature applied twice, logits overwritten."""
    case, noise = SamplingCase(5, 300, device, width=width, first=first), toy(salt=5)
    kept = case.logits.clone()
    left = candidates_of(case, 4, impl, noise, apply_temperature=apply_temperature)
    check(case, left, case.scores(noise, apply_temperature).float())
    assert torch.equal(case.logits, kept)


def test_signs_and_infinities(device, impl):
    """Catches: numbers below 0 in the wrong order, -0 below +0, -inf before what lies behind the vocabulary."""
    inf = float("inf")
    case = SamplingCase(1, 9, device)
    case.logits[0] = torch.tensor([-1.5, -0.0, 0.0, -inf, 1e-40, -1e-40, -2.0, 3e38, -3e38], device=device)
    log_probs, ids = candidates_of(case, 9, impl, with_log_probs=False)
    assert ids[0, :2].tolist() == [7, 4] and sorted(ids[0].tolist()) == list(range(9))
    assert ids[0, -6:].tolist()[1:] == [5, 0, 6, 8, 3] and ids[0, 2:4].tolist() == [1, 2]
    assert log_probs[0, 0] == torch.tensor(3e38) and log_probs[0, -1] == -inf
    case.logits[0, 5] = inf
    log_probs, ids = candidates_of(case, 3, impl)
    assert ids[0, 0] == 5 and torch.isnan(log_probs[0, 0]) and (log_probs[0, 1:] == -inf).all()


def test_logits_that_are_no_numbers(device, impl):
    """Catches: a token behind the vocabulary, or twice in a row."""
    case = SamplingCase(3, BLOCK + 6, device)
    case.logits[0], case.logits[1], case.logits[2, 7] = float("nan"), -float("inf"), float("nan")
    _, ids = candidates_of(case, 5, impl, toy())
    assert (ids[:3] >= 0).all() and (ids[:3] < BLOCK + 6).all()
    assert all(len(set(row)) == 5 for row in ids[:3].tolist())
    assert ids[2, 0] == 7


def test_candidates_refuse_numbers(device):
    """Catches: more candidates than tokens."""
    with pytest.raises(AssertionError, match="ids: 4 of 3"):
        candidates_of(SamplingCase(3, 3, device), 4, "auto")
