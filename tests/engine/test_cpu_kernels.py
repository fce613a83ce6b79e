"""The numpy twins of interpreted kernels are bit-equal to the kernels; CPU engine only."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="the twins replace interpreted kernels only")


@pytest.mark.parametrize("vocab_size", [1, 97, 1023, 1024, 1025, 2100])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_gumbel_twin_equals_the_interpreted_kernel(monkeypatch, vocab_size, is_drafting):
    """Catches: a wrong rotation, a lost seed half, a missing draft salt, float64 creeping into the logarithm."""
    import vllm.v1.worker.gpu.sample.gumbel as gumbel

    from vllm_vidspec.engine.compat import _MARK
    from vllm_vidspec.engine.cpu_kernels import GumbelSampleKernel

    kernel = getattr(gumbel._gumbel_sample_kernel, _MARK, gumbel._gumbel_sample_kernel)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(7, vocab_size, generator=generator)
    rows = torch.tensor([0, 1, 2, 3, 3, 1, 0])
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0])
    seeds = torch.tensor([5, -3, 2**40 + 7, 2**62])
    pos = torch.arange(7) * 100_003 + 3

    def run(impl):
        monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", impl)
        return gumbel.gumbel_sample(logits, rows, temperature, seeds, pos, False, is_drafting)

    twin = GumbelSampleKernel(kernel)
    assert torch.equal(run(twin), run(kernel))


def test_gumbel_noise_is_gumbel():
    """Catches: noise with the wrong distribution in both (mean and variance of a standard Gumbel, 300k draws)."""
    import numpy as np

    from vllm_vidspec.engine.cpu_kernels import gumbel_noise

    noise = gumbel_noise(np.arange(300), np.arange(300) * 7, np.arange(1000, dtype=np.uint32)).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
