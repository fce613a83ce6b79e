"""The draft's sampler by itself."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vidspec_kernels import draw
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.engine.draft import noise
from vllm_vidspec.engine.draft.noise import CoupledSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB_SIZE = 1030  # one block of the kernel, and a few tokens of the next


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_logits_that_are_no_numbers(poison, temperature):
    """Catches: a token behind the vocabulary, which the draft's embedding would read past its end on a device."""
    sampler = make_sampler()
    vectors = (torch.full((1,), temperature), torch.tensor([7]), torch.tensor([9]))
    sampler.reserve(1, VOCAB_SIZE, torch.device("cpu"))
    for logits in (torch.full((1, VOCAB_SIZE), poison), torch.randn(1, VOCAB_SIZE).index_fill_(1, vectors[1], poison)):
        tokens, ids = torch.full((1, 3), -1), torch.full((1,), -1, dtype=torch.int32)
        sampler.draw_into(logits, *vectors, level=1, out_tokens=tokens, out_ids=ids)
        assert 0 <= tokens[0, 1] == ids[0] < VOCAB_SIZE and tokens[0, [0, 2]].tolist() == [-1, -1]


def test_what_processors_are_told_of_drafts():
    """Catches: counts of drafts under construction, which no table has; a row beyond the block; a length too short."""
    sampler, told = make_sampler(temperature=[1.0]), []
    sampler._sampler.apply_sampling_params = lambda logits, *rest: told.append(rest) or logits
    sampler.reserve(4, VOCAB_SIZE, torch.device("cpu"))
    rows = torch.tensor([5, 3, 6])
    sampler.process(torch.zeros(3, VOCAB_SIZE), rows, rows.numpy(), rows + 7, rows + 1)
    expanded, mapping, mapping_np, pos, input_ids, places, max_lens = told[0]
    assert expanded is rows and mapping is rows and mapping_np.tolist() == [5, 3, 6] and pos.tolist() == [12, 10, 13]
    assert input_ids.dtype == torch.int32 and input_ids.tolist() == [6, 4, 7]
    assert places.dtype == torch.int32 and places.tolist() == [0, 0, 0]
    assert max_lens.dtype == np.int32 and max_lens.tolist() == [2048] * 3


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def make_sampler(noise: str = "shared", use_fp64: bool = False, **tables) -> CoupledSampler:
    """Return the draft's sampler on eight requests; `tables` change what the first few ask for."""
    asked = {
        "temperature": np.zeros(8, dtype=np.float32), "min_p": np.zeros(8), "top_k": np.full(8, VOCAB_SIZE),
        "top_p": np.ones(8), "use_logit_bias": np.zeros(8, dtype=bool), "use_penalty": np.zeros(8, dtype=bool),
        "num_bad_words": np.zeros(8, dtype=int), "use_thinking_budget": np.zeros(8, dtype=bool),
        "repetition_penalty": np.ones(8), "frequency_penalty": np.zeros(8), "presence_penalty": np.zeros(8),
    }  # fmt: skip
    for name, values in tables.items():
        if name in asked:
            asked[name][: len(values)] = values
    if "repetition_penalty" not in tables:
        asked["repetition_penalty"][asked["use_penalty"]] = 1.2
    heat = asked["temperature"]
    # As vLLM's `add_request` has it.
    flags = (heat != 0) & ((heat != 1) | (asked["min_p"] != 0) | (asked["top_k"] != VOCAB_SIZE) | (asked["top_p"] != 1))
    for name in ("use_logit_bias", "use_penalty", "num_bad_words", "use_thinking_budget"):
        flags = flags | (asked[name] != 0)
    custom = tables.get("custom", [])
    states = {name: SimpleNamespace(np=asked[name]) for name in ("temperature", "min_p", "top_k", "top_p")}
    return CoupledSampler(
        SimpleNamespace(
            sampling_states=SimpleNamespace(**states, vocab_size=VOCAB_SIZE),
            needs_logits_processing=flags | bool(custom),
            use_fp64_gumbel=use_fp64,
            req_states=SimpleNamespace(max_model_len=2048),
            logits_processors=[
                SimpleNamespace(use_logit_bias=asked["use_logit_bias"]),
                SimpleNamespace(
                    use_penalty=asked["use_penalty"],
                    **{name: SimpleNamespace(np=asked[name]) for name in PENALTIES},
                ),
                SimpleNamespace(num_bad_words=SimpleNamespace(np=asked["num_bad_words"])),
                *custom,
            ],
            thinking_budget_state=SimpleNamespace(
                enabled=tables.get("enabled", True), use_thinking_budget=asked["use_thinking_budget"]
            ),
        ),
        noise,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9), ("top_k", 19), ("min_p", 0.1), ("use_logit_bias", True), ("use_penalty", True),
        ("num_bad_words", 2), ("use_thinking_budget", True),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_fused(name, value, temperature):
    """Catches: a parameter that a fused step would leave out, a step that is split for a temperature alone, or for a
    request that is not in it."""
    sampler = make_sampler(temperature=[0.7, temperature, 1.0], **{name: [0 if name != "top_p" else 1, value]})
    if name == "top_k":
        sampler._sampler.sampling_states.top_k.np[0] = VOCAB_SIZE
    is_ignored = temperature == 0.0 and name in ("top_p", "top_k", "min_p")  # by vLLM, of a greedy request
    assert sampler.needs_processors(np.array([2, 1, 0])) == (not is_ignored)
    assert not sampler.needs_processors(np.array([0, 2, 3]))
    sampler._noise = "greedy"
    assert not sampler.needs_processors(np.array([1]))


