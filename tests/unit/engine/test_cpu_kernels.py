"""The numpy twins of interpreted kernels are bit-equal to the kernels; CPU engine only."""

import pytest
import torch

from vllm_vidspec.devices import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the twins replace interpreted kernels only")


@pytest.mark.parametrize("vocab_size", [1, 97, 1023, 1024, 1025, 2100])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_gumbel_twin_equals_the_interpreted_kernel(monkeypatch, vocab_size, is_drafting):
    """Catches: a wrong rotation, a lost seed half, a missing draft salt, float64 creeping into the logarithm."""
    import vllm.v1.worker.gpu.sample.gumbel as gumbel

    from vllm_vidspec.engine.compat.contract import MARK
    from vllm_vidspec.engine.cpu.kernels import GumbelSampleKernel

    kernel = getattr(gumbel._gumbel_sample_kernel, MARK, gumbel._gumbel_sample_kernel)
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

    from vllm_vidspec.engine.cpu.kernels import gumbel_noise

    noise = gumbel_noise(np.arange(300), np.arange(300) * 7, np.arange(1000, dtype=np.uint32)).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


@pytest.fixture
def rows():
    """Logits rows of four requests: chains of 3, 1, 4 and 2 rows."""
    req_idx = torch.tensor([0] * 3 + [1] + [2] * 4 + [3] * 2)
    local_pos = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 0, 1], dtype=torch.int32)
    return req_idx, local_pos


