"""Scheduling situations and faults: the output stays vanilla's, the draft stays as good, and nothing leaks."""

import json
from pathlib import Path

import pytest

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs

FAMILY = "qwen2.5-vl"


def skipped(counted: dict[str, int]) -> dict[str, int]:
    """Return the counted reasons for running without speculation."""
    return {name.removeprefix("skipped_"): n for name, n in counted.items() if name.startswith("skipped_") and n}


def used_blocks(engine: harness.Engine) -> int:
    """Return the pool's used blocks after the runner has been told that all requests are finished."""
    engine.generate([(pairs.media_prompt(FAMILY, "describe the video"), {"max_tokens": 1})])
    return engine.speculator.drafter.pool.num_used_blocks


def run_equal_draft(family: str, overrides: dict, scenario: str = "videos", **spec) -> tuple[list, dict, int]:
    """Draft with the target itself under engine overrides; return outputs, counters, blocks still used at the end."""
    with harness.engine(family, "target", overrides=overrides, pruner="none", **spec) as engine:
        outputs, counted = engine.measured(SCENARIOS[scenario](family))
        return outputs, counted, used_blocks(engine)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llava-onevision", {"max_num_batched_tokens": 64}),
        ("qwen2.5-vl", {"max_num_batched_tokens": 260}),  # vLLM's encoder budget must hold one video
        ("qwen2.5-vl", {"async_scheduling": False}),
    ],
    ids=["chunks-of-64", "chunks-of-260", "sync-scheduling"],
)
def test_scheduling_changes_nothing(reference, family, overrides):
    """Prefill in chunks (the draft's too), and the other scheduler: every draft of an equal draft still stands.

    Catches: positions or slots that restart with a chunk, a chunk that crosses two requests, stale host lengths.
    """
    outputs, counted, used = run_equal_draft(family, overrides)
    assert harness.token_ids(outputs) == harness.token_ids(reference(family, "videos"))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert used == 0


def test_vllms_own_schedule_of_draft_lengths(reference):
    """`num_speculative_tokens_per_batch_size`: two drafts a step while eight run, five when three or fewer are left.

    Catches: KV state that assumes K levels a step.
    """
    schedule = [(1, 3, 5), (4, 8, 2)]
    requests = [(p, {**a, "max_tokens": 12 + 4 * i}) for i, (p, a) in enumerate(SCENARIOS["videos"](FAMILY))]
    with harness.engine(FAMILY, "target", pruner="none", num_speculative_tokens_per_batch_size=schedule) as engine:
        outputs, counted = engine.measured(requests)
    expected = harness.token_ids(reference(FAMILY, "videos"))
    assert harness.token_ids(outputs) == [[ids[0][: 12 + 4 * i]] for i, ids in enumerate(expected)]
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert counted["accepted_at_pos_4"] > 0
    assert counted["accepted_at_pos_0"] > counted["accepted_at_pos_4"]


@pytest.mark.parametrize("is_covered", [False, True], ids=["part-of-the-video", "the-whole-video"])
def test_prefix_cache_hit_still_shows_the_draft_the_video(is_covered):
    """The second time the target computes only the prompt's tail, and no encoder runs: the draft must see it all.

    Where the hit covers the whole video vLLM would drop its pixels; there it also leaves one token to compute, and vLLM
    schedules placeholders where drafts would be. Catches: a draft that goes blind, or an error, in the second turn of a
    conversation; placeholders counted as drafts on a row whose last request had some.
    """
    question = "describe the video . what happens in this clip ? tell me about color and shape and move " * 2
    question += "color " * 22  # prompts of 10 * 32 + 1 tokens
    requests = [
        (pairs.video_prompt(FAMILY, world.held_out(i).frames, question), {"temperature": 0.0}) for i in range(8)
    ]
    # Blocks of 128 tokens end before the video does, blocks of 32 after it.
    overrides = {"block_size": 32 if is_covered else 128}
    with harness.engine(FAMILY, overrides=overrides) as vanilla:
        expected = vanilla.generate(requests)
    with harness.engine(FAMILY, "target", overrides=overrides, pruner="none") as engine:
        engine.generate(requests)
        outputs, counted = engine.measured(requests)
    video_end = 3 + 256
    assert all((output.num_cached_tokens >= video_end) == is_covered for output in outputs)
    assert {len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs} == {1 if is_covered else 321 - 256}
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert counted["visual_tokens_kept"] == 8 * 256
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0


