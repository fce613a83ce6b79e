"""Scheduling situations and faults: the output stays vanilla's, the draft stays as good, and nothing leaks."""

import contextlib
import itertools
import json
from pathlib import Path
from unittest import mock

import pytest

from tests.engine import harness
from tests.engine.conftest import QUESTION, SCENARIOS
from tests.engine.harness import LLAVA, NO_CACHE, QWEN, TREES, assert_all_stands, assert_begins, skipped, token_ids
from tests.engine.seams import Drafter, DraftModel
from vllm_vidspec import metrics
from vllm_vidspec.engine.speculator import Speculator
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("family", "shape", "overrides"),
    [
        (LLAVA, "chain", {"max_num_batched_tokens": 64}),
        (QWEN, "chain", {"max_num_batched_tokens": 260}),
        (QWEN, "chain", {"async_scheduling": False}),
        (LLAVA, "tree-static", {"max_num_batched_tokens": 64}),
        pytest.param(QWEN, "tree-adaptive", {"max_num_batched_tokens": 260}, marks=pytest.mark.slow),
        pytest.param(QWEN, "tree-static", {"enforce_eager": False}, marks=pytest.mark.slow),  # compiles
        *((QWEN, shape, "async") for shape in ("chain", *TREES)),
    ],
)
def test_scheduling_changes_nothing(reference, family, shape, overrides):
    """Prefill in chunks (the draft's too) beside trees in one forward, trees cut by the token budget, compiled models.

    And a scheduler that runs a step ahead and always plans K drafts: trees are filled. Catches: positions or slots that
    restart with a chunk, a chunk that crosses two requests, stale host lengths or shapes, masks that reach prefill
    rows, a step that needs the host to know what was accepted, columns without a node that count as drafts.
    """
    expected, is_ahead = reference(family, "videos"), overrides == "async"
    with (
        harness.async_scheduling() if is_ahead else contextlib.nullcontext(),
        harness.engine(
            family, "target", overrides={} if is_ahead else overrides, drafting=shape, pruner="none"
        ) as engine,
    ):
        assert engine.core.engine_core.engine_core.async_scheduling == is_ahead
        num_drafts = engine.runner.num_speculative_steps
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        assert engine.used_blocks() == 0
    assert token_ids(outputs) == token_ids(expected)
    assert_all_stands(counted)
    if is_ahead:
        assert counted["draft_tokens"] == num_drafts * counted["drafts"]
    elif shape == "chain":
        assert counted["draft_tokens"] == counted["draft_depth"]
    elif shape == "tree-adaptive":  # no tree is filled where the scheduler can be told its size
        assert counted["draft_tokens"] < 32 * counted["drafts"]


def test_vllms_own_schedule_of_draft_lengths(reference):
    """`num_speculative_tokens_per_batch_size`: two drafts a step while eight run, five when three or fewer are left.

    Catches: KV state that assumes K levels a step.
    """
    schedule, expected = [(1, 3, 5), (4, 8, 2)], reference(QWEN, "videos")
    requests = [(p, {**a, "max_tokens": 7 + 3 * i}) for i, (p, a) in enumerate(SCENARIOS["videos"](QWEN))]
    with harness.engine(QWEN, "target", pruner="none", num_speculative_tokens_per_batch_size=schedule) as engine:
        outputs, counted = engine.measured(requests)
    assert [len(ids[0]) for ids in token_ids(outputs)] == [7 + 3 * i for i in range(8)]
    assert_begins(outputs, expected)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert counted["accepted_at_pos_4"] > 0
    assert counted["accepted_at_pos_0"] > counted["accepted_at_pos_4"]


