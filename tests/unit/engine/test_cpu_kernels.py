"""The numpy twins of interpreted kernels are bit-equal to the kernels; CPU engine only."""

import numpy as np
import pytest
import torch

from vllm_vidspec.devices import has_gpu

pytest.importorskip("vllm")
import vllm.v1.worker.gpu.sample.bad_words as bad_words
import vllm.v1.worker.gpu.sample.gumbel as gumbel
import vllm.v1.worker.gpu.sample.penalties as penalties

from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.engine.cpu import kernels

pytestmark = pytest.mark.skipif(has_gpu(), reason="the twins replace interpreted kernels only")


class Draws:
    """Random tensors."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def choose(self, *values: float) -> torch.Tensor:
        """Return one of the values for each of six persistent rows."""
        return torch.tensor(values)[self.ints(0, len(values), 6).long()]


def agreed(monkeypatch, module, logits: torch.Tensor, *arguments) -> torch.Tensor:
    """Return the logits that a module's kernel leaves; its twin leaves the same."""
    name, left = module.__name__.rpartition(".")[2], []
    kernel = getattr(module, f"_{name}_kernel")
    kernel = getattr(kernel, MARK, kernel)
    for impl in (kernels.Twin(getattr(kernels, name), kernel), kernel):
        monkeypatch.setattr(module, f"_{name}_kernel", impl)
        left.append(logits.clone())
        getattr(module, f"apply_{name}")(left[-1], *arguments)
    assert torch.equal(*left)
    return left[0]


@pytest.mark.parametrize("vocab_size", [1, 97, 1023, 1024, 1025, 2100])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_gumbel_twin_equals_the_interpreted_kernel(monkeypatch, vocab_size, is_drafting):
    """Catches: a wrong rotation, a lost seed half, a missing draft salt, float64 creeping into the logarithm."""
    kernel = getattr(gumbel._gumbel_sample_kernel, MARK, gumbel._gumbel_sample_kernel)
    logits = 3 * Draws(vocab_size).normal(7, vocab_size)
    rows = torch.tensor([0, 1, 2, 3, 3, 1, 0])
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0])
    seeds = torch.tensor([5, -3, 2**40 + 7, 2**62])
    pos = torch.arange(7) * 100_003 + 3
    drawn = []
    for impl in (kernel, kernels.Twin(kernels.gumbel_sample, kernel)):
        monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", impl)
        drawn.append(gumbel.gumbel_sample(logits, rows, temperature, seeds, pos, False, is_drafting))
    assert torch.equal(*drawn)


def test_gumbel_noise_is_gumbel():
    """Catches: noise with the wrong distribution in both (mean and variance of a standard Gumbel, 300k draws)."""
    noise = kernels.gumbel_noise(np.arange(300), np.arange(300) * 7, np.arange(1000, dtype=np.uint32))
    assert abs(noise.mean(dtype=np.float64) - np.euler_gamma) < 0.01
    assert abs(noise.var(dtype=np.float64) - np.pi**2 / 6) < 0.02


def random_batch(draws: Draws, is_last_plain: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits rows of one to five requests on shuffled persistent rows, each with none to four drafts.

    With `is_last_plain` nothing was drafted for the last request: its only row is the last of the batch.
    """
    num_reqs = int(draws.ints(1, 6, 1))
    counts = draws.ints(1, 6, num_reqs)
    if is_last_plain:
        counts[-1] = 1
    req_idx = torch.randperm(6, generator=draws.generator)[:num_reqs].repeat_interleave(counts)
    return req_idx, torch.cat([torch.arange(int(count), dtype=torch.int32) for count in counts])


@pytest.mark.parametrize("is_last_plain", [True, False], ids=["last-row-undrafted", "any-batch"])
def test_bad_words_twin_equals_the_interpreted_kernel(monkeypatch, is_last_plain):
    """Any batch and any words: none to five of one to four tokens, outputs of none to six tokens, shorter than some.

    Their beginnings stand in the committed text, in the drafts, or across both. Catches: a look-up past the last row,
    or past the committed text, of a place that the other text holds; a prefix looked up one token early, a word of
    another request, a committed token read past the output.
    """
    draws, banned = Draws(int(is_last_plain)), 0
    for _ in range(60):
        req_idx, local_pos = random_batch(draws, is_last_plain)
        lengths, num_words = draws.ints(1, 5, 6, 5), draws.ints(0, 6, 6)
        offsets = torch.cat((torch.zeros(6, 1, dtype=torch.int32), lengths.cumsum(1).int()), 1)
        prompt_len, num_output = draws.ints(1, 4, 6), draws.ints(0, 7, 6)
        total_len = prompt_len + num_output
        # As wide as the longest text: one token further is outside.
        texts = draws.ints(0, 2, 6, int(total_len.max()))
        left = agreed(
            monkeypatch, bad_words, draws.normal(len(req_idx), 3), req_idx, draws.ints(0, 2, 6, 20), offsets, num_words,
            texts, prompt_len, total_len, draws.ints(0, 2, len(req_idx)), local_pos, int(num_words[req_idx].max()),
        )  # fmt: skip
        banned += int(torch.isinf(left).sum())
    assert banned > 60


@pytest.mark.parametrize("is_last_plain", [True, False], ids=["last-row-undrafted", "any-batch"])
def test_penalties_twin_equals_the_interpreted_kernel(monkeypatch, is_last_plain):
    """Any batch, a vocabulary of one and of two blocks, drafts outside the vocabulary, logits of -inf.

    Catches: a draft counted for its neighbour or from the root on, a token past the vocabulary that wraps around, NaN
    from a masked logit, float64 products, a prompt bit read from the wrong word, a row that asks for nothing touched.
    """
    draws, changed_rows = Draws(int(is_last_plain)), 0
    for vocab_size in [5, 31, 32, 64, 97, 126] * 6 + [8191, 8193]:
        req_idx, local_pos = random_batch(draws, is_last_plain)
        logits = 3 * draws.normal(len(req_idx), vocab_size)
        logits[:, 0] = -torch.inf
        asked = (
            draws.choose(1.0, 1.0, 1.3, 0.8, 1.1), draws.choose(0.0, 0.0, 0.4, -0.3), draws.choose(0.0, 0.0, 0.6, 0.1)
        )  # fmt: skip
        left = agreed(
            monkeypatch, penalties, logits, req_idx, draws.ints(-1, vocab_size + 2, len(req_idx)), local_pos, *asked,
            draws.ints(-(2**31), 2**31 - 1, 6, -(-vocab_size // 32)), draws.ints(0, 3, 6, vocab_size),
        )  # fmt: skip
        is_changed = (left != logits).any(1)
        is_plain = (torch.stack(asked, 1) == torch.tensor([1.0, 0.0, 0.0])).all(1)  # [6]
        assert not is_changed[is_plain[req_idx]].any()
        changed_rows += int(is_changed.sum())
    assert changed_rows > 20
