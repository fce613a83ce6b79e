"""Unseeded sampling: the tokens that are emitted follow the target's own distribution."""

import numpy as np
from scipy import stats

from tests.engine import harness
from vllm_vidspec.bench import pairs, shape_world

FAMILY = "qwen2.5-vl"
NUM_TOKENS = 20_000
NUM_BINS = 50


def quantiles(outputs: list, generator: np.random.Generator) -> np.ndarray:
    """Return one number in [0, 1) per emitted token, independent and uniform iff sampling is exact.

    Randomised probability integral transform: with F the target's distribution function at that position, over token
    ids, U = F(token - 1) + V p(token), V uniform. By Rosenblatt's theorem the numbers are independent across positions
    although the tokens are not, so a chi-squared test applies.
    """
    values = []
    for output in outputs:
        for completion in output.outputs:
            for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
                probabilities = np.zeros(max(position) + 1)
                probabilities[list(position)] = np.exp([entry.logprob for entry in position.values()])
                values.append(probabilities[:token].sum() + generator.random() * probabilities[token])
    return np.array(values)


def test_unseeded_output_follows_the_target(monkeypatch):
    """Chi-squared over 20,000 tokens at T = 1, drafted at 10 % of the video.

    Catches, and is seen to: a scorer that lets a rejected draft stand one time in four.
    """
    vocab_size = 256  # every token's probability is asked for
    overrides = {"max_num_seqs": 32, "max_logprobs": vocab_size}
    with harness.engine(FAMILY, "draft", overrides=overrides, num_speculative_tokens=4) as engine:
        vocab_size = engine.runner.vocab_size
        sampling = {"temperature": 1.0, "logprobs": vocab_size, "n": 16, "max_tokens": 80, "ignore_eos": True}

        def p_value(num_tokens: int) -> tuple[float, dict]:
            count = -(-num_tokens // (16 * 80))
            requests = [(pairs.video_prompt(FAMILY, shape_world.held_out(i).frames), sampling) for i in range(count)]
            outputs, counted = engine.measured(requests)
            values = quantiles(outputs, np.random.default_rng(0))
            assert len(values) >= num_tokens
            observed = np.histogram(values, bins=NUM_BINS, range=(0, 1))[0]
            return stats.chisquare(observed).pvalue, counted

        exact, counted = p_value(NUM_TOKENS)
        assert counted["accepted_tokens"] > 0.2 * counted["draft_tokens"]
        assert exact > 1e-3

        verifier = engine.runner.rejection_sampler
        score = verifier._score

        def lenient(inputs):
            lucky = np.random.default_rng(1).random(len(inputs.draft_tokens)) < 0.25
            target = inputs.target_tokens.clone()
            for row in np.flatnonzero(lucky[:-1]):
                if row + 1 not in inputs.cu_num_logits and inputs.draft_tokens[row + 1] >= 0:
                    target[row] = inputs.draft_tokens[row + 1]
            return score(type(inputs)(target, inputs.draft_tokens, inputs.cu_num_logits, inputs.max_drafts))

        monkeypatch.setattr(verifier, "_score", lenient)
        biased, _ = p_value(NUM_TOKENS // 4)
        assert biased < 1e-6
