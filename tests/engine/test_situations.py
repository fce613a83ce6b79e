"""Situations beyond the matrix's: the output stays vanilla's, the draft stays as good, and nothing leaks."""

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import harness
from tests.engine.conftest import QUESTION, SCENARIOS
from tests.engine.harness import LLAVA, NO_CACHE, QWEN, assert_all_stands, assert_begins, skipped, token_ids
from vllm_vidspec import metrics
from vllm_vidspec.engine.speculator import Speculator
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine


def test_who_is_paused_misses_nothing(reference):
    """Two drafts for four requests, none for eight, five for three, running ahead: no gap in the draft's text."""
    expected, lengths = token_ids(reference(QWEN, "endless")), [60, 60, 60, 45]
    endless = harness.videos(QWEN, 4, ignore_eos=True)
    requests = [(prompt, {**more, "max_tokens": n}) for (prompt, more), n in zip(endless, lengths, strict=True)]
    schedule = [(1, 3, 5), (4, 4, 2), (5, 64, 0)]
    by_load = {"num_speculative_tokens_per_batch_size": schedule}
    with harness.engine(QWEN, "target", is_ahead=True, pruner="none", **by_load) as engine:
        start = engine.counters()
        engine.begin(requests, steps=6)
        before = engine.counters()
        engine.begin(harness.videos(QWEN, 4, max_tokens=9), steps=8)
        with mock.patch.object(engine.draft, "forward", side_effect=AssertionError("nobody wants it")):
            amid = engine.counters()
            engine.core.step()
        answers = engine.finish()
        counted = metrics.difference(start, engine.counters())
        assert engine.used_blocks() == 0
    assert answers[:4] == [expected[i][0][:length] for i, length in enumerate(lengths)]
    assert 0 < before["drafts"] - start["drafts"] < counted["drafts"] - 9
    assert amid["undrafted_steps"] >= 6 and counted["undrafted_steps"] <= 12
    assert counted["accepted_tokens"] == counted["draft_tokens"]
    assert counted["accepted_at_pos_0"] > counted["accepted_at_pos_4"] > 0


def test_steps_for_which_no_drafts_are_asked(reference):
    """At every third step vLLM asks for 0 drafts, as 0.33 does: no batch is too large, and the draft lacks no text."""
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
        harness.engine(QWEN, "target", drafting="tree-static", pruner="none") as engine,
    ):
        outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
        assert engine.used_blocks() == 0
    assert ids and token_ids(outputs) == token_ids(reference(QWEN, "videos"))
    assert counted["undrafted_steps"] == 0
    assert_all_stands(counted)


def test_every_request_counts_as_something():
    """Answers that end before the draft has read a prompt, 64 tokens a step; of one token; of several for one prompt;
    one that is aborted; grammars beside trees; drafts that are switched off; all that could, paused by the policy.

    Catches: a request that is drafted for never, and counted nowhere; one that counts twice, for a preemption too.
    """
    text, long = (
        ({"prompt": pairs.media_prompt(LLAVA, question)["prompt"]}, {"temperature": 0.0, "ignore_eos": True})
        for question in ("describe the video", QUESTION * 4)
    )

    def with_tokens(request, num_tokens, **more):
        return request[0], {**request[1], "max_tokens": num_tokens, **more}

    overrides = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **NO_CACHE}
    with harness.engine(LLAVA, "draft", overrides, drafting="tree-static") as engine:
        before = engine.counters()

        def ended():
            engine.core.step()  # vLLM tells of the last one's end with the next step
            gained = metrics.difference(before, engine.counters())
            names = ("drafted_requests", *(f"undrafted_{reason}" for reason in metrics.UNDRAFTED_REASONS))
            return {name: gained[name] for name in names if gained[name]} | skipped(gained)

        engine.generate([with_tokens(long, 2), with_tokens(long, 3), with_tokens(text, 1)])
        assert ended() == {"undrafted_short": 3}
        engine.generate([with_tokens(text, 12), with_tokens(text, 9, n=2, temperature=1.0), *harness.videos(LLAVA, 1)])
        assert ended() == {"undrafted_short": 3, "drafted_requests": 4}
        engine.begin([with_tokens(text, 60)], steps=9)
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.begin([], steps=9)
        engine.abort()
        assert ended() == {"undrafted_short": 3, "drafted_requests": 5}
        grammar = StructuredOutputsParams(choice=["describe", "video"])
        engine.generate([with_tokens(text, 9, ignore_eos=False, structured_outputs=grammar)])
        assert ended() == {"undrafted_short": 3, "drafted_requests": 5, "structured": 1}
        with engine.scheduler._vidspec_side.retuned({"num_speculative_tokens": 0}):
            pass
        engine.generate([with_tokens(text, 9)] * 2)
        assert ended() == {"undrafted_short": 3, "drafted_requests": 5, "structured": 1, "undrafted_paused": 2}


def test_full_pool_means_fewer_drafts_not_other_answers(reference):
    """A pool with room for two of eight: the rest wait, who outgrows it too; nobody waits for what there is not."""
    expected, endless = reference(QWEN, "videos"), reference(QWEN, "endless")
    twin = pairs.checkpoint(QWEN, "target")
    with harness.engine(QWEN, twin) as engine:
        per_block = engine.draft.bytes_per_block
        del engine.kv._free[2:]
        _, counted = engine.measured(harness.videos(QWEN, 4, max_tokens=2))
    assert counted["guided_prompts"] == counted["prompts"] == 4 - counted["skipped_pool_full"] == 2
    # Each prompt takes 3 blocks of 128; at 384 tokens each needs a fourth, and only one is left.
    with harness.engine(QWEN, twin, pruner="none", draft_kv_bytes=8 * per_block) as engine:
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


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "tree-static"])
def test_context_length_ends_drafting_cleanly(reference, shape):
    """Answers run into max_model_len, sparse videos' rope positions past it: trees and chains are cut, none is lost."""
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
    """Rope tables that end in the middle of the answers: drafted up to there and no step less, counted."""
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
