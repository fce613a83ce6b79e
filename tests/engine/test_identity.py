"""The two promises that all rests on: output equals vanilla vLLM's, and a draft equal to the target never errs."""

import pytest

from tests.engine import harness, padded
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import FAMILIES, LLAVA, QWEN, TREES, assert_all_stands, assert_same_answers
from vllm_vidspec.engine.report.acceptance_alarm import WINDOW
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", ["chain", *TREES])
def test_draft_equal_to_target_is_always_accepted(reference, family, shape):
    """Batch of 8, fp32, greedy, and T = 1: every draft stands as deep as it is, and nothing changes.

    Catches: a wrong position, slot or embedding of the draft, salted or shifted noise (test_mutations.py shows these);
    a mask that loses an ancestor at some level (the public reference does, at single-query levels), positions by slot,
    KV of the wrong branch, noise keyed by slot.
    """
    videos, noisy = (reference(family, scenario) for scenario in ("videos", "sampled"))
    with harness.engine(family, "target", pruner="none", drafting=shape) as engine:
        assert engine.draft.model is engine.runner.model
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        sampled, sampled_counted = engine.measured(SCENARIOS["sampled"](family))
    assert_same_answers(videos, outputs)
    assert_same_answers(noisy, sampled)
    assert counted["visual_tokens_kept"] == counted["visual_tokens_full"] > 0
    width = {"chain": 1, "tree-static": 5}.get(shape)  # nodes a level
    for values in (counted, sampled_counted):
        assert_all_stands(values)
        assert (values["draft_tokens"] > values["draft_depth"]) == (shape != "chain")
        assert values["draft_forwards"] <= 8 * values["draft_steps"]
        if width is not None:
            assert values["draft_tokens"] == width * values["draft_depth"]
        if shape == "tree-static":
            assert values["draft_depth"] == 5 * values["drafts"]
            assert values["draft_forwards"] == 5 * values["draft_steps"]


@pytest.mark.parametrize(("family", "shape"), [(QWEN, "chain"), (LLAVA, "tree-static")])
def test_rows_that_only_the_draft_has_are_never_drafted(reference, tmp_path, family, shape):
    """The target's own weights with 66 rows more, whose logits win over every token's: all drafts stand nevertheless.

    Catches: a draft that proposes its padding, which the target's embedding has no row for; noise by another width.
    """
    videos, noisy = (reference(family, scenario) for scenario in ("videos", "sampled"))
    draft = padded.pad(pairs.checkpoint(family, "target"), 66, 4.0, tmp_path)
    with harness.engine(family, draft, pruner="none", drafting=shape) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        sampled, sampled_counted = engine.measured(SCENARIOS["sampled"](family))
    assert_same_answers(videos, outputs)
    assert_same_answers(noisy, sampled)
    assert_all_stands(counted)
    assert_all_stands(sampled_counted)


@pytest.mark.parametrize(("family", "shape"), [(LLAVA, "chain"), (QWEN, "tree-adaptive")])
def test_rows_that_only_the_target_has_are_its_own(tmp_path, family, shape):
    """A target with 66 rows more than its draft; one request is made to say some of them.

    Catches: a draft whose noise or parameters are those of fewer rows, an id that the draft's embedding has no row for.
    """
    target = padded.pad(pairs.checkpoint(family, "target"), 66, 0.0, tmp_path)
    requests = [
        *SCENARIOS["videos"](family)[:3],
        *SCENARIOS["sampled"](family)[:3],
        *harness.videos(family, 1, logit_bias={130: 100.0, 171: 100.0}, temperature=1.0),
    ]
    with harness.engine(family, overrides={"model": target}) as engine:
        expected = engine.generate(requests)
    draft = pairs.checkpoint(family, "target")
    with harness.engine(family, draft, overrides={"model": target}, pruner="none", drafting=shape) as engine:
        assert engine.draft.model is not engine.runner.model
        outputs, counted = engine.measured(requests[:-1])
        assert_all_stands(counted)
        outputs += engine.generate(requests[-1:])
    assert_same_answers(expected, outputs)
    assert set(expected[-1].outputs[0].token_ids) <= {130, 171}