@pytest.mark.parametrize(
    ("tables", "is_mild"),
    [
        ({"use_penalty": [True], "repetition_penalty": [1.05]}, True),
        ({"use_penalty": [True], "repetition_penalty": [1 / 1.05], "temperature": [0.01]}, True),
        ({"use_penalty": [True], "repetition_penalty": [1.06]}, False),
        ({"use_penalty": [True], "repetition_penalty": [0.9]}, False),
        ({"use_penalty": [True], "repetition_penalty": [1.05], "temperature": [0.7]}, False),
        ({"use_penalty": [True], "repetition_penalty": [1.0], "presence_penalty": [0.1]}, False),
        ({"use_penalty": [True], "repetition_penalty": [1.0], "frequency_penalty": [-0.1]}, False),
        ({"temperature": [1.0], "top_k": [20]}, True),
        ({"temperature": [1.0], "top_p": [0.95]}, True),
        ({"temperature": [1.0], "top_p": [0.94]}, False),
        ({"temperature": [1.0], "top_k": [1], "top_p": [0.001], "min_p": [0.1]}, True),
        ({"temperature": [1.0], "top_k": [1], "use_penalty": [True], "repetition_penalty": [1.05]}, True),
        ({"temperature": [1.0], "top_k": [1], "use_penalty": [True], "repetition_penalty": [1.2]}, False),
    ],
)
def test_mild_parameters_do_not_split_a_step(tables, is_mild):
    """Catches: Qwen2.5-VL's own defaults that cost a fused step, a strong penalty that drafts do not follow."""
    assert make_sampler(**tables).needs_processors(np.array([0])) == (not is_mild)


def test_processors_of_the_users_may_want_any_request():
    """Catches: a custom logits processor that is left out; a thinking budget where there is no such state."""
    assert make_sampler(temperature=[0.7], custom=[object()]).needs_processors(np.array([0]))
    thinking = make_sampler(temperature=[0.7], use_thinking_budget=[False, True], enabled=False)
    assert not thinking.needs_processors(np.array([0]))


def test_a_row_that_keeps_one_token_is_greedy():
    """Catches: noise that moves a draft off the best token, which the target draws whatever its noise; a temperature of
    an earlier request; an upload a step; the target's own table changed."""
    sampler = make_sampler(temperature=[0.7, 0.9, 1.0])
    states = sampler._sampler.sampling_states
    states.temperature.gpu = torch.from_numpy(states.temperature.np.copy())
    assert sampler.temperature is states.temperature.gpu
    states.top_k.np[1] = 1
    found = sampler.temperature
    torch.testing.assert_close(found, torch.tensor([0.7, 0.0, 1.0, *[0.0] * 5]))
    assert sampler.temperature is found and states.temperature.gpu[1] == 0.9
    states.temperature.np[2] = 0.5
    assert sampler.temperature[2] == 0.5
    states.top_k.np[1] = 50
    assert sampler.temperature is states.temperature.gpu


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.05, "temperature": 0.000001}, False),  # Qwen2.5-VL
        ({"top_k": 1, "top_p": 0.001, "temperature": 0.01}, False),  # Qwen2-VL
        ({"top_k": 20, "top_p": 0.8, "temperature": 0.7}, True),  # Qwen3-VL
        ({"top_k": -1, "temperature": 1.0, "max_tokens": 5}, False),
        ({"top_p": 0.8, "temperature": 0.0}, False),
        ({"repetition_penalty": 1.2}, True),
    ],
)
def test_what_a_model_asks_for_by_default(defaults, expected):
    """Catches: the graphs of most steps captured for few sizes."""
    config = SimpleNamespace(get_diff_sampling_param=lambda: defaults)
    assert make_sampler().processes_by_default(config) == expected
    assert not make_sampler("greedy").processes_by_default(config)


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
    """Catches: a bit of the noise, of the temperature or of their order that differs from the target's sampler; also
    between the kernel and its reference. Scores in steps, so that many tie."""
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
    sampler.reserve(6, vocab_size, DEVICE, min(4, vocab_size))
    for impl in ("triton", "torch"):
        tokens, ids = (torch.zeros(*size, dtype=torch.int32, device=DEVICE) for size in ((6, 2), (6,)))
        tokens = tokens.long()
        monkeypatch.setattr(noise, "draw", functools.partial(draw, impl=impl))
        sampler.draw_into(
            logits, temperature, seeds, pos, level=1, out_tokens=tokens, out_ids=ids, is_processed=not apply_temperature
        )
        assert torch.equal(tokens[:, 1], expected) and torch.equal(ids.long(), expected), impl
