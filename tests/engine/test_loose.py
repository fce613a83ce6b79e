"""Loose verification: what it may change, what it must not, and how both are known.

The Hugging Face model, in float64, reads the emitted text back: given the tokens before it, every token must be the
target's most likely one, but for those that the engine itself says it loosened or shifted, and the relevance that
decided it must be that model's. A token emitted in place of the one whose KV stands makes the later choices another's.
"""

from unittest import mock

import pytest
import torch

from benchmarks import watching
from tests.engine import float64, harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import LLAVA, NO_CACHE, QWEN, QWEN3, assert_same_answers, in_place_of, token_ids
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.hooks import visual_states
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import rules as scorers
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

ALL = ["strict", "loose", "fly", "fly-entropy", "random"]
OPEN = {"scorer": "loose", "request_scorers": ALL, "num_speculative_tokens": 10, "prune_ratio": 0.95}


def asking(scorer: str | None = None, share: float | None = None) -> dict:
    chosen = {"vidspec_scorer": scorer, "vidspec_lambda": share}
    return {"extra_args": {key: value for key, value in chosen.items() if value is not None}}


def shown(count: int) -> list[list]:
    return [[frames] for frames in harness.shown(count)]


def forget_states(engine: harness.Engine) -> None:
    """Let what earlier prompts left be computed again."""
    store = engine.visual.store
    assert not any(item.users for item in store._items.values())
    store.clear()


def check(engine: harness.Engine, num_videos: int = 4, **sampling) -> dict:
    """Caption videos and let the reference read them back; return the counters."""
    engine.idle()
    forget_states(engine)
    with engine.watched(watching.scores) as records:
        outputs, counted = engine.measured(harness.videos(engine.family, num_videos, max_tokens=80, **sampling))
    assert counted["loosened_tokens"] + counted["shifted_tokens"] > 0
    kinds = [kind for record in records for kind in record["kinds"]]
    for kind, name in ((1, "exact_tokens"), (2, "loosened_tokens"), (3, "shifted_tokens")):
        assert counted[name] == kinds.count(kind)
    assert float64.check_loose(engine.family, outputs, shown(num_videos), records) > 0
    return counted


@pytest.fixture(scope="module", params=[QWEN, pytest.param(LLAVA, marks=pytest.mark.slow)])
def engine(request, reference):
    reference(request.param, "mixed")  # before our engine: one at a time
    with harness.engine(request.param, "draft", **OPEN, overrides=NO_CACHE) as running:
        yield running


def test_nothing_loose_is_lossless(engine, reference):
    """lambda = 0 without shift: twenty mixed requests are vanilla's, byte for byte."""
    with engine.retuned(lambda_loose=0.0, position_shift=False):
        outputs, counted = engine.measured(SCENARIOS["mixed"](engine.family))
    assert_same_answers(reference(engine.family, "mixed"), outputs)
    assert counted["accepted_tokens"] == counted["exact_tokens"] > 0
    assert counted["loosened_tokens"] == counted["shifted_tokens"] == 0


def test_every_other_token_is_the_targets(engine):
    """Greedy captions read back; see the module."""
    counted = check(engine)
    assert counted["relevance_prompts"] == 4 and counted["relevance_tokens"] == counted["visual_tokens_full"]


def test_lambda_one_accepts_everything(engine):
    """Until the end of the text, which is protected: every draft stands, every step accepts K."""
    with engine.retuned(lambda_loose=1.0):
        _, counted = engine.measured(harness.videos(engine.family, 4, max_tokens=45))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0 and counted["loosened_tokens"] > 0
    assert counted["draft_tokens"] == 10 * counted["drafts"]


def test_protected_tokens_are_neither_gained_nor_lost(engine):
    """With lambda = 1, no mismatch puts a protected word in or leaves one out; nor ends the text, nor runs past it."""
    words = ["red", "small", "left", "."]
    with engine.retuned(protected_tokens=words, lambda_loose=1.0), engine.watched(watching.scores) as records:
        outputs, counted = engine.measured(harness.videos(engine.family, 8, max_tokens=200, temperature=1.0))
    assert counted["loosened_tokens"] > 0 and counted["accepted_tokens"] < counted["draft_tokens"]
    tokenizer = engine.llm.get_tokenizer()
    protected = {*tokenizer.convert_tokens_to_ids(words), *tokenizer.all_special_ids}
    ends = [output.outputs[0].finish_reason for output in outputs]
    for record in records:
        for token, kind in zip(record["tokens"], record["kinds"], strict=True):
            assert kind < 2 or token not in protected, tokenizer.decode([token])
    assert ends == ["stop"] * 8


def test_what_a_request_forbids_stays_forbidden(engine):
    """Allowed ids, bad words and a logit bias of -100: no draft that they rule out stands, whatever lambda."""
    ids = list(range(3, 60))
    forbidden = {"allowed_token_ids": ids}, {"bad_words": ["a"]}
    requests = [
        (prompt, {**sampling, **rule, "temperature": 1.0, "ignore_eos": True})
        for (prompt, sampling), rule in zip(harness.videos(engine.family, 2), forbidden, strict=True)
    ]
    with engine.retuned(lambda_loose=1.0):
        outputs = engine.generate(requests)
    assert set(outputs[0].outputs[0].token_ids) <= set(ids)
    assert "a" not in outputs[1].outputs[0].text.split()


