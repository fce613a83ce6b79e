"""The draft's sampler by itself: what it leaves to vLLM's processors, and that its draws are vLLM's."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, vllm_sampler
from vidspec_kernels import draw
from vllm_vidspec.devices import has_gpu
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.engine.draft import noise
from vllm_vidspec.engine.draft.noise import CoupledSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB_SIZE = 1030  # one block of the kernel, and a few tokens of the next
on_the_host = pytest.mark.skipif(has_gpu(), reason="vLLM's sampler on the CPU engine's kernels")


def make_sampler(noise: str = "shared", use_fp64: bool = False) -> CoupledSampler:
    return CoupledSampler(SimpleNamespace(use_fp64_gumbel=use_fp64), noise)


def asked_of(*asked: dict) -> CoupledSampler:
    """Return a sampler beside vLLM's own, with requests that ask for this."""
    return CoupledSampler(vllm_sampler(dict(enumerate(asked)), VOCAB_SIZE), "shared")


@on_the_host
def test_what_processors_are_told_of_drafts():
    """Catches: counts of drafts under construction, which no table has; a row beyond the block; a length too short."""
    sampler, told = asked_of({}), []
    sampler._sampler.apply_sampling_params = lambda logits, *rest: told.append(rest) or logits
    sampler.reserve(4, VOCAB_SIZE, CPU)
    rows = torch.tensor([5, 3, 6])
    sampler.process(torch.zeros(3, VOCAB_SIZE), rows, rows.numpy(), rows + 7, rows + 1)
    expanded, mapping, mapping_np, pos, input_ids, places, max_lens = told[0]
    assert expanded is rows and mapping is rows and mapping_np.tolist() == [5, 3, 6] and pos.tolist() == [12, 10, 13]
    assert input_ids.dtype == torch.int32 and input_ids.tolist() == [6, 4, 7]
    assert places.dtype == torch.int32 and places.tolist() == [0, 0, 0]
    assert max_lens.dtype == np.int32 and max_lens.tolist() == [64] * 3


COLD = {"temperature": 0.0}
# What a request asks for, and whether drafts that ignore it stand less often.
ASKED = [
    ({}, False),
    ({"repetition_penalty": 1.05, "temperature": 0.000001}, False),  # Qwen2.5-VL
    ({"top_k": 1, "top_p": 0.001, "temperature": 0.01}, False),  # Qwen2-VL
    ({"top_k": 20, "top_p": 0.8, "temperature": 0.7}, True),  # Qwen3-VL
    ({"repetition_penalty": 1.05} | COLD, False),
    ({"repetition_penalty": 1 / 1.05, "temperature": 0.01}, False),
    ({"repetition_penalty": 1.06} | COLD, True),
    ({"repetition_penalty": 0.9} | COLD, True),
    ({"repetition_penalty": 1.05, "temperature": 0.7}, True),
    ({"presence_penalty": 0.1} | COLD, True),
    ({"frequency_penalty": -0.1} | COLD, True),
    ({"top_k": 20}, False),
    ({"top_k": 19}, True),
    ({"top_k": 19} | COLD, False),  # by vLLM, of a greedy request
    ({"top_p": 0.95}, False),
    ({"top_p": 0.94}, True),
    ({"min_p": 0.1, "temperature": 0.7}, True),
    ({"top_k": 1, "top_p": 0.001, "min_p": 0.1}, False),
    ({"top_k": 1, "repetition_penalty": 1.05}, False),
    ({"top_k": 1, "repetition_penalty": 1.2}, True),
]


@on_the_host
@pytest.mark.parametrize(
    ("asked", "expected"), [*ASKED, ({"logit_bias": {3: 1.0}}, True), ({"bad_words": [[3]]}, True)]
)
def test_steps_that_cannot_be_fused(asked, expected):
    """Catches: a parameter that a fused step leaves out; a step split for no reason, or by Qwen2.5-VL's defaults."""
    sampler = asked_of({"temperature": 0.7}, asked, {"temperature": 1.0})
    assert sampler.needs_processors(np.array([2, 1, 0])) == expected
    assert not sampler.needs_processors(np.array([0, 2, 3]))
    sampler._noise = "greedy"
    assert not sampler.needs_processors(np.array([1]))


