"""Guidance of attention and of hidden states: whose prompt it is of, what a failure costs, what came of it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from tests.unit.engine.fakes import HIDDEN, NOTHING, VIDEO, Recorder, batch_of, in_list, new_request
from tests.unit.engine.listening import make_guidance
from vllm_vidspec.engine.hooks import prompts
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import Guidance, content_keys
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHooks
from vllm_vidspec.errors import VidSpecError


def hear(hooks: TargetHooks, guidance: Guidance, batch: SimpleNamespace) -> None:
    """Let the list hear a forward in which every visual token draws as much attention as the other."""
    hooks.before_forward(batch)
    step = getattr(guidance, "_step", None)
    if step is not None:
        step.sums += 1.0
        step.num_observed += 1
    states = torch.ones(int(batch.query_start_loc_np[-1]), HIDDEN)
    hooks.after_forward(Forward(states, [states, states]))


def outcome(hooks: TargetHooks, guidance: Guidance) -> tuple[str, ...]:
    """Return what comes of a prompt that arrives in row 1 and is observed."""
    hooks.add(new_request(1))
    hear(hooks, guidance, batch_of(1))
    return guidance.take(1).wait().outcome


@pytest.mark.parametrize("kind", [AttentionGuidance, HiddenStateGuidance])
def test_guidance_is_of_the_request_in_the_row(kind, monkeypatch):
    """Catches: a row whose next request finds the prompt of the one before, or bytes that its states leave behind."""
    guidance = make_guidance(kind, monkeypatch)
    guidance.reserve(1 << 20)
    hooks = in_list(guidance, on_draft_error="raise")
    hooks.add(new_request(2, "first"))
    hooks.add(new_request(0, "other"))
    hear(hooks, guidance, batch_of(0, 2))
    hooks.remove(2)
    hooks.add(new_request(2, ""))  # there is nothing to choose in it
    hear(hooks, guidance, batch_of(2))
    assert guidance.take(2) is None
    hooks.add(new_request(2, "second", has_embeds=True))  # its tokens mean nothing
    assert guidance.take(2) is None
    guided = guidance.take(0).wait()
    assert guided.outcome == ("guided_prompts",) and len(guided.scores[0]) == len(VIDEO)
    assert not guidance._prompts and getattr(guidance, "_num_bytes", 0) == 0
    assert len(guidance._remembered) == 1


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (AttentionGuidance, "before_forward"),
        (AttentionGuidance, "after_forward"),
        (HiddenStateGuidance, "_allocate"),
        (HiddenStateGuidance, "_embed"),
        (HiddenStateGuidance, "_observe"),
    ],
)
def test_a_failure_costs_the_prompts_in_prefill_their_guidance(kind, step, monkeypatch):
    """Catches: a reason that is not counted, bytes never given back, a later prompt that pays too."""
    guidance = make_guidance(kind, monkeypatch)
    guidance.reserve(1 << 20)
    other = Recorder()
    hooks = in_list(guidance, other)
    with monkeypatch.context() as patch:
        patch.setattr(guidance, step, lambda *_: 1 / 0)
        hooks.add(new_request(1))
        hear(hooks, guidance, batch_of(1))
    assert other.observed == ["add", "before_forward", "after_forward"] and other.cost == 0
    assert guidance.take(1).wait() == (None, ("unguided_error",))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(guidance, step, lambda *_: 1 / 0)
        outcome(in_list(guidance, on_draft_error="raise"), guidance)
    hooks.remove(1)
    assert getattr(guidance, "_num_bytes", 0) == 0
    assert outcome(hooks, guidance) == ("guided_prompts",)


def test_an_observer_never_leaves_the_forward_and_is_missed_there(monkeypatch):
    """Catches: an exception inside the target's forward, and one that is lost there, or that a later step pays for;
    sums of some layers, as of a captured graph, that pass for those of all.
    """
    guidance = make_guidance(AttentionGuidance, monkeypatch)
    hooks = in_list(guidance)
    hooks.add(new_request(1))
    hooks.before_forward(batch_of(1))
    guidance._observe(0, None, None, None, object(), None)  # a layer without a query
    guidance._step.num_observed += 1
    hooks.after_forward(NOTHING)
    assert guidance.take(1).wait().outcome == ("unguided_error",)
    assert outcome(hooks, guidance) == ("guided_prompts",)
    raising = in_list(guidance, on_draft_error="raise")
    guidance._observe(0, None, None, None, object(), None)  # no step, no error
    raising.after_forward(NOTHING)
    raising.add(new_request(2, "unheard"))
    raising.before_forward(batch_of(2))
    raising.after_forward(NOTHING)
    assert guidance.take(2).wait() == (None, ("unguided_unobserved",))


def test_layers_follow_the_knobs(monkeypatch):
    """Catches: layers of the start-up's knobs; a refused change of which half is kept."""
    guidance = make_guidance(AttentionGuidance, monkeypatch)
    knobs = guidance.knobs
    knobs.change(knobs.current.changed({"guidance_layers": (0,)}))
    assert guidance._layers == {0}
    with pytest.raises(VidSpecError, match="layers 0 to 0, not 1"):
        knobs.change(knobs.current.changed({"guidance_layers": (1,)}))
    assert guidance._layers == {0} and knobs.current.prune.guidance_layers == (0,)


def test_states_beyond_the_bound_are_not_kept(monkeypatch):
    """Catches: a bound that is not one, a prompt that waits for room which another gives back."""
    guidance = make_guidance(HiddenStateGuidance, monkeypatch)
    guidance._max_bytes = len(VIDEO) * HIDDEN * 4
    hooks = in_list(guidance, on_draft_error="raise")
    for row in (0, 1):
        hooks.add(new_request(row, f"video-{row}"))
    hear(hooks, guidance, batch_of(0, 1))
    assert [guidance.take(row).wait().outcome for row in (0, 1)] == [("guided_prompts",), ("unguided_memory",)]
    assert guidance._num_bytes == 0


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
    """A prompt of 100 images is shown again from the cache: every image has its own scores, in order.

    What is remembered stays below its bound, the oldest goes first. Catches: a bound by number that forgets a prompt's
    first frames while it takes in its last; scores that are views of the whole prompt's.
    """
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
    assert guidance.take(3) is None
    assert not guidance.counters