@pytest.mark.parametrize("vocab_size", [31, 32, 97, 126])
def test_penalties_twin_equals_the_interpreted_kernel(monkeypatch, rows, vocab_size):
    """Catches: drafts counted from the root on, float64 products, a prompt bit read from the wrong word."""
    import vllm.v1.worker.gpu.sample.penalties as penalties

    from vllm_vidspec.engine.compat.contract import MARK
    from vllm_vidspec.engine.cpu.kernels import PenaltiesKernel

    kernel = getattr(penalties._penalties_kernel, MARK, penalties._penalties_kernel)
    generator = torch.Generator().manual_seed(vocab_size)

    def ints(high, *shape):
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    req_idx, local_pos = rows
    logits = 3 * torch.randn(len(req_idx), vocab_size, generator=generator)
    arguments = (
        req_idx,
        ints(vocab_size, len(req_idx)),
        local_pos,
        torch.tensor([1.0, 1.3, 0.8, 1.1]),
        torch.tensor([0.0, 0.4, -0.3, 0.0]),
        torch.tensor([0.0, 0.0, 0.6, 0.1]),
        ints(2**31 - 1, 4, -(-vocab_size // 32)) - ints(2**31 - 1, 4, -(-vocab_size // 32)),
        ints(3, 4, vocab_size),
    )

    def run(impl):
        monkeypatch.setattr(penalties, "_penalties_kernel", impl)
        changed = logits.clone()
        penalties.apply_penalties(changed, *arguments)
        return changed

    twin = run(PenaltiesKernel())
    assert torch.equal(twin, run(kernel))
    assert torch.equal(twin[:3], logits[:3]) and not torch.equal(twin[3:], logits[3:])


def test_bad_words_twin_equals_the_interpreted_kernel(monkeypatch, rows):
    """Words of one to three tokens, whose beginnings stand in the committed text, in the drafts, or across both.

    Catches: a prefix looked up one token early, a word of another request, a committed token read past the output.
    """
    import vllm.v1.worker.gpu.sample.bad_words as bad_words

    from vllm_vidspec.engine.compat.contract import MARK
    from vllm_vidspec.engine.cpu.kernels import BadWordsKernel

    kernel = getattr(bad_words._bad_words_kernel, MARK, bad_words._bad_words_kernel)
    generator = torch.Generator().manual_seed(0)

    def ints(high, *shape):
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    req_idx, local_pos = rows
    offsets = torch.tensor([[0, 1, 3, 6, 8], [0, 2, 2, 2, 2], [0, 2, 5, 6, 8], [0, 0, 0, 0, 0]], dtype=torch.int32)
    logits = torch.randn(len(req_idx), 9, generator=generator)
    banned = 0
    for _ in range(20):
        arguments = (
            req_idx,
            ints(2, 4, 8),  # few token ids, so that beginnings match
            offsets,
            torch.tensor([4, 1, 4, 0], dtype=torch.int32),
            ints(2, 4, 12),
            torch.tensor([3, 5, 4, 2], dtype=torch.int32),
            torch.tensor([7, 5, 6, 9], dtype=torch.int32),
            ints(2, len(req_idx)),
            local_pos,
            4,
        )

        def run(impl, arguments=arguments):
            monkeypatch.setattr(bad_words, "_bad_words_kernel", impl)
            changed = logits.clone()
            bad_words.apply_bad_words(changed, *arguments)
            return changed

        twin = run(BadWordsKernel())
        assert torch.equal(twin, run(kernel))
        banned += int(torch.isinf(twin).sum())
    assert banned > 50


def random_batch(generator: torch.Generator, is_last_plain: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits rows of one to five requests on shuffled persistent rows, each with none to four drafts.

    With `is_last_plain` nothing was drafted for the last request: its only row is the last of the batch.
    """
    num_reqs = int(torch.randint(1, 6, (), generator=generator))
    counts = torch.randint(1, 6, (num_reqs,), generator=generator)
    if is_last_plain:
        counts[-1] = 1
    req_idx = torch.randperm(6, generator=generator)[:num_reqs].repeat_interleave(counts)
    local_pos = torch.cat([torch.arange(int(count), dtype=torch.int32) for count in counts])
    return req_idx, local_pos


@pytest.mark.parametrize("is_last_plain", [True, False], ids=["last-row-undrafted", "any-batch"])
def test_bad_words_twin_at_the_edges_of_a_batch(monkeypatch, is_last_plain):
    """Any batch and any words: none to five of one to four tokens, outputs of none to six tokens, shorter than some.

    Catches: a look-up past the last row, or past the committed text, of a place that the other text holds.
    """
    import vllm.v1.worker.gpu.sample.bad_words as bad_words

    from vllm_vidspec.engine.compat.contract import MARK
    from vllm_vidspec.engine.cpu.kernels import BadWordsKernel

    kernel = getattr(bad_words._bad_words_kernel, MARK, bad_words._bad_words_kernel)
    generator = torch.Generator().manual_seed(int(is_last_plain))

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    banned = 0
    for _ in range(60):
        req_idx, local_pos = random_batch(generator, is_last_plain)
        lengths, num_words = ints(1, 5, 6, 5), ints(0, 6, 6)
        offsets = torch.cat((torch.zeros(6, 1, dtype=torch.int32), lengths.cumsum(1).int()), 1)
        prompt_len, num_output = ints(1, 4, 6), ints(0, 7, 6)
        total_len = prompt_len + num_output
        # As wide as the longest text: one token further is outside.
        texts = ints(0, 2, 6, int(total_len.max()))
        arguments = (
            req_idx, ints(0, 2, 6, 20), offsets, num_words, texts, prompt_len, total_len,
            ints(0, 2, len(req_idx)), local_pos, int(num_words[req_idx].max()),
        )  # fmt: skip
        logits = torch.randn(len(req_idx), 3, generator=generator)

        def run(impl, logits=logits, arguments=arguments):
            monkeypatch.setattr(bad_words, "_bad_words_kernel", impl)
            changed = logits.clone()
            bad_words.apply_bad_words(changed, *arguments)
            return changed

        twin = run(BadWordsKernel())
        assert torch.equal(twin, run(kernel))
        banned += int(torch.isinf(twin).sum())
    assert banned > 60


@pytest.mark.parametrize("is_last_plain", [True, False], ids=["last-row-undrafted", "any-batch"])
def test_penalties_twin_at_the_edges_of_a_batch(monkeypatch, is_last_plain):
    """Any batch, a vocabulary of one and of two blocks, drafts outside the vocabulary, logits of -inf.

    Catches: a draft counted for its neighbour, a token past the vocabulary that wraps around, NaN from a masked logit.
    """
    import vllm.v1.worker.gpu.sample.penalties as penalties

    from vllm_vidspec.engine.compat.contract import MARK
    from vllm_vidspec.engine.cpu.kernels import PenaltiesKernel

    kernel = getattr(penalties._penalties_kernel, MARK, penalties._penalties_kernel)
    generator = torch.Generator().manual_seed(int(is_last_plain))

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def choose(*values):
        return torch.tensor(values)[torch.randint(len(values), (6,), generator=generator)]

    changed_rows = 0
    for vocab_size in [5, 31, 64, 97] * 6 + [8191, 8193]:
        req_idx, local_pos = random_batch(generator, is_last_plain)
        logits = 3 * torch.randn(len(req_idx), vocab_size, generator=generator)
        logits[:, 0] = -torch.inf
        arguments = (
            req_idx, ints(-1, vocab_size + 2, len(req_idx)), local_pos, choose(1.0, 1.0, 1.3, 0.8),
            choose(0.0, 0.0, 0.4, -0.3), choose(0.0, 0.0, 0.6), ints(-(2**31), 2**31 - 1, 6, -(-vocab_size // 32)),
            ints(0, 3, 6, vocab_size),
        )  # fmt: skip

        def run(impl, logits=logits, arguments=arguments):
            monkeypatch.setattr(penalties, "_penalties_kernel", impl)
            changed = logits.clone()
            penalties.apply_penalties(changed, *arguments)
            return changed

        twin = run(PenaltiesKernel())
        assert torch.equal(twin, run(kernel))
        changed_rows += int((twin != logits).any(1).sum())
    assert changed_rows > 20