def test_preemption_frees_and_rebuilds_the_draft(reference):
    """A target cache too small for its requests: some are preempted, resumed with their output, and drafted again.

    Catches: blocks that leak, and a request's own figures that begin anew when it resumes.
    """
    # Blocks of 128 tokens: prompts of 266 take three, answers outgrow them, and ten are not enough for three times
    # four.
    num_blocks = 11
    with harness.engine(
        FAMILY,
        "target",
        overrides={
            "num_gpu_blocks_override": num_blocks,
            "max_model_len": 512,
            "enable_prefix_caching": False,
            "per_request_spec_decode_metrics": "summary",
        },
        pruner="none",
    ) as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **k: (preempted.append(request), original(request, *a, **k))[1]
        requests = harness.videos(FAMILY, 5, max_tokens=150, ignore_eos=True)
        outputs, counted = engine.measured(requests)
        used = used_blocks(engine)
    with harness.engine(FAMILY) as vanilla:
        expected = vanilla.generate(requests)
        told = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    assert preempted, "the situation did not arise"
    assert sum(one["num_exact_draft_tokens"] for one in told) == counted["accepted_tokens"]
    assert len({one["num_exact_draft_tokens"] for one in told}) == 1, "all are as long, so all say the same"
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert counted["prompts"] > 5
    assert used == 0


def test_full_pool_means_fewer_drafts_not_other_answers(reference):
    """A pool with room for two of eight requests: the rest run without speculation, counted, identical.

    Catches: prompts counted as guided that no draft was shown.
    """
    with harness.engine(FAMILY, "target") as engine:
        per_block = engine.speculator.draft_model.bytes_per_block
        del engine.speculator.drafter.pool._free[2:]
        _, counted = engine.measured(harness.videos(FAMILY, 4, max_tokens=2))
    assert counted["guided_prompts"] == counted["prompts"] == 4 - counted["skipped_pool_full"] == 2
    with harness.engine(FAMILY, "target", pruner="none", draft_kv_bytes=7 * per_block) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](FAMILY))
        used = used_blocks(engine)
    assert harness.token_ids(outputs) == harness.token_ids(reference(FAMILY, "videos"))
    assert set(skipped(counted)) == {"pool_full"}
    assert counted["prompts"] == 8 - counted["skipped_pool_full"] > 0
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert used == 0


def test_requests_grow_into_a_pool_that_is_almost_full():
    """Requests that outgrow the pool in the middle of their answer lose their drafts, not their answer."""
    requests = harness.videos(FAMILY, 2, max_tokens=200, ignore_eos=True)
    with harness.engine(FAMILY) as vanilla:
        expected = vanilla.generate(requests)
        per_block = 0
    with harness.engine(FAMILY, "target", pruner="none", draft_kv_bytes=2**24) as engine:
        per_block = engine.speculator.draft_model.bytes_per_block
    # Each prompt takes 3 blocks of 128; at 384 tokens each needs a fourth, and only one is left.
    with harness.engine(FAMILY, "target", pruner="none", draft_kv_bytes=8 * per_block) as engine:
        outputs, counted = engine.measured(requests)
        used = used_blocks(engine)
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert skipped(counted) == {"pool_full": 1}
    assert used == 0


def test_context_length_ends_drafting_cleanly():
    """Answers that run into max_model_len: chains are cut by the scheduler, nothing is drafted past the end.

    Two of the videos are long and sparse: their rope positions follow the clock, far past max_model_len. Catches: rope
    positions bounded by the number of tokens instead of by the rope table.
    """
    requests = harness.videos(FAMILY, 6, max_tokens=100, ignore_eos=True)
    for prompt, _ in requests[4:]:
        ((_, metadata),) = prompt["multi_modal_data"]["video"]
        metadata.update(fps=metadata["fps"] / 60, duration=metadata["duration"] * 60)
    overrides = {"max_model_len": 320}
    with harness.engine(FAMILY, overrides=overrides) as vanilla:
        expected = vanilla.generate(requests)
    with harness.engine(FAMILY, "target", overrides=overrides, pruner="none") as engine:
        outputs, counted = engine.measured(requests)
        assert engine.speculator.drafter.rows.pos_delta_np.max() > overrides["max_model_len"]
        used = used_blocks(engine)
    assert {output.outputs[0].finish_reason for output in expected} == {"length"}
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert not skipped(counted)
    assert used == 0