@pytest.mark.parametrize(
    ("family", "shape", "pruner"),
    [
        (QWEN, "chain", "uv"),
        (LLAVA, "chain", "specvlm"),
        (QWEN, "tree-static", "dycoke"),
        pytest.param(LLAVA, "tree-static", "uniform", marks=pytest.mark.slow),
        pytest.param(QWEN, "tree-adaptive", "specvlm", marks=pytest.mark.slow),
        (LLAVA, "tree-adaptive", "uv"),
    ],
)
def test_small_pruned_draft_changes_nothing(reference, family, shape, pruner):
    """Twenty requests of every modality and every sampling parameter in one continuous batch, draft at 10 %.

    Prefix hits are among them. Catches: noise keyed by slot instead of logical position, drafts scored against
    unprocessed logits, penalties or bad words counted along the slots instead of a node's own path, logprobs in draft
    or node order, state shared between requests, guidance of another one, a tree that reaches another's rows.
    """
    expected = reference(family, "mixed")
    with harness.engine(family, "draft", drafting=shape, pruner=pruner, image_prune_ratio=0.9) as engine:
        outputs, counted = engine.measured(SCENARIOS["mixed"](family))
    assert_same_answers(expected, outputs)
    assert counted["accepted_tokens"] > 0
    if shape == "chain":
        assert counted["drafts"] > WINDOW and counted["low_acceptance_windows"] == 0
    assert counted["visual_tokens_kept"] <= 0.1 * counted["visual_tokens_full"]
    assert not any(value for name, value in counted.items() if name.startswith(("skipped_", "unguided_")))


def test_phrases_are_banned_without_drafts(reference):
    """A lone request on an engine without our method: the kernels' twins serve it too.

    Catches: a twin that reads past the batch's last row, which nothing is drafted behind.
    """
    free, bound = (reference(QWEN, scenario)[0].outputs[0].text for scenario in ("videos", "phrases"))
    assert "white diamond" in free and "in the middle" in free
    assert "white diamond" not in bound and "in the middle" not in bound


@pytest.mark.parametrize(
    "spec",
    [
        {"prune_ratio": 1.0},
        {"pruner": "random", "prune_ratio": 0.5, "draft_positions": "compacted"},
        {"pruner": "frame", "draft_noise": "independent"},
        {"pruner": "window:front", "image_prune_ratio": 0.0, "num_speculative_tokens": 1},
    ],
    ids=["text-only", "random-compacted", "frame-independent", "window-K1"],
)
def test_every_knob_leaves_the_output_alone(reference, spec):
    """Catches: a knob that reaches the target."""
    expected = reference(QWEN, "sampled")
    with harness.engine(QWEN, "draft", **spec) as engine:
        outputs, counted = engine.measured(SCENARIOS["sampled"](QWEN))
    assert_same_answers(expected, outputs)
    assert counted["draft_tokens"] > 0


@pytest.mark.parametrize(("family", "pruner"), [(QWEN, "uv"), (LLAVA, "specvlm"), (LLAVA, "dycoke")])
def test_self_speculation_shares_the_weights_and_is_exact(reference, family, pruner):
    """The target drafts for itself over the video it pruned itself: one copy of the weights; all of it kept, no misses.

    Catches: hooks that the draft's forwards trigger, hidden states that the draft's forward returns unasked.
    """
    expected = reference(family, "videos")
    with harness.engine(family, "target", pruner=pruner, prune_ratio=0.0) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
        engine.retune(prune_ratio=0.9)
        pruned, pruned_counted = engine.measured(SCENARIOS["videos"](family))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert counted["draft_load_bytes"] < 2 * 2**20  # of some 15 MB: what its copied attention layers take
    assert pruned_counted["visual_tokens_kept"] <= 0.1 * pruned_counted["visual_tokens_full"]
    assert pruned_counted["draft_tokens"] > pruned_counted["accepted_tokens"] > 0
    for answers in (outputs, pruned):
        assert harness.token_ids(answers) == harness.token_ids(expected)
