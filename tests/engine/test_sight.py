"""Sight pays: at a tenth of the video, a guided choice beats an even one, and any choice beats none."""

import pytest

from tests.engine import harness
from tests.engine.harness import FAMILIES, QWEN3

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", [*(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES), QWEN3])
def test_guided_beats_unguided_beats_blind(family):
    """Acceptance length over 8 held-out videos. Catches: scores that are shifted, reversed or of another item."""
    requests = harness.videos(family, 8, max_tokens=160)

    def measure(engine, **knobs) -> float:
        engine.retune(**knobs)
        engine.llm.reset_prefix_cache()
        _, counted = engine.measured(requests)
        return 1 + counted["accepted_tokens"] / counted["drafts"]

    with harness.engine(family, "draft", pruner="specvlm") as engine:
        specvlm = measure(engine)
        uniform = measure(engine, lambda_r=0.0)  # stage II alone
        blind = measure(engine, prune_ratio=1.0)
    with harness.engine(family, "draft", pruner="uv") as engine:
        uv = measure(engine)
    assert uniform > blind + 0.3
    assert specvlm > uniform + 0.3
    assert uv > uniform + 0.3