def test_who_rests_misses_nothing(reference):
    """Three requests are drafted for, five join them and nobody is, until they end; a scheduler that runs ahead.

    Catches: a gap in the text that the draft has of who rested, from drafts that were in flight on; text that it never
    catches up on; a forward of the draft that nobody wants.
    """
    expected = token_ids(reference(QWEN, "endless"))
    requests = harness.videos(QWEN, 3, max_tokens=60, ignore_eos=True) + harness.videos(QWEN, 5, max_tokens=9)
    schedule = [(1, 3, 5), (4, 64, 0)]
    with (
        harness.async_scheduling(),
        harness.engine(QWEN, "target", pruner="none", num_speculative_tokens_per_batch_size=schedule) as engine,
    ):
        start = engine.counters()
        engine.begin(requests[:3], steps=6)
        before = engine.counters()
        engine.begin(requests[3:], steps=8)
        with mock.patch.object(engine.draft, "forward", side_effect=AssertionError("nobody wants it")):
            amid = engine.counters()
            engine.core.step()
        answers = {}
        while engine.core.has_unfinished_requests():
            done = [output for output in engine.core.step() if output.finished]
            answers |= {int(output.request_id): list(output.outputs[0].token_ids) for output in done}
        counted = metrics.difference(start, engine.counters())
        assert engine.used_blocks() == 0
    assert [len(answers[i]) for i in range(3)] == [60] * 3
    assert all(answers[i] == expected[i][0][:60] for i in range(3))
    assert 0 < before["drafts"] - start["drafts"] < counted["drafts"] - 9
    assert amid["undrafted_steps"] >= 6 and counted["undrafted_steps"] <= 12
    assert counted["accepted_tokens"] == counted["draft_tokens"] == 5 * counted["drafts"]


@pytest.mark.parametrize("shape", ["chain", "tree-static"])
def test_steps_for_which_no_drafts_are_asked(reference, shape):
    """From 0.33 on vLLM asks for 0 drafts where it knows that nobody can use them; here at every third step, of anyone.

    Catches: a batch that counts as too large, drafts in flight that nobody has made, text that the draft then lacks.
    """
    propose, steps, ids = Speculator.propose, itertools.count(), []

    def ask(self, batch, *args, dummy_run=False, **kwargs):
        is_skipped = not dummy_run and next(steps) % 3 == 2
        kwargs |= {"num_speculative_tokens": 0} if is_skipped else {}
        drafts = propose(self, batch, *args, dummy_run=dummy_run, **kwargs)
        if is_skipped:
            ids.extend(batch.req_ids)
            drafts[:] = -1  # as the runner does with what was not asked for
        return drafts

    with (
        mock.patch.object(Speculator, "propose", ask),
        harness.engine(QWEN, "target", drafting=shape, pruner="none") as engine,
    ):
        outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
        assert engine.used_blocks() == 0
    assert ids and token_ids(outputs) == token_ids(reference(QWEN, "videos"))
    assert counted["undrafted_steps"] == 0
    assert_all_stands(counted)


@pytest.mark.parametrize("is_covered", [False, True], ids=["part-of-the-video", "the-whole-video"])
def test_prefix_cache_hit_still_shows_the_draft_the_video(reference, is_covered):
    """The second time the target computes only the prompt's tail, and no encoder runs: the draft must see it all.

    Where the hit covers the whole video vLLM would drop its pixels; there it also leaves one token to compute, and vLLM
    schedules placeholders where drafts would be. Catches: a draft that goes blind, or an error, in the second turn of a
    conversation; placeholders counted as drafts on a row whose last request had some.
    """
    expected, requests = reference(QWEN, "long question"), harness.videos(QWEN, 8, QUESTION)
    # Blocks of 128 tokens end before the video does, blocks of 32 after it.
    overrides = {"block_size": 32 if is_covered else 128}
    with harness.engine(QWEN, "target", overrides=overrides, pruner="none") as engine:
        engine.generate([(prompt, {**arguments, "max_tokens": 1}) for prompt, arguments in requests])
        outputs, counted = engine.measured(requests)
    video_end = 3 + 256
    assert all((output.num_cached_tokens >= video_end) == is_covered for output in outputs)
    assert {len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs} == {1 if is_covered else 321 - 256}
    assert token_ids(outputs) == token_ids(expected)
    assert counted["visual_tokens_kept"] == 8 * 256
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "tree-static"])
def test_preemption_frees_and_rebuilds_the_draft(reference, shape):
    """A target cache too small for its requests: some are preempted, resumed with their output, and drafted again.

    Trees with prefix caching, and asked once more: resumed and prefix-cached requests get trees again. Catches: blocks
    that leak, and a request's own figures that begin anew when it resumes.
    """
    # Blocks of 128 tokens: prompts of 266 take three, answers outgrow them, and ten are not enough for three times
    # four.
    overrides = {"num_gpu_blocks_override": 11, "max_model_len": 512, "per_request_spec_decode_metrics": "summary"}
    if shape == "chain":
        overrides |= NO_CACHE
    expected, requests = reference(QWEN, "endless"), harness.videos(QWEN, 5, max_tokens=130, ignore_eos=True)
    with harness.engine(QWEN, "target", overrides=overrides, pruner="none", drafting=shape) as engine:
        with engine.preemptions() as preempted:
            outputs, counted = engine.measured(requests)
        again, again_counted = engine.measured(requests[-1:])
        used = engine.used_blocks()
    told = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    assert preempted and bool(again[0].num_cached_tokens) == (shape != "chain"), "the situation did not arise"
    assert sum(one["num_exact_draft_tokens"] for one in told) == counted["accepted_tokens"]
    assert len({one["num_exact_draft_tokens"] for one in told}) == 1, "all are as long, so all say the same"
    assert_begins(outputs, expected)
    assert token_ids(again) == token_ids(outputs[-1:])
    for values in (counted, again_counted):
        assert_all_stands(values)
    assert counted["prompts"] > 5
    assert used == 0


