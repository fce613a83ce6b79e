"""Trees: identity, exactness under every sampling parameter, planted bugs, and the situations a scheduler makes."""

import dataclasses

import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.test_identity import FAMILIES, assert_same_answers
from tests.engine.test_situations import used_blocks
from vllm_vidspec import metrics
from vllm_vidspec.bench import pairs, shape_world
from vllm_vidspec.engine import tree_drafter
from vllm_vidspec.engine.target_trees import TargetTrees
from vllm_vidspec.scoring import Scored, strict

SHAPES = ("tree-static", "tree-adaptive")
# A caterpillar: each level has a decoy, and the right token after it.
DECOYS = [[0], [1], [1, 0], [1, 1], [1, 1, 0], [1, 1, 1]]


def assert_full_depth(counted: dict[str, int]) -> None:
    """Every step accepted as deep a path as its tree has."""
    assert counted["accepted_tokens"] == counted["draft_depth"] > 0
    assert counted["draft_tokens"] > counted["draft_depth"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_draft_equal_to_target_accepts_a_full_depth_path_every_step(reference, family, shape):
    """Batch of 8, greedy and sampled: acceptance length = depth + 1, and nothing changes.

    Catches: a mask that loses an ancestor at some level (the public reference does, at single-query levels), positions
    by slot, KV of the wrong branch, noise keyed by slot.
    """
    with harness.engine(family, "target", drafting=shape, pruner="none") as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        sampled, sampled_counted = engine.measured(SCENARIOS["sampled"](family))
    assert_same_answers(reference(family, "videos"), outputs)
    assert_same_answers(reference(family, "sampled"), sampled)
    for values in (counted, sampled_counted):
        assert_full_depth(values)
        assert values["draft_forwards"] <= 8 * values["draft_steps"]
        if shape == "tree-static":
            assert values["draft_depth"] == 5 * values["drafts"]
            assert values["draft_tokens"] == 25 * values["drafts"]
            assert values["draft_forwards"] == 5 * values["draft_steps"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_small_pruned_draft_changes_nothing(reference, family, shape):
    """Twenty requests of every modality and every sampling parameter in one continuous batch, draft at 10 %.

    Catches: penalties or bad words counted along the slots instead of a node's own path, logprobs in node order,
    a tree of one request that reaches another's rows.
    """
    with harness.engine(family, "draft", drafting=shape) as engine:
        outputs, counted = engine.measured(SCENARIOS["mixed"](family))
    assert_same_answers(reference(family, "mixed"), outputs)
    assert counted["accepted_tokens"] > 0
    assert not any(value for name, value in counted.items() if name.startswith("skipped_"))


@pytest.fixture(scope="module")
def decoys(reference):
    """The target drafts for itself, its best candidate always listed second: every accepted path is out of order."""
    reference("llava-onevision", "videos")  # one engine at a time
    with harness.engine(
        "llava-onevision", "target", pruner="none", drafting="tree-static", tree_paths=DECOYS, num_speculative_tokens=6
    ) as engine:
        yield engine


def check_decoys(engine, reference) -> None:
    """Every step accepts the three tokens behind the decoys; the output is vanilla's, greedy and sampled."""
    original = tree_drafter.candidates

    def decoy_first(*arguments):
        return tuple(ranked.flip(1) for ranked in original(*arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_drafter, "candidates", decoy_first)
        for scenario in ("videos", "sampled"):
            outputs, counted = engine.measured(SCENARIOS[scenario](engine.family))
            assert harness.token_ids(outputs) == harness.token_ids(reference(engine.family, scenario))
            assert counted["accepted_tokens"] == counted["draft_depth"] == 3 * counted["drafts"] > 0


def test_branches_behind_decoys_are_accepted(decoys, reference):
    """Catches: every mutation below."""
    check_decoys(decoys, reference)


def no_depth_positions(patch) -> None:
    """Nodes keep the position of their slot."""
    original = TargetTrees._find

    def by_slot(self, batch, chosen):
        step = original(self, batch, chosen)
        return dataclasses.replace(step, depths=torch.arange(step.depths.shape[1]).expand_as(step.depths))

    patch.setattr(TargetTrees, "_find", by_slot)


def no_compaction(patch) -> None:
    """The accepted path's KV stays where the nodes were."""
    patch.setattr(TargetTrees, "compact", lambda self, num_accepted: None)


def leaking_sibling(patch) -> None:
    """Every node also attends to the node before it."""
    original = TargetTrees._find

    def leaking(self, batch, chosen):
        step = original(self, batch, chosen)
        step.attention.masks.bitwise_or_(step.attention.masks.roll(1, dims=1))
        return step

    patch.setattr(TargetTrees, "_find", leaking)


def wrong_branch(patch) -> None:
    """The right tokens stand, but the KV of the first branch is kept."""
    original = strict.accept

    def first_branch(*args):
        scored = Scored(*original(*args))
        in_order = torch.arange(scored.path.shape[1], dtype=torch.int32)
        return scored.sampled, scored.num_sampled, in_order.expand_as(scored.path), None

    patch.setattr(strict, "accept", first_branch)


def noise_by_slot(patch) -> None:
    """A node's noise is that of its slot, not of its depth."""
    original = TargetTrees.shapes

    def flat(self, rows):
        shapes = original(self, rows)
        in_order = torch.arange(shapes.depths.shape[1], dtype=torch.int32)
        return type(shapes)(rows, shapes.parents, in_order.expand_as(shapes.depths), shapes.ancestors)

    patch.setattr(TargetTrees, "shapes", flat)


@pytest.mark.parametrize("mutation", [no_depth_positions, no_compaction, leaking_sibling, wrong_branch, noise_by_slot])
def test_planted_bug_is_caught(decoys, reference, mutation):
    """Each changes the output of the run above, or its acceptance."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(AssertionError):
            check_decoys(decoys, reference)


def untruncated(patch) -> None:
    """The verifier takes every tree for whole: its last nodes' rows belong to the next request."""
    original = strict.accept

    def whole(target_tokens, draft_tokens, cu_num_logits, max_drafts, trees):
        pad = torch.zeros(max_drafts + 1, dtype=torch.int64)
        starts = cu_num_logits[:-1]
        targets, drafts = torch.cat((target_tokens, pad)), torch.cat((draft_tokens, pad))
        rows = (starts[:, None] + torch.arange(max_drafts + 1)).flatten()
        bounds = torch.arange(len(starts) + 1, dtype=torch.int32) * (max_drafts + 1)
        return original(targets[rows], drafts[rows], bounds, max_drafts, trees)

    patch.setattr(strict, "accept", whole)


def test_trees_cut_at_the_context_length():
    """Answers that run into max_model_len: the scheduler cuts trees, the rest of each is still verified.

    Catches: a cut tree taken for a whole one (planted at the end, and seen to differ or to fail).
    """
    requests = harness.videos("qwen2.5-vl", 4, max_tokens=100, ignore_eos=True)
    overrides = {"max_model_len": 320}
    with harness.engine("qwen2.5-vl", overrides=overrides) as vanilla:
        expected = vanilla.generate(requests)
    assert {output.outputs[0].finish_reason for output in expected} == {"length"}

    def check(engine) -> None:
        outputs, counted = engine.measured(requests)
        assert harness.token_ids(outputs) == harness.token_ids(expected)
        assert counted["draft_tokens"] < 25 * counted["drafts"]
        assert counted["accepted_tokens"] == counted["draft_depth"]

    with harness.engine("qwen2.5-vl", "target", overrides=overrides, pruner="none", drafting="tree-static") as engine:
        check(engine)
        assert used_blocks(engine) == 0
        with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, RuntimeError)):
            untruncated(patch)
            check(engine)


@pytest.mark.parametrize(
    ("family", "shape", "overrides"),
    [
        ("llava-onevision", "tree-static", {"max_num_batched_tokens": 64}),
        ("qwen2.5-vl", "tree-adaptive", {"max_num_batched_tokens": 260}),
        ("qwen2.5-vl", "tree-static", {"enforce_eager": False}),
    ],
    ids=["chunks-of-64", "chunks-of-260", "torch-compile"],
)
def test_scheduling_changes_nothing(reference, family, shape, overrides):
    """Chunked prefill beside trees in one forward, trees cut by the token budget, trees of any size, compiled models.

    Catches: masks that reach prefill rows, stale shapes, node counts that the scheduler does not know.
    """
    with harness.engine(family, "target", overrides=overrides, drafting=shape, pruner="none") as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        assert used_blocks(engine) == 0
    assert harness.token_ids(outputs) == harness.token_ids(reference(family, "videos"))
    assert counted["accepted_tokens"] == counted["draft_depth"] > 0
    if shape == "tree-adaptive":  # no tree is filled where the scheduler can be told its size
        assert counted["draft_tokens"] < 32 * counted["drafts"]


@pytest.mark.parametrize("shape", ["chain", *SHAPES])
def test_forced_async_scheduling(reference, shape):
    """The scheduler runs a step ahead and always plans K drafts: trees are filled, acceptance and output stay.

    vLLM's CPU platform turns async scheduling off, so it is turned on again behind it. Catches: a step that needs the
    host to know what was accepted, columns without a node that count as drafts.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config):
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
        with harness.engine("qwen2.5-vl", "target", drafting=shape, pruner="none") as engine:
            assert engine.llm.llm_engine.engine_core.engine_core.async_scheduling
            num_drafts = engine.runner.num_speculative_steps
            outputs, counted = engine.measured(SCENARIOS["videos"]("qwen2.5-vl"))
            assert used_blocks(engine) == 0
    assert harness.token_ids(outputs) == harness.token_ids(reference("qwen2.5-vl", "videos"))
    assert counted["accepted_tokens"] == counted["draft_depth"] > 0
    assert counted["draft_tokens"] == num_drafts * counted["drafts"]


def test_prefix_hits_and_preemption():
    """A target cache too small for its requests, asked twice: resumed and prefix-cached requests get trees again."""
    overrides = {"num_gpu_blocks_override": 12, "max_model_len": 512}
    requests = harness.videos("qwen2.5-vl", 5, max_tokens=130, ignore_eos=True)
    with harness.engine("qwen2.5-vl") as vanilla:
        expected = vanilla.generate(requests)
    with harness.engine("qwen2.5-vl", "target", overrides=overrides, pruner="none", drafting="tree-static") as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **k: (preempted.append(request), original(request, *a, **k))[1]
        outputs, counted = engine.measured(requests)
        again, again_counted = engine.measured(requests[-1:])
        assert used_blocks(engine) == 0
    assert preempted and again[0].num_cached_tokens, "the situations did not arise"
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert harness.token_ids(again) == harness.token_ids(expected[-1:])
    for values in (counted, again_counted):
        assert values["accepted_tokens"] == values["draft_depth"] > 0


def test_aborts_mid_step_and_structured_outputs():
    """Aborted trees give their blocks back; grammars are not drafted for, counted, and obeyed."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    family = "qwen2.5-vl"
    grammar = {"structured_outputs": StructuredOutputsParams(regex="(the|red|blue|moves|left|a|circle){6,12}")}
    requests = [(prompt, {**args, **grammar}) for prompt, args in harness.videos(family, 2)]
    requests += harness.videos(family, 2)
    with harness.engine(family) as vanilla:
        expected = vanilla.generate(requests)
    with harness.engine(family, "draft", drafting="tree-adaptive") as engine:
        core = engine.llm.llm_engine
        for i in range(4):
            prompt = pairs.video_prompt(family, shape_world.held_out(i).frames)
            engine.llm.enqueue([prompt], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        for _ in range(8):
            core.step()
        assert engine.speculator.drafter.pool.num_used_blocks >= 4
        core.abort_request(list(core.output_processor.request_states), internal=True)
        while core.has_unfinished_requests():
            core.step()
        assert used_blocks(engine) == 0
        outputs, counted = engine.measured(requests)
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert counted["skipped_structured"] == 2
    assert counted["accepted_tokens"] > 0


def test_auto_follows_its_table(reference):
    """`auto`: trees while few requests run, chains while many do, there and back, in one engine, without a seam.

    Two requests begin, six join them, and all end at different times. Catches: a chain verified under a tree's mask, KV
    that a change of shape leaves behind, a path of an earlier tree that a chain's acceptance is looked up in.
    """
    from vllm import SamplingParams

    family = "qwen2.5-vl"
    expected = [ids[0] for ids in harness.token_ids(reference(family, "videos"))]
    lengths = [40, 40, 4, 4, 8, 8, 8, 8]
    prompts = [prompt for prompt, _ in SCENARIOS["videos"](family)]
    table = [[1, 4, "tree-static", 25], [5, 64, "chain", 5]]
    with harness.engine(
        family, "target", drafting="auto", draft_table=table, num_speculative_tokens=25, pruner="none"
    ) as engine:
        core, answers, shapes = engine.llm.llm_engine, {}, []

        def begin(indices) -> None:
            for i in indices:
                engine.llm.enqueue([prompts[i]], SamplingParams(temperature=0.0, max_tokens=lengths[i]), use_tqdm=False)

        def step() -> None:
            before = engine.counters()
            answers.update({int(out.request_id): list(out.outputs[0].token_ids) for out in core.step() if out.finished})
            gained = metrics.difference(before, engine.counters())
            if gained["drafts"]:
                shapes.append("chain" if gained["draft_tokens"] == gained["draft_depth"] else "tree")

        start = engine.counters()
        begin(range(2))
        for _ in range(3):
            step()
        begin(range(2, 8))
        while core.has_unfinished_requests():
            step()
        counted = metrics.difference(start, engine.counters())
    assert [ids for _, ids in sorted(answers.items())] == [
        ids[:length] for ids, length in zip(expected, lengths, strict=True)
    ]
    assert counted["accepted_tokens"] == counted["draft_depth"] == 5 * counted["drafts"]
    changes = [shape for i, shape in enumerate(shapes) if i == 0 or shapes[i - 1] != shape]
    assert changes == ["tree", "chain", "tree"]


def test_the_text_that_gpus_run(reference):
    """Code that is one text for numpy (CPU) and torch (GPU) gives the same with torch.

    Catches: a numpy rule that torch does not share, where no GPU is there to find it.
    """
    import importlib

    modules = [
        *(f"vidspec_kernels.{name}" for name in ("step", "accept", "kv_compact")),
        *(
            f"vllm_vidspec.engine.{name}"
            for name in ("counters", "chain_drafter", "tree_drafter", "drafter", "speculator")
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in modules:
            module = importlib.import_module(name)
            patch.setattr(module, "as_array", lambda tensor: tensor)
            patch.setattr(module, "array_module", lambda device: torch, raising=False)
        with harness.engine("llava-onevision", "target", drafting="tree-static", pruner="none") as engine:
            outputs, counted = engine.measured(SCENARIOS["videos"]("llava-onevision"))
    assert harness.token_ids(outputs) == harness.token_ids(reference("llava-onevision", "videos"))
    assert_full_depth(counted)