def test_a_draft_with_a_shorter_context_stops_at_its_end(reference, tmp_path):
    """The target's own weights, but rope tables that end in the middle of the answers: drafted up to there, counted.

    Catches: a rope table read past its end, drafts that go on blindly, a request that stops a step too early.
    """
    family, num_more = "llava-onevision", 20
    answers = reference(family, "videos")
    (num_prompt_tokens,) = {len(output.prompt_token_ids) for output in answers}
    original = Path(pairs.checkpoint(family, "target"))
    for file in original.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = num_positions = num_prompt_tokens + num_more
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with harness.engine(family, str(tmp_path), pruner="none") as engine:
        assert engine.speculator.draft_model.num_positions == num_positions
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        used = used_blocks(engine)
    assert harness.token_ids(outputs) == harness.token_ids(answers)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 8 * num_more // 2
    assert skipped(counted) == {"too_long": sum(len(output.outputs[0].token_ids) > num_more for output in answers)}
    assert used == 0


def test_long_prompts_can_be_left_out(reference):
    """`max_draft_len` below the pruned prompt: no drafts, a counter, vanilla's answer."""
    with harness.engine(FAMILY, "draft", max_draft_len=20) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](FAMILY))
    assert harness.token_ids(outputs) == harness.token_ids(reference(FAMILY, "videos"))
    assert skipped(counted) == {"too_long": 8}
    assert counted["draft_tokens"] == 0


@pytest.mark.parametrize(
    ("owner", "method"), [(Drafter, "admit"), (Drafter, "prefill"), (Drafter, "draft"), (DraftModel, "encode")]
)
def test_draft_errors_cost_drafts_only(reference, monkeypatch, owner, method):
    """An exception anywhere in the draft: logged, counted, and every request is answered as by vanilla."""

    def fail(*args, **kwargs):
        raise RuntimeError("planted")

    with harness.engine(FAMILY, "draft", on_draft_error="skip") as engine:
        monkeypatch.setattr(owner, method, fail)
        outputs, counted = engine.measured(SCENARIOS["videos"](FAMILY))
        monkeypatch.undo()
        used = used_blocks(engine)
        _, recovered = engine.measured(SCENARIOS["videos"](FAMILY))
    assert harness.token_ids(outputs) == harness.token_ids(reference(FAMILY, "videos"))
    assert skipped(counted) == {"draft_error": 8}
    assert counted["draft_tokens"] == 0
    assert used == 0
    assert recovered["draft_tokens"] > 0


def test_abort_frees_the_pool():
    """Requests aborted while they are drafted for give their blocks back."""
    from vllm import SamplingParams

    with harness.engine(FAMILY, "draft") as engine:
        core = engine.llm.llm_engine
        for i in range(4):
            prompt = pairs.video_prompt(FAMILY, world.held_out(i).frames)
            engine.llm.enqueue([prompt], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        for _ in range(12):
            core.step()
        held = engine.speculator.drafter.pool.num_used_blocks
        core.abort_request(list(core.output_processor.request_states), internal=True)
        while core.has_unfinished_requests():
            core.step()
        assert held >= 4
        assert used_blocks(engine) == 0


def test_structured_output(reference):
    """A grammar binds the target's samples at every draft position; drafts that break it are rejected."""
    from vllm.sampling_params import StructuredOutputsParams

    # The bundled tokenizer is word level, so a grammar sees words without the spaces between them.
    grammar = {"structured_outputs": StructuredOutputsParams(regex="(the|red|blue|moves|left|a|circle){6,12}")}
    requests = [(prompt, {**args, **grammar}) for prompt, args in harness.videos(FAMILY, 3)]
    requests += harness.videos(FAMILY, 2)
    with harness.engine(FAMILY) as vanilla:
        expected = vanilla.generate(requests)
    with harness.engine(FAMILY, "draft") as engine:
        outputs, counted = engine.measured(requests)
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert counted["accepted_tokens"] > 0
