"""Unseeded sampling: the tokens that a verify step emits follow the target's own distribution."""

import contextlib

import numpy as np
import pytest
import torch
from scipy import stats

from tests.engine import harness
from tests.engine.harness import QWEN, in_place_of
from vllm_vidspec.engine.verify.verifier import CoupledVerifier

pytestmark = pytest.mark.engine

NUM_TOKENS = 2_500
NUM_BINS = 50


@contextlib.contextmanager
def quantiles():
    """Yield a list that gains, per emitted token, a number in [0, 1): independent and uniform iff sampling is exact.

    Randomised probability integral transform: with F the target's distribution function at the token's position, over
    token ids, U = F(token - 1) + V p(token), V uniform. By Rosenblatt's theorem the numbers are independent across
    positions although the tokens are not, so a chi-squared test applies. F is the softmax (T = 1) of the target's
    logits, in float64; the emitted tokens are what the verifier hands to vLLM.
    """
    values: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:

        @in_place_of(patch, CoupledVerifier, "_verify")
        def recording(verify, self, logits, *args):
            raw = logits.double()
            processed, sampled, num_sampled = verify(self, logits, *args)
            cu_num_logits = args[3]
            emitted = torch.arange(sampled.shape[1]) < num_sampled[:, None]  # [num_reqs, K + 1]
            rows = (cu_num_logits[:-1, None] + torch.arange(sampled.shape[1]))[emitted]
            tokens = sampled[emitted][:, None]
            probabilities = raw[rows].softmax(-1)
            upper = probabilities.cumsum(-1).gather(1, tokens)
            mass = probabilities.gather(1, tokens)
            uniform = torch.rand(mass.shape, generator=generator, dtype=torch.float64)
            values.append((upper - mass * uniform).flatten())
            return processed, sampled, num_sampled

        yield values


def test_unseeded_output_follows_the_target(monkeypatch):
    """Chi-squared over 2,500 tokens at T = 1, drafted without sight of the video: many drafts to reject.

    Catches, and is seen to: a scorer that lets a rejected draft stand one time in four; one time in eight would be seen
    in 99 of 100 runs (noncentrality 80; the planted scorer's, 735 over 5,120 tokens, grows with tokens and share²).
    """
    sampling = {"temperature": 1.0, "n": 16, "max_tokens": 80, "ignore_eos": True, "seed": None}
    spec = {"prune_ratio": 1.0, "num_speculative_tokens": 4}
    with harness.engine(QWEN, "draft", overrides={"max_num_seqs": 32}, **spec) as engine:

        def p_value() -> tuple[float, dict]:
            with quantiles() as values:
                _, counted = engine.measured(harness.videos(QWEN, 2, **sampling))
            numbers = torch.cat(values).numpy()
            assert len(numbers) >= NUM_TOKENS
            observed = np.histogram(numbers, bins=NUM_BINS, range=(0, 1))[0]
            return stats.chisquare(observed).pvalue, counted

        exact, counted = p_value()
        assert counted["accepted_tokens"] > 0.2 * counted["draft_tokens"]
        assert exact > 1e-3

        score = engine.verifier._score
        coin = torch.Generator().manual_seed(1)

        def lenient(inputs):
            target, drafts = inputs.target_tokens.clone(), inputs.draft_tokens
            lucky = (torch.rand(len(drafts) - 1, generator=coin) < 0.25) & (drafts[1:] >= 0)
            lucky[inputs.cu_num_logits[1:-1].long() - 1] = False  # the next row is another request's root
            target[:-1][lucky] = drafts[1:][lucky].long()
            return score(inputs._replace(target_tokens=target))

        monkeypatch.setattr(engine.verifier, "_score", lenient)
        assert p_value()[0] < 1e-6
