"""Vanilla references, computed once a family."""

import pytest

from tests.engine import harness

SCENARIOS = {
    "videos": lambda family: harness.videos(family, 8),
    "mixed": harness.mixed_batch,
    # Phrases of several tokens, which a lone request may not say.
    "phrases": lambda family: harness.videos(family, 1, bad_words=["white diamond", "in the middle"]),
    # T = 1 with the most likely token of every position: what a greedy draft should have proposed there.
    "sampled": lambda family: harness.videos(family, 6, temperature=1.0, logprobs=1),
}


@pytest.fixture(scope="session")
def reference():
    """`reference(family, scenario)` -> vanilla vLLM's outputs; one engine a family answers all scenarios."""
    answers: dict[str, dict[str, list]] = {}

    def answer(family: str, scenario: str) -> list:
        if family not in answers:
            with harness.engine(family) as engine:
                answers[family] = {name: engine.generate(requests(family)) for name, requests in SCENARIOS.items()}
        return answers[family][scenario]

    return answer
