"""Guidance of attention and of hidden states: whose prompt it is of, what a failure costs, what came of it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from tests.unit.engine.fakes import HIDDEN, VIDEO, batch_of, in_list, new_request
from tests.unit.engine.listening import make_guidance
from vllm_vidspec.engine.hooks import prompts
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.guarded import TargetHooks
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.keys import content_keys
from vllm_vidspec.engine.hooks.prompts import Guidance
from vllm_vidspec.engine.hooks.protocol import Forward


def hear(hooks: TargetHooks, guidance: Guidance, batch: SimpleNamespace) -> None:
    """Let the list hear a forward in which every visual token draws as much attention as the other."""
    hooks.before_forward(batch)
    step = getattr(guidance, "_step", None)
    if step is not None:
        step.sums += 1.0
        step.num_observed += 1
    states = torch.ones(int(batch.query_start_loc_np[-1]), HIDDEN)
    hooks.after_forward(Forward(states, [states, states]))


def frames(count: int, num_tokens: int = 2) -> SimpleNamespace:
    """Return what arrives in row 1: images of `num_tokens` tokens, a marker before each, two words after the last."""
    arrival, features = new_request(1), []
    for i in range(count):
        place = PlaceholderRange(offset=i * (num_tokens + 1) + 1, length=num_tokens)
        data = {"pixel_values": None}
        features.append(SimpleNamespace(mm_position=place, modality="image", identifier=f"frame {i}", data=data))
    token_ids = list(range(count * (num_tokens + 1) + 2))
    return dataclasses.replace(arrival, features=features, token_ids=token_ids)


@pytest.mark.parametrize(
    ("count", "num_tokens", "knobs", "observed"),
    [
        (3, 2, {}, False),
        (4, 2, {}, True),
        (3, 1, {"image_prune_ratio": 0.9}, False),  # one token always stays
        (4, 1, {"image_prune_ratio": 0.9}, True),
        (2, 2, {"frames_as_video": "always"}, True),
        (8, 2, {"frames_as_video": "never"}, False),
        (4, 2, {"prune_ratio": 1.0}, False),
        (3, 2, {"image_prune_ratio": 0.5, "prune_ratio": 1.0}, True),
        (4, 2, {"image_prune_ratio": 0.5, "prune_ratio": 0.0}, False),
    ],
)
def test_a_run_of_images_is_heard_as_the_video_it_is(count, num_tokens, knobs, observed, monkeypatch):
    """Catches: a run that is pruned uniformly because no image alone would be pruned, or none is a choice."""
    guidance = make_guidance(AttentionGuidance, monkeypatch, **{"image_prune_ratio": 0.0} | knobs)
    guidance.add(frames(count, num_tokens))
    assert (1 in guidance._prompts) == observed


@pytest.mark.parametrize("kind", [AttentionGuidance, HiddenStateGuidance])
def test_all_frames_of_a_prompt_are_remembered(kind, monkeypatch):
    """A prompt of 100 images is shown again from the cache: every image has its own scores, in order. What is
    remembered stays below its bound, the oldest goes first. Catches: a bound by number that forgets a prompt's first
    frames while it takes in its last; scores that are views of the whole prompt's."""
    guidance = make_guidance(kind, monkeypatch)
    guidance.reserve(1 << 20)
    hooks, arrival = in_list(guidance, on_draft_error="raise"), frames(100)
    hooks.add(arrival)
    hear(hooks, guidance, batch_of(1, count=len(arrival.token_ids)))
    first = guidance.take(1).wait()
    assert first.outcome == ("guided_prompts",) and [len(scores) for scores in first.scores] == [2] * 100
    assert all(scores.untyped_storage().nbytes() == 8 for scores in guidance._remembered.values())
    hooks.add(arrival)
    again = guidance.take(1).wait()
    assert again.outcome == ("guided_prompts", "reused_guidance")
    assert all(torch.equal(*pair) for pair in zip(again.scores, first.scores, strict=True))
    monkeypatch.setattr(prompts, "_MAX_REMEMBERED", 10 * prompts._LEAST_REMEMBERED)
    hooks.add(arrival)
    hear(hooks, guidance, batch_of(1, count=len(arrival.token_ids)))
    guidance.take(1).wait()
    last = content_keys(arrival, arrival.features, [3 * i + 3 for i in range(100)])[90:]
    assert list(guidance._remembered) == last


def test_a_prompt_that_ends_with_its_video_has_no_text_to_ask_with(monkeypatch):
    """Catches: "cached" where nothing was; what is counted before the draft has seen the prompt."""
    guidance, end = make_guidance(AttentionGuidance, monkeypatch), int(VIDEO[-1]) + 1
    asking = new_request(0)
    guidance.add(new_request(0, num_tokens=end))
    assert guidance.take(0).wait() == (None, ("unguided_no_text",))
    guidance.add(new_request(1, num_tokens=end + 1))
    assert guidance.take(1).wait() == (None, ("unguided_cached",))
    guidance._remembered[content_keys(asking, asking.features, [end])[0]] = torch.ones(len(VIDEO))
    guidance.add(new_request(2, num_tokens=end))
    assert guidance.take(2).wait().outcome == ("guided_prompts", "reused_guidance")
    guidance.add(new_request(3, has_embeds=True))  # its tokens mean nothing
    assert guidance.take(3) is None
    assert not guidance.counters