def test_full_pool_means_fewer_drafts_not_other_answers(reference):
    """A pool with room for two of eight requests: the rest run without speculation until there is some, identical.

    Who outgrows it in the middle of its answer waits too, and loses nothing of its answer. Catches: prompts counted as
    guided that no draft was shown; a refusal that is final; blocks that those who wait never give back; a request that
    waits for room that the whole pool does not have.
    """
    expected, endless = reference(QWEN, "videos"), reference(QWEN, "endless")
    with harness.engine(QWEN, "target") as engine:
        per_block = engine.draft.bytes_per_block
        del engine.kv._free[2:]
        _, counted = engine.measured(harness.videos(QWEN, 4, max_tokens=2))
    assert counted["guided_prompts"] == counted["prompts"] == 4 - counted["skipped_pool_full"] == 2
    # Each prompt takes 3 blocks of 128; at 384 tokens each needs a fourth, and only one is left.
    with harness.engine(QWEN, "target", pruner="none", draft_kv_bytes=8 * per_block) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
        grown, grown_counted = engine.measured(harness.videos(QWEN, 2, max_tokens=140, ignore_eos=True))
        del engine.kv._free[3:]
        engine.kv.num_blocks = 4  # beside the null block exactly one prompt
        outgrown, outgrown_counted = engine.measured(harness.videos(QWEN, 3, max_tokens=140, ignore_eos=True))
        engine.kv.num_blocks, engine.kv._free = 3, engine.kv._free[:2]
        unfit, unfit_counted = engine.measured(harness.videos(QWEN, 2, max_tokens=8))
        used = engine.used_blocks()
    assert token_ids(outputs) == token_ids(expected)
    assert skipped(counted) == {"pool_full": counted["resumed_drafts"]} and counted["resumed_drafts"] > 3
    assert counted["prompts"] == 8
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert_begins(grown, endless)
    assert skipped(grown_counted) == {} and grown_counted["prompts"] == 2
    assert grown_counted["waiting_drafts"] == 1 and grown_counted["resumed_drafts"] == 1
    # Nobody waits for blocks that there are not: the first outgrows the whole pool, and makes room for the next.
    assert_begins(outgrown, endless)
    assert outgrown_counted["skipped_too_long"] == outgrown_counted["prompts"] >= 1
    assert outgrown_counted["waiting_drafts"] == 0 and outgrown_counted["draft_tokens"] > 0
    # Nor for a place that no prompt could have.
    assert_begins(unfit, expected)
    assert skipped(unfit_counted) == {"too_long": 2} and unfit_counted["draft_tokens"] == 0
    assert used == 0


