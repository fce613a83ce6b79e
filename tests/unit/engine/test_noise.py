"""The draft's sampler by itself."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_vidspec.engine.cpu.kernels import GumbelTwin
from vllm_vidspec.engine.draft import noise
from vllm_vidspec.engine.draft.noise import CoupledSampler

VOCAB_SIZE = 1030  # one block of the kernel, and a few tokens of the next


def make_sampler(temperature: float) -> CoupledSampler:
    """Return the draft's sampler on one request that asks for nothing but a temperature."""
    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.tensor([temperature]), np=np.array([temperature])),
        seeds=SimpleNamespace(gpu=torch.tensor([5])),
    )
    target = SimpleNamespace(
        sampling_states=states,
        needs_logits_processing=np.array([False]),
        use_fp64_gumbel=False,
        req_states=SimpleNamespace(max_model_len=2048),
        apply_sampling_params=lambda logits, *rest: logits.clone(),
    )
    return CoupledSampler(target, "shared")


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_logits_that_are_no_numbers(monkeypatch, poison, temperature):
    """Catches: a token behind the vocabulary, which the draft's embedding would read past its end on a device.

    A device's reduction over NaN may end in the padding of its last block, so one that does stands in for it.
    """
    if not torch.cuda.is_available():  # as on the CPU engine; the interpreter itself gives up at NaN
        monkeypatch.setattr(noise.gumbel, "_gumbel_sample_kernel", GumbelTwin(None))
    rows, pos = torch.tensor([0]), torch.tensor([9])
    for logits in (torch.full((1, VOCAB_SIZE), poison), torch.randn(1, VOCAB_SIZE).index_fill_(1, rows + 3, poison)):
        draw = lambda logits=logits: make_sampler(temperature)(logits, rows, np.array([0]), pos, rows)  # noqa: E731
        assert 0 <= draw().item() < VOCAB_SIZE
        if temperature:
            with monkeypatch.context() as patch:
                patch.setattr(noise.gumbel, "gumbel_sample", lambda *args, **kwargs: torch.tensor([2 * 1024 - 1]))
                assert 0 <= draw().item() < VOCAB_SIZE
