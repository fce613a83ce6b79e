"""candidates: kernel and reference against whole rows in order."""

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.sampling_case import VOCAB_SIZES, SamplingCase, toy
from vidspec_kernels import candidates
from vidspec_kernels.sampling.noise import BLOCK

IMPLS = ["triton", "torch", "numba"]
SENTINEL = -7


def run(case, num_candidates, impl, noise=None, **changes):
    """Return the log-probabilities and the ids; `noise` None: logits are scores."""
    arguments = {
        "logits": case.logits, "width": case.width, "first": case.first,
        "log_probs": torch.full((case.num_rows + 2, num_candidates), float(SENTINEL), device=case.device),
        "ids": torch.full((case.num_rows + 2, num_candidates), SENTINEL, device=case.device),
        "scratch": case.scratch(num_candidates),
    }  # fmt: skip
    if noise is not None:
        arguments |= {"temperature": case.temperature, "seeds": case.seeds, "pos": case.pos, "noise": noise}
    arguments |= changes
    candidates(**arguments, impl=impl)
    return arguments["log_probs"], arguments["ids"]


def check(case, left, scores, impl, with_log_probs=True):
    """Assert that candidates are the best of these scores in order, and that nothing else is written."""
    log_probs, ids = (tensor.cpu() for tensor in left)
    assert (log_probs[case.num_rows :] == SENTINEL).all() and (ids[case.num_rows :] == SENTINEL).all()
    log_probs, ids = log_probs[: case.num_rows], ids[: case.num_rows]
    # Stable: of equal scores the lower token first.
    ordered = scores.sort(dim=1, descending=True, stable=True)
    expected, best = ordered.values[:, : ids.shape[1]], ordered.indices[:, : ids.shape[1]]
    assert torch.equal(scores.gather(1, ids), expected)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert torch.equal(ids if impl != "torch" else ids[:, :1], best if impl != "torch" else best[:, :1])
    if with_log_probs:
        torch.testing.assert_close(log_probs, expected - scores.logsumexp(1, keepdim=True), atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(log_probs, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_the_order_of_whole_rows(device, impl, vocab_size):
    """Catches: a tail that is not masked, a token lost between two blocks, the higher of two that tie put first."""
    case = SamplingCase(2, vocab_size, device, torch.bfloat16)
    check(case, run(case, min(10, vocab_size), impl), case.logits.float().cpu(), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_candidates", [1, 2, 8, 64])
def test_numbers_of_candidates(device, impl, num_candidates):
    """Catches: ranks past those asked for, or the best of a block when more than a block's share are in one."""
    case = SamplingCase(1, BLOCK + 70, device, seed=num_candidates, step=1e4)
    case.logits[:, BLOCK:] += 100.0  # all of the best lie in the second block
    check(case, run(case, num_candidates, impl, with_log_probs=False), case.logits.cpu(), impl, False)


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_merges_of_several_turns(device, monkeypatch, num_blocks):
    """Catches: what an earlier turn has found lost by a later one."""
    import importlib

    monkeypatch.setattr(importlib.import_module("vidspec_kernels.sampling.candidates"), "_LOG_MERGE", 3)
    case = SamplingCase(1, num_blocks * BLOCK - 3, device, seed=2)
    check(case, run(case, 7, "triton"), case.logits.float().cpu(), "triton")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("width", "first"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("apply_temperature", [True, False])
def test_noise(device, impl, width, first, apply_temperature):
    """Catches: another request's temperature or seed, another row's position, noise at temperature 0, a temperature
    that is applied twice or not at all, logits that are overwritten."""
    case, noise = SamplingCase(5, 300, device, width=width, first=first), toy(salt=5)
    kept = case.logits.clone()
    left = run(case, 4, impl, noise, apply_temperature=apply_temperature)
    check(case, left, case.scores(noise, apply_temperature).float(), impl)
    assert torch.equal(case.logits, kept)


@pytest.mark.parametrize("impl", IMPLS)
def test_signs_and_infinities(device, impl):
    """Catches: numbers below 0 in the wrong order, -0 below +0, -inf before what lies behind the vocabulary."""
    inf = float("inf")
    case = SamplingCase(1, 9, device)
    case.logits[0] = torch.tensor([-1.5, -0.0, 0.0, -inf, 1e-40, -1e-40, -2.0, 3e38, -3e38], device=device)
    log_probs, ids = run(case, 9, impl, with_log_probs=False)
    assert ids[0, :2].tolist() == [7, 4] and sorted(ids[0].tolist()) == list(range(9))
    assert ids[0, -6:].tolist()[1:] == [5, 0, 6, 8, 3] and sorted(ids[0, 2:4].tolist()) == [1, 2]
    assert impl == "torch" or ids[0, 2:4].tolist() == [1, 2]
    assert log_probs[0, 0] == torch.tensor(3e38) and log_probs[0, -1] == -inf
    case.logits[0, 5] = inf
    log_probs, ids = run(case, 3, impl)
    assert ids[0, 0] == 5 and torch.isnan(log_probs[0, 0]) and (log_probs[0, 1:] == -inf).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_that_are_no_numbers(device, impl):
    """Catches: a token behind the vocabulary, or twice in a row."""
    case = SamplingCase(3, BLOCK + 6, device)
    case.logits[0], case.logits[1], case.logits[2, 7] = float("nan"), -float("inf"), float("nan")
    _, ids = run(case, 5, impl, toy())
    assert (ids[:3] >= 0).all() and (ids[:3] < BLOCK + 6).all()
    assert all(len(set(row)) == 5 for row in ids[:3].tolist())
    assert ids[2, 0] == 7


def test_dispatch(device, branches):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("candidates")
    impls = ("auto", "triton", "numba", "torch")
    for impl in impls:
        run(SamplingCase(1, 3, device), 2, impl)
    assert ran == [branch(impl, device) for impl in impls]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits", lambda t: t.double()),
        ("logits", lambda t: t.T.contiguous().T),
        ("log_probs", lambda t: t.double()),
        ("log_probs", lambda t: t[:2]),
        ("log_probs", lambda t: t[:, :2]),
        ("ids", lambda t: t.int()),
        ("ids", lambda t: t.T.contiguous().T),
        ("temperature", lambda t: t[:1]),
        ("temperature", lambda t: None),
        ("seeds", lambda t: t.int()),
        ("pos", lambda t: t[:2]),
        ("scratch", lambda scratch: SamplingCase(3, 9, scratch.device).scratch(2)),
        ("scratch", lambda scratch: SamplingCase(1, 9, scratch.device).scratch(4)),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    case = SamplingCase(3, 9, device, width=2)
    given = {
        "logits": case.logits, "temperature": case.temperature, "seeds": case.seeds, "pos": case.pos,
        "log_probs": torch.zeros(3, 4, device=device), "ids": torch.zeros(3, 4, dtype=torch.int64, device=device),
        "scratch": case.scratch(4),
    }  # fmt: skip
    with pytest.raises(AssertionError, match=name):
        run(case, 4, "auto", toy(), **{name: change(given[name])})


def test_wrapper_refuses_numbers_of_candidates(device):
    """Catches: more candidates than tokens."""
    with pytest.raises(AssertionError, match="ids: 4 of 3"):
        run(SamplingCase(3, 3, device), 4, "auto")
