"""Families without a bundled pair, on untrained models: a draft equal to the target has every token accepted.

A request by itself is drafted for in chains, several in trees. The draft is a second copy of the target's weights;
what the target says is what the same engine says while nothing is drafted.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.engine import family_models, harness
from tests.engine.harness import QWEN, Engine, assert_all_stands, assert_same_answers, skipped
from tests.engine.matrix import GUIDED
from tests.engine.test_parallel import PARALLEL, let_drafts_come
from vllm_vidspec.drafting import make_policy
from vllm_vidspec.pruning import budget

pytestmark = pytest.mark.engine

CHUNK = 48
PART = 40  # tokens of a video that its tower encodes in a step
NUM_NODES = 25
SPEC: dict[str, Any] = {
    "drafting": "auto",
    "draft_table": [[1, 1, "chain", 5], [2, 8, "tree-adaptive", NUM_NODES]],
    "num_speculative_tokens": NUM_NODES,
    "guidance_layers": "all",
}
# Their decoders return no hidden states in vLLM, which `uv` reads.
WITHOUT_STATES = ("glm-v-moe", "hyperclovax", "exaone4.5")


def start(name: str, model: str, draft: str | None, **spec: Any) -> Any:
    family = family_models.FAMILIES[name]
    overrides = {"model": model, "limit_mm_per_prompt": family.limits, "block_size": 32}
    return harness.engine(QWEN, draft, overrides | family.overrides, **spec)


# Close to another: GLM-4.1V with other layers in the tower, or experts; the tower of Qwen2.5-VL.
SLOW = ("glm-ocr", "glm-v-moe", "hyperclovax")
FAST = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in family_models.FAMILIES]


@pytest.fixture(scope="module", params=FAST)
def running(request, tmp_path_factory) -> Iterator[tuple[str, Engine]]:
    model = family_models.build(request.param, tmp_path_factory.mktemp(request.param))
    pruner = "specvlm" if request.param in WITHOUT_STATES else "auto"
    with start(request.param, model, model, **SPEC, pruner=pruner) as engine:
        yield request.param, engine


def requests(name: str, number: int, max_tokens: int = 16) -> list[tuple[dict, dict]]:
    """Return as many requests of every kind that a family takes, at T = 0 and 1 by turns."""
    frames, limits = harness.shown(4), family_models.FAMILIES[name].limits
    kinds: list[dict[str, Any]] = [{"videos": [frames[0]]}]
    if "image" in limits:
        kinds += [{"videos": [frames[1]], "images": [frames[2][0]]}, {"images": [frames[3][0], frames[0][9][:, :56]]}]
    kinds += [{"videos": [frames[1], frames[2]][: limits["video"]]}, {}]
    made = []
    for i in range(number):
        question = f"{i}: what happens in this clip, and what color is it?"
        sampling = {"temperature": float(i % 2), "seed": i, "max_tokens": max_tokens, "ignore_eos": True}
        made.append((family_models.prompt(name, question, **kinds[i % len(kinds)]), sampling))
    return made


def batches(engine: Engine, asked: list[tuple[dict, dict]]) -> tuple[list[Any], dict[str, int]]:
    """Run the first request by itself and the others in two batches, one for each kind of tree."""
    outputs, counted = [], {}
    (trees,) = engine.speculator.backend.drafter.trees.values()
    static = make_policy("tree-static", engine.config, 8, engine.draft.device)
    for part, policy in ((asked[:1], trees.policy), (asked[1:4], static), (asked[4:], trees.policy)):
        with mock.patch.object(trees, "policy", policy):
            found, gained = engine.measured(part)
        outputs += found
        counted = {key: counted.get(key, 0) + value for key, value in gained.items()}
        assert (gained["draft_tokens"] == gained["draft_depth"]) == (len(part) == 1)
    return outputs, counted


def forget(engine: Engine) -> None:
    engine.idle()
    assert engine.llm.reset_prefix_cache()
    engine.speculator.backend.forget_media()


@pytest.fixture(scope="module")
def told(running) -> list[Any]:
    """What the target says by itself."""
    name, engine = running
    engine.retune(num_speculative_tokens=0)
    outputs, counted = engine.measured(requests(name, 10))
    engine.retune(num_speculative_tokens=None)
    assert not counted["draft_tokens"]
    return outputs


@pytest.mark.parametrize("way", ["plain", "prefix-hit", "chunked", "in parts"])
def test_every_draft_token_of_an_equal_draft_is_accepted(running, told, way):
    """Catches: other positions than the target's, features of another item or order, embeddings of half a video."""
    name, engine = running
    engine.retune(pruner="none")
    if way != "prefix-hit":
        forget(engine)
    scheduler = engine.scheduler
    with (
        mock.patch.object(scheduler, "max_num_scheduled_tokens", CHUNK if way == "chunked" else 2048),
        mock.patch.object(engine.draft, "max_encoder_tokens", PART if way == "in parts" else 2048),
    ):
        outputs, counted = batches(engine, requests(name, 10))
    assert_same_answers(told, outputs)
    assert_all_stands(counted)
    assert not skipped(counted) and not counted["draft_failures"]
    assert counted["visual_tokens_kept"] == counted["visual_tokens_full"] > 0
    if way == "prefix-hit":
        assert all(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("pruner", ["specvlm", "uv", "frame"])
def test_a_pruned_draft_sees_what_the_target_saw(running, told, pruner):
    """Rows that the draft keeps have the target's embeddings, ids and positions. Catches: positions off by one behind a
    pruned video; features of other tokens, which change no answer of an untrained model."""
    name, engine = running
    if pruner == "uv" and name in WITHOUT_STATES:
        pytest.skip("vLLM returns no hidden states of its decoder")
    engine.retune(pruner=pruner)
    forget(engine)
    before = engine.counters()
    seen, prefill = [], engine.speculator.backend.drafter.prefills
    prune = prefill._prune

    def noting(job: Any) -> None:
        prune(job)
        seen.append((job.req_id, job.plan, job.prompt, job.embeds, list(job.kept)))

    targets, cache, rope = {}, engine.runner.encoder_cache.encoder_outputs, engine.runner.model_state.rope_state
    add, wanted = engine.runner.requests.add, {}
    with (
        mock.patch.object(prefill, "_prune", noting),
        mock.patch.object(engine.runner.requests, "add", side_effect=add) as added,
    ):
        for asked in requests(name, 5):
            engine.begin([asked], steps=1)
            targets |= cache
            (new,) = (call.args[0] for call in added.call_args_list[len(wanted) :])
            row, ids = new.req_state_idx, torch.tensor(told[len(wanted)].prompt_token_ids)
            places = torch.arange(len(ids))[None]
            if rope is not None:
                places = rope.read_prefill_positions(row, len(ids)).long()
            delta = 0 if rope is None else int(rope.prefill_delta.np[row])
            wanted[new.req_id] = places.clone(), ids, delta
            assert engine.finish() == [list(told[len(wanted) - 1].outputs[0].token_ids)]
    assert len(seen) == len(wanted)
    guided = engine.counters()["guided_prompts"] - before["guided_prompts"]
    assert guided == (sum(bool(kept) for *_, kept in seen) if pruner in GUIDED else 0)
    for req_id, plan, prompt, embeds, kept in seen:
        positions, ids, delta = wanted[req_id]
        keep = torch.ones(len(ids), dtype=torch.bool)
        for item, rows in zip(plan.items, kept, strict=True):
            assert len(rows) == budget(item.num_tokens, 0.9 if item.feature.modality == "video" else 0.8)
            keep[item.where] = False
            keep[item.where[rows]] = True
        assert torch.equal(prompt.positions, positions[:, keep])
        assert torch.equal(prompt.token_ids, ids[keep].int()) and plan.pos_delta == delta
        if kept:
            of_target = [
                targets[item.feature.identifier].flatten(0, -2)[rows.sort().values]
                for item, rows in zip(plan.items, kept, strict=True)
            ]
            torch.testing.assert_close(embeds, torch.cat(of_target), rtol=1e-4, atol=1e-4)


SWEEP = 100  # requests of a family and a way to draft
WAYS: dict[str, dict[str, Any]] = {
    "trees": SPEC,
    "SpecVLM's trees": SPEC | {"drafting": "tree-static", "draft_table": None},
    "parallel": {"parallel": PARALLEL, "guidance_layers": "all"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", family_models.FAMILIES)
def test_a_long_sweep_is_vanillas(name, tmp_path):
    """Vanilla vLLM's own answers, of 100 requests a family, with and without a process of the drafter's own."""
    model, asked = family_models.build(name, tmp_path), requests(name, SWEEP)
    with start(name, model, None) as engine:
        expected = engine.generate(asked)
    for spec in WAYS.values():
        spec = {key: value for key, value in spec.items() if value is not None} | {"pruner": "none"}
        with start(name, model, model, **spec) as engine:
            with let_drafts_come(engine) if "parallel" in spec else contextlib.nullcontext():
                outputs, counted = engine.measured(asked)
            assert_same_answers(expected, outputs)
            assert_all_stands(counted)
            assert not skipped(counted) and not counted["stale_streams"]


def test_what_a_draft_cannot_hear_is_said_without_it(running, told):
    """Sound beside a video or its own costs that prompt its drafts, nobody else. Catches: sound taken for an image."""
    name, engine = running
    if "audio" not in family_models.FAMILIES[name].limits:
        pytest.skip("it does not hear")
    sound, frames = np.sin(np.arange(24_000) / 9).astype(np.float32), harness.shown(1)
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    beside = family_models.prompt(name, "what is said?", videos=frames, sound=sound)
    within = family_models.prompt(name, "what is said?", videos=frames)
    within["multi_modal_data"]["audio"] = [(sound, 16_000)]
    within["mm_processor_kwargs"] = engine.runner.model_config.multimodal_config.mm_processor_kwargs | {
        "use_audio_in_video": True
    }
    asked = [*requests(name, 2, max_tokens=12), (beside, sampling), (within, sampling)]
    engine.retune(pruner="none", num_speculative_tokens=0)
    forget(engine)
    expected = engine.generate(asked)
    engine.retune(num_speculative_tokens=None)
    forget(engine)
    outputs, counted = engine.measured(asked)
    assert_same_answers(expected, outputs)
    assert_all_stands(counted)
    assert skipped(counted) == {"unsupported": 2} and not counted["draft_failures"]
    assert engine.used_blocks() == 0
