"""Sight pays: at a tenth of the video, a guided choice beats a random one, and any choice beats none."""

import pytest

from tests.engine import harness

FAMILIES = ("qwen2.5-vl", "llava-onevision")


@pytest.mark.parametrize("family", FAMILIES)
def test_guided_beats_random_beats_blind(family):
    """Acceptance length over 12 held-out videos. Catches: scores that are shifted, reversed or of another item."""
    requests = harness.videos(family, 12, max_tokens=160)
    lengths = {}
    for pruner, ratio in (("random", 1.0), ("random", 0.9), ("specvlm", 0.9), ("uv", 0.9)):
        with harness.engine(family, "draft", pruner=pruner, prune_ratio=ratio) as engine:
            _, counted = engine.measured(requests)
        lengths[pruner, ratio] = 1 + counted["accepted_tokens"] / counted["drafts"]
    blind, random = lengths["random", 1.0], lengths["random", 0.9]
    assert random > blind + 0.3
    assert lengths["specvlm", 0.9] > random + 0.3
    assert lengths["uv", 0.9] > random + 0.2