@pytest.mark.parametrize("scorer", ALL[1:])
def test_every_scorer_loosens_by_the_seed(engine, scorer):
    """All loosen, alike for the same seed; FLy (by a window) and the random baseline need no states of the video."""
    asked = asking(scorer, 0.7 if scorer == "random" else None)
    requests = [r for heat in (0.0, 1.0) for r in harness.videos(engine.family, 3, temperature=heat, **asked)]
    with engine.retuned(fly_entropy=0.001), mock.patch.object(VidSpecConfig, "fly_window", 1):
        outputs, counted = engine.measured(requests)
        again, _ = engine.measured(requests)
    assert token_ids(outputs) == token_ids(again)
    assert counted["loosened_tokens"] > 0
    assert counted["shifted_tokens"] == 0 or scorer == "loose"
    assert counted["relevance_prompts"] == (6 if scorer == "loose" else 0)


def rows_of_the_position_before(patch):
    @in_place_of(patch, visual_states.VisualStates, "relevance")
    def shifted(measure, self, *args):
        return measure(self, *args).roll(1)


def the_targets_token_over_the_drafts_kv(patch):
    @in_place_of(patch, scorers, "accept")
    def accept(original, target_tokens, *args):
        sampled, num_sampled, path, kinds = original(target_tokens, *args)
        bounds = args[1].long()
        for i in range(len(num_sampled)):
            own = target_tokens[bounds[i] : bounds[i] + int(num_sampled[i])]
            sampled[i, : len(own)] = torch.where(kinds[i, : len(own)] > 1, own, sampled[i, : len(own)])
        return sampled, num_sampled, path, kinds


@pytest.mark.parametrize("plant", [rows_of_the_position_before, the_targets_token_over_the_drafts_kv])
def test_planted_bug_is_caught(engine, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(engine)


TWO_BRANCHES = [[rank] + [0] * depth for depth in range(10) for rank in (0, 1)]
SITUATIONS = {
    # Of LVSpec's two branches of ten what stands is a path, and its KV is what the text says.
    "branches, ahead, preempted": (
        *(QWEN, {"drafting": "tree-static", "tree_paths": TWO_BRANCHES, "num_speculative_tokens": 20}),
        {"num_gpu_blocks_override": 12, "max_model_len": 512},
    ),
    "trees, chunks": (
        *(LLAVA, {"drafting": "tree-adaptive", "num_speculative_tokens": 24}),
        {"max_num_batched_tokens": 130},  # three chunks a prompt, and room for five trees
    ),
    "another family": (QWEN3, {}, {}),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_relevance_in_every_situation(name):
    """Planned ahead and preempted, heard over many chunks, another family: KV, branches and chunks are not mixed up."""
    (family, shape, overrides), is_ahead = SITUATIONS[name], "ahead" in name
    with (
        harness.engine(family, "draft", NO_CACHE | overrides, is_ahead, **OPEN | shape) as running,
        running.preemptions() as preempted,
        running.watched(watching.scores) as records,
    ):
        outputs, counted = running.measured(harness.videos(family, 5, max_tokens=130, ignore_eos=True))
    assert bool(preempted) == is_ahead and counted["relevance_prompts"] == 5 + len(preempted)
    assert not any(value for name, value in counted.items() if name.startswith("strict_"))
    # A request that comes back has a step or two without drafts, and one that the draft has not read yet its first.
    assert float64.check_loose(family, outputs, shown(5), records, max_unmeasured=8 if is_ahead else 2) > 0


def test_relevance_is_against_all_videos_of_a_prompt(engine):
    videos = harness.shown(2)
    prompt = pairs.media_prompt(engine.family, "describe the video", videos=videos)
    with engine.watched(watching.scores) as records:
        outputs, counted = engine.measured([(prompt, {"temperature": 0.0})])
    assert counted["relevance_tokens"] == counted["visual_tokens_full"]
    float64.check_loose(engine.family, outputs, [videos], records)


def test_cached_prefix():
    """A second question finds a video's states, a strict request's too; when they are gone it is strict, counted."""
    question = "describe the video please , what happens in this clip ?"
    (frames,) = harness.shown(1)
    first = (pairs.video_prompt(QWEN, frames), {"temperature": 0.0, **asking("strict")})
    second = (pairs.video_prompt(QWEN, frames, question), {"temperature": 0.0})
    with harness.engine(QWEN, "draft", **OPEN) as running:
        _, counted = running.measured([first])
        assert counted["relevance_prompts"] == 0
        with running.watched(watching.scores) as records:
            outputs, counted = running.measured([second])
        assert outputs[0].num_cached_tokens > 200
        assert counted["relevance_prompts"] == counted["relevance_reused"] == 1
        assert float64.check_loose(QWEN, outputs, [[frames]], records) >= 0
        visual = running.visual
        assert len(visual.store._items) == 1
        running.idle()
        assert not visual._holders  # vLLM tells of the end of a request with its next step
        forget_states(running)
        _, counted = running.measured([second])
        assert counted["strict_cached"] == 1 and counted["loosened_tokens"] == counted["relevance_prompts"] == 0


def test_memory_bound():
    """Where one video of two fits, the other is strict and counted; afterwards all of the pool is free or idle."""
    row_bytes = 256 * 4
    with harness.engine(QWEN, "draft", **OPEN, state_bytes=7 * 64 * row_bytes, overrides=NO_CACHE) as running:
        _, counted = running.measured(harness.videos(QWEN, 2, max_tokens=40))
        visual, store = running.visual, running.visual.store
        assert counted["relevance_pool_bytes"] == store.pool.nbytes == 5 * 64 * row_bytes
        with pytest.raises(VidSpecError, match="leaves nothing"):
            visual.reserve(store.pool.nbytes)
        assert counted["strict_memory"] == 1 and counted["relevance_prompts"] == 1
        running.idle()
        idle = sum(len(item.blocks) for item in store._items.values() if item.users == 0)
        assert len(store._free) + idle == 5 and not visual._holders
        _, counted = running.measured(harness.videos(QWEN, 3, max_tokens=40)[2:])
        assert counted["strict_memory"] == 0 and counted["relevance_prompts"] == 1