@pytest.mark.parametrize("shape", ["chain", "tree-static"])
def test_context_length_ends_drafting_cleanly(reference, shape):
    """Answers that run into max_model_len: the scheduler cuts chains and trees, nothing is drafted past the end.

    Two of the videos are long and sparse: their rope positions follow the clock, far past max_model_len. Catches: rope
    positions bounded by the number of tokens instead of by the rope table; a cut tree taken for a whole one (planted in
    test_trees.py, and seen to differ or to fail).
    """
    sparse, endless = reference(QWEN, "sparse"), reference(QWEN, "endless")
    requests = [*SCENARIOS["sparse"](QWEN), *harness.videos(QWEN, 4, max_tokens=100, ignore_eos=True)]
    overrides = {"max_model_len": 320}
    with harness.engine(QWEN, "target", overrides=overrides, pruner="none", drafting=shape) as engine:
        outputs, counted = engine.measured(requests)
        assert engine.kv.pos_delta_np.max() > overrides["max_model_len"]
        used = engine.used_blocks()
    assert {(o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) for o in outputs} == {("length", 320 - 266)}
    assert_begins(outputs, [*sparse, *endless])
    assert_all_stands(counted)
    assert counted["draft_tokens"] == counted["draft_depth"] or shape != "chain"
    assert shape == "chain" or counted["draft_tokens"] < 25 * counted["drafts"]
    assert not skipped(counted)
    assert used == 0


def test_a_draft_with_a_shorter_context_stops_at_its_end(reference, tmp_path):
    """The target's own weights, but rope tables that end in the middle of the answers: drafted up to there, counted.

    Catches: a rope table read past its end, drafts that go on blindly, a request that stops a step too early.
    """
    num_more, answers = 14, reference(LLAVA, "videos")
    (num_prompt_tokens,) = {len(output.prompt_token_ids) for output in answers}
    original = Path(pairs.checkpoint(LLAVA, "target"))
    for file in original.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = num_positions = num_prompt_tokens + num_more
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with harness.engine(LLAVA, str(tmp_path), pruner="none") as engine:
        assert engine.draft.num_positions == num_positions
        outputs, counted = engine.measured(SCENARIOS["videos"](LLAVA))
        used = engine.used_blocks()
    assert token_ids(outputs) == token_ids(answers)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 8 * num_more // 2
    assert skipped(counted) == {"too_long": sum(len(output.outputs[0].token_ids) > num_more for output in answers)}
    assert used == 0


def test_long_prompts_can_be_left_out(reference):
    """`max_draft_len` below the pruned prompt: no drafts, a counter, vanilla's answer."""
    expected = reference(QWEN, "videos")
    with harness.engine(QWEN, "draft", max_draft_len=20) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
    assert token_ids(outputs) == token_ids(expected)
    assert skipped(counted) == {"too_long": 8}
    assert counted["draft_tokens"] == 0


@pytest.mark.draft_errors
def test_draft_errors_cost_drafts_only(reference, monkeypatch):
    """An exception anywhere in the draft: logged, counted, and every request is answered as by vanilla."""
    expected = reference(QWEN, "videos")

    def fail(*args, **kwargs):
        raise RuntimeError("planted")

    with harness.engine(QWEN, "draft", on_draft_error="skip", max_draft_failures=1000) as engine:
        for owner, method in ((Drafter, "add"), (Drafter, "prefill"), (Drafter, "draft"), (DraftModel, "encode")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, fail)
                outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
            assert token_ids(outputs) == token_ids(expected), method
            assert skipped(counted) == {"draft_error": 8}, method
            assert counted["draft_tokens"] == 0
            assert engine.used_blocks() == 0
            engine.speculator.backend.forget_media()
        _, recovered = engine.measured(SCENARIOS["videos"](QWEN))
    assert recovered["draft_tokens"] > 0


@pytest.mark.parametrize("shape", ["chain", "tree-adaptive"])
def test_aborts_and_grammars(reference, shape):
    """Requests aborted while they are drafted for give their blocks back.

    A grammar binds the target's samples at every draft position of a chain, and drafts that break it are rejected;
    for trees nothing is drafted under one, which is counted.
    """
    expected = reference(QWEN, "grammar")
    with harness.engine(QWEN, "draft", drafting=shape) as engine:
        engine.begin(harness.videos(QWEN, 4, max_tokens=200, ignore_eos=True), steps=10)
        assert engine.kv.num_used_blocks >= 4
        engine.abort()
        assert engine.used_blocks() == 0
        outputs, counted = engine.measured(SCENARIOS["grammar"](QWEN))
    assert token_ids(outputs) == token_ids(expected)
    assert skipped(counted) == ({} if shape == "chain" else {"structured": 3})
    assert counted["accepted_tokens"] > 0
