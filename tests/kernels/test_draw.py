"""draw: kernel and reference against an argmax over whole rows."""

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.sampling_case import VOCAB_SIZES, SamplingCase, toy
from vidspec_kernels import draw

IMPLS = ["triton", "torch", "numba"]
SENTINEL, NUM_LEVELS = -7, 4


def run(case, impl, level=2, noise=None, **changes):
    """Return the columns of tokens and the ids that a draw leaves."""
    noise = noise or toy()
    arguments = {
        "logits": case.logits, "temperature": case.temperature, "seeds": case.seeds, "pos": case.pos, "noise": noise,
        "level": level, "scratch": case.scratch(use_fp64=noise.use_fp64),
        "out_tokens": torch.full((case.num_rows + 2, NUM_LEVELS), SENTINEL, device=case.device),
        "out_ids": torch.full((case.num_rows + 2,), SENTINEL, dtype=torch.int32, device=case.device),
    } | changes  # fmt: skip
    draw(**arguments, impl=impl)
    return arguments["out_tokens"], arguments["out_ids"]


def check(case, left, expected, level=2):
    """Assert that a draw left these tokens, in its column and for the next forward, and nothing else."""
    tokens, ids = (tensor.clone() for tensor in left)
    assert tokens[: case.num_rows, level].tolist() == ids[: case.num_rows].tolist() == expected
    tokens[: case.num_rows, level] = SENTINEL
    assert (tokens == SENTINEL).all() and (ids[case.num_rows :] == SENTINEL).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_the_argmax(device, impl, vocab_size, dtype):
    """Catches: a tail that is not masked, a block's place taken for a token, the higher of two tokens that tie, in a
    block or across two, noise at temperature 0, a temperature applied after the noise, another request's seed."""
    case = SamplingCase(5, vocab_size, device, dtype)
    check(case, run(case, impl), case.scores(toy()).argmax(1).tolist())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_batch_without_noise(device, impl, vocab_size):
    """Catches: a way of its own for greedy batches that takes the higher of two equal tokens, or does not see NaN."""
    case = SamplingCase(6, vocab_size, device, step=1)
    case.temperature[:], case.logits[0, vocab_size // 2 :] = 0.0, float("nan")
    check(case, run(case, impl), case.logits.cpu().argmax(1).tolist())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("changes", [{"salt": 1 << 30}, {"use_fp64": True}])
def test_noise_of_its_own(device, impl, changes):
    """Catches: a salt that is dropped, and partial results of another precision."""
    case, noise = SamplingCase(5, 1500, device, seed=3), toy(**changes)
    check(case, run(case, impl, noise=noise), case.scores(noise).argmax(1).tolist())
    if "salt" in changes:
        assert case.scores(noise).argmax(1).tolist() != case.scores(toy()).argmax(1).tolist()


@pytest.mark.parametrize("impl", IMPLS)
def test_processed_logits(device, impl):
    """Catches: a temperature that is applied twice."""
    case = SamplingCase(6, 1500, device, seed=1)
    expected = case.scores(toy(), apply_temperature=False).argmax(1).tolist()
    check(case, run(case, impl, apply_temperature=False), expected)
    assert expected != case.scores(toy()).argmax(1).tolist()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", [0, 3])
def test_level_on_the_device(device, impl, level):
    """Catches: a column that is read as a number of the launch where the device says it."""
    case = SamplingCase(3, 40, device)
    on_device = torch.tensor([level, 2], dtype=torch.int32, device=device)[:1]
    check(case, run(case, impl, on_device), case.scores(toy()).argmax(1).tolist(), level)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(device, impl, num_rows):
    """Catches: a launch without programs."""
    case = SamplingCase(num_rows, 30, device)
    check(case, run(case, impl), case.scores(toy()).argmax(1).tolist())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers(device, impl, poison):
    """Catches: a token behind the vocabulary, which the draft's embedding would read past its end; a number before NaN
    in one of the two, so that they draw differently."""
    case = SamplingCase(4, 1030, device)
    case.logits[0], case.logits[1], case.logits[2:, 7] = poison, poison, poison
    left = run(case, impl)
    check(case, left, left[1][:4].tolist())
    assert (left[1][:2] == 0).all() and ((left[1][2:4] == 7) == (poison != -float("inf"))).all()


def test_dispatch(device, branches):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("draw")
    impls = ("auto", "triton", "numba", "torch")
    for impl in impls:
        run(SamplingCase(2, 9, device), impl)
    assert ran == [branch(impl, device) for impl in impls]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits", lambda t: t.double()),
        ("logits", lambda t: t[0]),
        ("logits", lambda t: t.T.contiguous().T),
        ("temperature", lambda t: t.double()),
        ("temperature", lambda t: t[:2]),
        ("seeds", lambda t: t.int()),
        ("pos", lambda t: t.int()),
        ("pos", lambda t: t[:2]),
        ("out_tokens", lambda t: t.int()),
        ("out_tokens", lambda t: t[:2]),
        ("out_tokens", lambda t: t.T.contiguous().T),
        ("out_ids", lambda t: t.long()),
        ("level", lambda level: NUM_LEVELS),
        ("level", lambda level: torch.ones(1)),
        ("scratch", lambda scratch: SamplingCase(1, 9, scratch.device).scratch()),
        ("scratch", lambda scratch: SamplingCase(3, 8, scratch.device).scratch()),
        ("scratch", lambda scratch: SamplingCase(3, 9, scratch.device).scratch(use_fp64=True)),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    case = SamplingCase(3, 9, device)
    given = {
        "logits": case.logits, "temperature": case.temperature, "seeds": case.seeds, "pos": case.pos, "level": 1,
        "out_tokens": torch.zeros(3, NUM_LEVELS, dtype=torch.int64, device=device), "scratch": case.scratch(),
        "out_ids": torch.zeros(3, dtype=torch.int32, device=device),
    }  # fmt: skip
    with pytest.raises(AssertionError, match=name):
        run(case, "auto", **{name: change(given[name])})
