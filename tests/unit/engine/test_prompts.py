"""What came of a prompt's guidance."""

import torch

from tests.unit.engine.test_listeners import VIDEO, arrival_of, make_guidance
from vllm_vidspec.engine.listen.attention import AttentionGuidance


def test_a_prompt_that_ends_with_its_video_has_no_text_to_ask_with(monkeypatch):
    """Catches: "cached" where nothing was; what is counted before the draft has seen the prompt."""
    guidance, end = make_guidance(AttentionGuidance, monkeypatch), int(VIDEO[-1]) + 1
    guidance.arrive(arrival_of(0, num_tokens=end))
    assert guidance.take(0).wait() == (None, ("unguided_no_text",))
    guidance.arrive(arrival_of(1, num_tokens=end + 1))
    assert guidance.take(1).wait() == (None, ("unguided_cached",))
    guidance._remembered["video"] = torch.ones(len(VIDEO))
    guidance.arrive(arrival_of(2, num_tokens=end))
    assert guidance.take(2).wait().outcome == ("guided_prompts", "reused_guidance")
    assert guidance.take(3) is None
    assert not guidance.counters
