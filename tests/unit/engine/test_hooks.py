"""What hears the target: each guarded in the one list; guidance, whose prompt it is of and what came of it."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from tests.unit.engine import fakes
from tests.unit.engine.fakes import CPU, HIDDEN, NOTHING, NUM_ROWS, NUM_TOKENS, VIDEO, batch_of, in_list, new_request
from tests.unit.engine.listening import hear, make_guidance, make_states
from vllm_vidspec.engine.hooks import prompts
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import content_keys
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHook, TargetHooks
from vllm_vidspec.engine.hooks.state_store import StateStore
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.engine.tree_attention import TreeAttention
from vllm_vidspec.errors import VidSpecError

LIFE = ["add", "before_forward", "after_forward", "remove", "forget_kv"]


def recorder(fails_in: str = "") -> mock.Mock:
    """Return a hook that remembers what it hears, and fails where it is told to."""
    hook = mock.Mock(spec=TargetHook, loss="nothing", **{"reserve.side_effect": lambda available: available // 4})
    if fails_in:
        getattr(hook, fails_in).side_effect = RuntimeError(f"planted in {fails_in}")
    return hook


def heard(hook: mock.Mock) -> list[str]:
    return [name for name, *_ in hook.method_calls]


def live(hooks: TargetHooks) -> None:
    """Let a request come, be seen in a forward, and go, as the table of requests tells it."""
    requests = RequestRows(NUM_ROWS, CPU)
    requests.register(hooks)
    requests.add(new_request())
    hooks.before_forward(batch_of(2))
    hooks.after_forward(NOTHING)
    requests.remove(2)
    hooks.forget_kv()


@pytest.mark.parametrize("place", range(len(LIFE)), ids=LIFE)
def test_an_exception_in_one_is_paid_by_that_one(place, warned):
    """Catches: a guard that is missing, stops at the first failure, or lets the others pay; an end untold."""
    before, failing, after = recorder(), recorder(LIFE[place]), recorder()
    hooks = in_list(before, failing, after)
    live(hooks)
    live(hooks)
    assert heard(before) == heard(after) == 2 * LIFE
    assert heard(failing) == 2 * [*LIFE[: place + 1], "fail", *LIFE[place + 1 :]]
    assert warned == ["vidspec: nothing"]


def test_an_exception_is_let_through_where_that_is_asked_for():
    """Alone it is raised; with other ranks, which would wait for this one, the engine ends with its line."""
    with pytest.raises(RuntimeError, match="planted in add"):
        live(in_list(recorder("add"), on_draft_error="raise"))
    ended: list[str] = []
    ranks = SimpleNamespace(is_alone=False, abort=ended.append)
    live(TargetHooks([recorder("add")], fakes.make_knobs(on_draft_error="raise"), ranks))
    assert ended == ["planted in add"]


def test_memory_is_asked_for_by_turns_and_refusals_are_not_survived():
    """Catches: a reserve that only the first hears, or that promises the same bytes twice."""
    first, second = recorder(), recorder()
    hooks = in_list(first, second)
    assert hooks.reserve(1600) == 400 + 300
    hooks.init_kv(None)
    assert heard(first) == heard(second) == ["reserve", "init_kv"]
    for step in ("reserve", "init_kv"):
        with pytest.raises(RuntimeError, match=f"planted in {step}"):
            failing = in_list(recorder(step))
            failing.reserve(1600)
            failing.init_kv(None)


@pytest.mark.parametrize("step", ["_claim", "_observe", "_finish"])
def test_a_failure_costs_the_request_in_prefill_its_looseness(step, monkeypatch):
    """Catches: a request that is loose without its states, one that was before and pays, blocks that are lost."""
    states = make_states(monkeypatch)
    hooks = in_list(states)
    for row in (0, 1, 3):
        with monkeypatch.context() as patch:
            if row == 1:
                patch.setattr(states, step, lambda *_: 1 / 0)
            hooks.add(new_request(row, f"video-{row}"))
            hooks.before_forward(batch_of(row))
            hooks.after_forward(Forward(torch.ones(NUM_TOKENS, HIDDEN), None))
    assert states._rules.of == [0, 3] and states.counters["strict_error"] == 1
    assert len(states.store._free) == 4 - 2


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        *((AttentionGuidance, step) for step in ("before_forward", "after_forward")),
        *((HiddenStateGuidance, step) for step in ("_allocate", "_embed", "_observe")),
    ],
)
def test_a_failure_costs_the_prompt_in_prefill_its_guidance(kind, step, monkeypatch):
    """Catches: a reason that is not counted, bytes never given back, a later prompt that pays too."""
    guidance = make_guidance(kind, monkeypatch)
    guidance.reserve(1 << 20)
    hooks = in_list(guidance)
    for fails in (True, False):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(guidance, step, lambda *_: 1 / 0)
            hooks.add(new_request(1))
            hear(hooks, guidance, batch_of(1))
        assert guidance.take(1).wait().outcome == ("unguided_error" if fails else "guided_prompts",)
        hooks.remove(1)
        assert getattr(guidance, "_num_bytes", 0) == 0


def test_the_store_drops_what_nobody_uses_the_oldest_first():
    """Catches: an item in use that is dropped, one that a strict request drops, the wrong one of two."""
    store = StateStore(HIDDEN, torch.float32, 256, NUM_ROWS, CPU, fakes.GROUP)
    with pytest.raises(VidSpecError, match="hold nothing"):
        store.reserve(store.bytes_per_block - 1, 1 << 20)
    with pytest.raises(VidSpecError, match="leaves nothing"):
        store.reserve(1 << 20, store.bytes_per_block)
    assert store.reserve(3 * store.bytes_per_block, 1 << 20) == 3 * store.bytes_per_block
    store.allocate(torch.no_grad())
    items = [store.make(key, 4, may_drop=True) for key in (b"a", b"b", b"c")]
    for item in items:
        item.observed[:] = True
        assert store.publish(item) is item
    assert store.make(b"d", 4, may_drop=True) is None
    assert store.held_bytes == 3 * store.bytes_per_block
    store.drop(items[0])
    store.drop(items[1])
    assert store.find(b"a") is items[0]
    store.drop(items[0])  # used after b
    assert store.held_bytes == store.bytes_per_block  # c alone: what nobody uses is kept and held for nobody
    assert store.make(b"d", 4, may_drop=False) is None
    d = store.make(b"d", 4, may_drop=True)
    assert (d.blocks, items[0] in store, items[1] in store) == (items[1].blocks, True, False)
    twin = store.make(b"c", 4, may_drop=True)  # two prompts of one video side by side: the first to end is kept
    twin.observed[:] = True
    assert store.publish(twin) is items[2] and items[2].users == 2 and store._free == twin.blocks


def test_a_failure_of_trees_is_not_survived():
    """Catches: a forward whose tree nodes stand where a chain's would."""
    attention, requests = TreeAttention([fakes.attention_layer()], CPU), RequestRows(NUM_ROWS, CPU)
    trees = TargetTrees(attention, fakes.model_state(), requests, max_nodes=3, max_num_tokens=16, device=CPU)
    with pytest.raises(AttributeError):
        in_list(trees).before_forward(batch_of(1))
    groups = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[None, None]))
    with pytest.raises(VidSpecError, match="use chain"):
        in_list(trees).init_kv(groups)


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
    """100 images shown again from the cache: each has its own scores, in order, below the bound, oldest out first."""
    guidance = make_guidance(kind, monkeypatch)
    guidance.reserve(1 << 20)
    hooks, arrival = in_list(guidance, on_draft_error="raise"), frames(100)
    hooks.add(arrival)
    hear(hooks, guidance, batch_of(1, count=len(arrival.token_ids)))
    first = guidance.take(1).wait()
    assert first.outcome == ("guided_prompts",) and [len(scores) for scores in first.scores] == [2] * 100
    assert all(one.scores.untyped_storage().nbytes() == 8 for one in guidance._remembered.values())
    hooks.add(arrival)
    again = guidance.take(1).wait()
    assert again.outcome == ("guided_prompts", "reused_guidance")
    assert all(torch.equal(*pair) for pair in zip(again.scores, first.scores, strict=True))
    by_text = len(guidance._remembered) // 100  # entries of an image: the last prompt's, and attention's by its text
    monkeypatch.setattr(prompts, "_MAX_REMEMBERED", 10 * by_text * prompts._LEAST_REMEMBERED)
    hooks.add(arrival)
    hear(hooks, guidance, batch_of(1, count=len(arrival.token_ids)))
    guidance.take(1).wait()
    last = content_keys(arrival, arrival.features, [3 * i + 3 for i in range(100)])[90:]
    assert [name for name in guidance._remembered if name in last] == last and len(guidance._remembered) == 10 * by_text


def test_a_prompt_that_ends_with_its_video_has_no_text_to_ask_with(monkeypatch):
    """Catches: "cached" where nothing was; what is counted before the draft has seen the prompt."""
    guidance, end = make_guidance(AttentionGuidance, monkeypatch), int(VIDEO[-1]) + 1
    asking = new_request(0)
    guidance.add(new_request(0, num_tokens=end))
    assert guidance.take(0).wait() == (None, ("unguided_no_text",))
    guidance.add(new_request(1, num_tokens=end + 1))
    assert guidance.take(1).wait() == (None, ("unguided_cached",))
    known = prompts.Remembered(torch.ones(len(VIDEO)))
    guidance._remembered[content_keys(asking, asking.features, [end])[0]] = known
    guidance.add(new_request(2, num_tokens=end))
    assert guidance.take(2).wait().outcome == ("guided_prompts", "reused_guidance")
    guidance.add(new_request(3, has_embeds=True))  # its tokens mean nothing
    assert guidance.take(3) is None
    assert not guidance.counters