@pytest.mark.parametrize(("defaults", "expected"), ASKED)
def test_what_a_model_asks_for_by_default(defaults, expected):
    """Catches: the graphs of most steps captured for few sizes."""
    config = SimpleNamespace(get_diff_sampling_param=lambda: defaults)
    assert make_sampler().processes_by_default(config) == expected
    assert not make_sampler("greedy").processes_by_default(config)


@on_the_host
def test_processors_of_the_users_may_want_any_request():
    """Catches: a custom logits processor that is left out; a thinking budget that is, or where there is none."""
    sampler, rows = asked_of({"temperature": 0.7}), np.array([0])
    budget = SimpleNamespace(enabled=False, use_thinking_budget=np.ones(8, dtype=bool))
    sampler._sampler.thinking_budget_state = budget
    assert not sampler.needs_processors(rows)
    budget.enabled = True
    assert sampler.needs_processors(rows)
    budget.enabled, sampler._sampler.logits_processors = False, [*sampler._sampler.logits_processors, object()]
    assert sampler.needs_processors(rows)


@on_the_host
def test_a_row_that_keeps_one_token_is_greedy():
    """Catches: noise that moves a draft off the best token, an earlier temperature, the target's table changed."""
    sampler = asked_of(*({"temperature": heat} for heat in (0.7, 0.9, 1.0)))
    states = sampler._sampler.sampling_states
    assert sampler.temperature is states.temperature.gpu
    states.top_k.np[1] = 1
    found = sampler.temperature
    torch.testing.assert_close(found[:3], torch.tensor([0.7, 0.0, 1.0]))
    assert sampler.temperature is found and states.temperature.gpu[1] == np.float32(0.9)
    states.temperature.np[2] = 0.5
    assert sampler.temperature[2] == 0.5
    states.top_k.np[1] = 50
    assert sampler.temperature is states.temperature.gpu


@pytest.mark.parametrize(
    ("vocab_size", "noise_name", "apply_temperature", "use_fp64", "dtype"),
    [
        (1, "shared", True, False, torch.float32),
        (1023, "shared", True, False, torch.bfloat16),
        (1300, "shared", True, False, torch.float32),
        (1300, "independent", True, False, torch.float32),
        (1300, "shared", False, False, torch.float32),
        (1300, "independent", True, True, torch.bfloat16),
    ],
)
def test_draws_are_vllms(monkeypatch, vocab_size, noise_name, apply_temperature, use_fp64, dtype):
    """Catches: a bit of noise, temperature or their order other than the target's, in kernel or reference; many tie."""
    kernel = noise.gumbel._gumbel_sample_kernel  # where the CPU engine may have put a twin
    monkeypatch.setattr(noise.gumbel, "_gumbel_sample_kernel", getattr(kernel, MARK, kernel))
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (20 * torch.randn(6, vocab_size, generator=generator)).round().div(8).to(DEVICE, dtype)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 0.1], device=DEVICE)
    seeds = torch.tensor([5, -3, 2**40 + 7, 2**62, 1, -(2**50)], device=DEVICE)
    rows, pos = torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE) * 100_003 + 3
    expected = noise.gumbel.gumbel_sample(
        logits, rows, temperature, seeds, pos, apply_temperature, noise_name == "independent", use_fp64=use_fp64
    )
    sampler = make_sampler(noise_name, use_fp64)
    sampler._scratch = noise.SampleScratch(6, vocab_size, DEVICE, min(4, vocab_size), use_fp64)
    for impl in ("triton", "numba"):
        tokens, ids = torch.zeros(6, 2, device=DEVICE).long(), torch.zeros(6, device=DEVICE).int()
        monkeypatch.setattr(noise, "draw", functools.partial(draw, impl=impl))
        sampler.draw_into(
            logits, temperature, seeds, pos, level=1, out_tokens=tokens, out_ids=ids, is_processed=not apply_temperature
        )
        assert torch.equal(tokens[:, 1], expected) and torch.equal(ids.long(), expected), impl
