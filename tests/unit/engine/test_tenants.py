"""What is kept of one request and given to another: never to another tenant (`cache_salt`), adapter or beginning."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.unit.engine.fakes import HIDDEN, NUM_TOKENS, VIDEO, batch_of, in_list, new_request
from tests.unit.engine.listening import hear, make_guidance, make_states
from vllm_vidspec.engine.hooks import prompts, visual_states
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import content_keys
from vllm_vidspec.engine.hooks.protocol import Forward

FIRST = {"cache_salt": "first tenant"}
OTHERS = {
    "another tenant": {"cache_salt": "second tenant"},
    "nobody's": {"cache_salt": ""},
    "another adapter": {**FIRST, "adapter": "adapter"},
    "another beginning": {**FIRST, "token_ids": [7, *range(1, 8)]},
    "another video": {**FIRST, "name": "other"},
}


def asking(row: int, token_ids=None, name: str = "video", **whose):
    arrival = new_request(row, name, **whose)
    return arrival if token_ids is None else dataclasses.replace(arrival, token_ids=token_ids)


def guided(kind, monkeypatch, whose: dict) -> tuple[str, ...]:
    """The first tenant's prompt is heard; what comes of another's, which the target's cache has kept from us?"""
    guidance = make_guidance(kind, monkeypatch)
    guidance.reserve(1 << 20)
    hooks = in_list(guidance, on_draft_error="raise")
    hooks.add(asking(0, **FIRST))
    hear(hooks, guidance, batch_of(0))
    assert guidance.take(0).wait().outcome == ("guided_prompts",)
    hooks.add(asking(1, **whose))
    return guidance.take(1).wait().outcome


def reused(monkeypatch, whose: dict) -> int:
    states = make_states(monkeypatch)
    hooks = in_list(states, on_draft_error="raise")
    hooks.add(asking(0, **FIRST))
    hooks.before_forward(batch_of(0))
    hooks.after_forward(Forward(torch.ones(8, HIDDEN), None))
    hooks.add(asking(1, **whose))
    return states._holders[1].num_reused


@pytest.mark.parametrize("kind", [AttentionGuidance, HiddenStateGuidance])
def test_scores_stay_with_their_tenant(kind, monkeypatch):
    """Catches: a prompt that is pruned by another tenant's question, or by another adapter's attention."""
    assert guided(kind, monkeypatch, FIRST) == ("guided_prompts", "reused_guidance")
    for who, whose in OTHERS.items():
        assert guided(kind, monkeypatch, whose) == ("unguided_cached",), who


def test_states_stay_with_their_tenant(monkeypatch):
    """Catches: a tenant who learns, from a looser answer, that another one has shown the same video."""
    assert reused(monkeypatch, FIRST) == 1
    for who, whose in OTHERS.items():
        assert reused(monkeypatch, whose) == 0, who


def without(**less):
    """Return keys that know less of a request, or something else."""
    return lambda arrival, shown, ends: content_keys(dataclasses.replace(arrival, **less), shown, ends)


LOOSER = {
    "by the video only": lambda arrival, shown, ends: [feature.identifier.encode() for feature in shown],
    "without the salt": without(cache_salt=""),
    "without the adapter": without(adapter=""),
    "without the text before it": without(token_ids=[0] * NUM_TOKENS),
}


@pytest.mark.parametrize("name", LOOSER)
def test_looser_keys_are_seen(name, monkeypatch):
    with mock.patch.object(prompts, "content_keys", LOOSER[name]), pytest.raises(AssertionError):
        test_scores_stay_with_their_tenant(AttentionGuidance, monkeypatch)
    with mock.patch.object(visual_states, "content_keys", LOOSER[name]), pytest.raises(AssertionError):
        test_states_stay_with_their_tenant(monkeypatch)


def test_no_part_of_a_key_runs_into_another():
    """A client chooses its salt, its adapter's name and names for its media. Catches: parts that are only joined."""
    ends = [int(VIDEO[-1]) + 1]
    pairs = [({"cache_salt": "ab", "adapter": "c"}, {"cache_salt": "a", "adapter": "bc"})]
    pairs += [({"adapter": "a", "name": "bvideo"}, {"adapter": "ab", "name": "video"})]
    for one, other in pairs:
        keys = [content_keys(found := asking(0, **whose), found.features, ends) for whose in (one, other)]
        assert keys[0] != keys[1]


def test_what_is_only_heard_counts_too():
    """Audio in front of a video shapes its states. Catches: a key of what is shown alone."""
    found, keys = asking(0), []
    for name in ("song", "speech"):
        features = [SimpleNamespace(identifier=name, modality="audio"), *found.features]
        keys.append(without(features=features)(found, found.features, [int(VIDEO[-1]) + 1]))
    assert keys[0] != keys[1] and len(keys[0]) == 1
