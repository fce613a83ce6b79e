"""The two promises that all rests on: output equals vanilla vLLM's, and a draft equal to the target never errs."""

import pytest

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from vllm_vidspec.engine.report.acceptance_alarm import WINDOW
from vllm_vidspec.tools import pairs

FAMILIES = ("qwen2.5-vl", "llava-onevision")


def assert_same_answers(expected: list, got: list) -> None:
    """Token ids, text, finish reasons and logprobs of every completion are equal."""
    assert harness.token_ids(got) == harness.token_ids(expected)
    for one, other in zip(expected, got, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.text, left.finish_reason) == (right.text, right.finish_reason)
            assert (left.logprobs is None) == (right.logprobs is None)
            for a, b in zip(left.logprobs or [], right.logprobs or [], strict=True):
                assert {t: v.rank for t, v in a.items()} == {t: v.rank for t, v in b.items()}
                assert all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_shared", [True, False], ids=["self", "own-weights"])
def test_draft_equal_to_target_is_always_accepted(reference, family, is_shared):
    """Batch of 8, fp32, greedy: every drafted token stands, and nothing changes.

    Catches: a wrong position, slot or embedding of the draft (test_mutations.py shows it).
    """
    draft = "target" if is_shared else pairs.checkpoint(family, "target")
    with harness.engine(family, draft, pruner="none") as engine:
        assert (engine.speculator.draft_model.model is engine.runner.model) == is_shared
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert counted["visual_tokens_kept"] == counted["visual_tokens_full"] > 0
    assert_same_answers(reference(family, "videos"), outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_small_pruned_draft_changes_nothing(reference, family):
    """Twenty requests of every modality and every sampling parameter in one continuous batch, draft at 10 %.

    Catches: noise keyed by slot instead of logical position, drafts scored against unprocessed logits, logprobs in
    draft order, state shared between requests.
    """
    with harness.engine(family, "draft", prune_ratio=0.9, image_prune_ratio=0.9, pruner="uniform") as engine:
        outputs, counted = engine.measured(SCENARIOS["mixed"](family))
    assert_same_answers(reference(family, "mixed"), outputs)
    assert counted["accepted_tokens"] > 0
    assert counted["drafts"] > WINDOW and counted["low_acceptance_windows"] == 0
    assert counted["visual_tokens_kept"] <= 0.1 * counted["visual_tokens_full"]
    assert not any(value for name, value in counted.items() if name.startswith("skipped_"))


def test_phrases_are_banned_without_drafts(reference):
    """A lone request on an engine without our method: the kernels' twins serve it too.

    Catches: a twin that reads past the batch's last row, which nothing is drafted behind.
    """
    free, bound = (reference("qwen2.5-vl", scenario)[0].outputs[0].text for scenario in ("videos", "phrases"))
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
    with harness.engine("qwen2.5-vl", "draft", **spec) as engine:
        outputs, counted = engine.measured(SCENARIOS["sampled"]("qwen2.5-vl"))
    assert_same_answers(reference("qwen2.5-vl", "sampled"), outputs)
    assert counted["draft_tokens"] > 0


@pytest.mark.parametrize(
    ("family", "pruner"), [("qwen2.5-vl", "uv"), ("llava-onevision", "specvlm"), ("llava-onevision", "dycoke")]
)
def test_self_speculation_shares_the_weights_and_is_exact(reference, family, pruner):
    """The target drafts for itself over the video it pruned itself: one copy of the weights; all of it kept, no misses.

    Catches: listeners that the draft's forwards trigger, hidden states that the draft's forward returns unasked.
    """
    with harness.engine(family, "target", pruner=pruner, prune_ratio=0.0) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert harness.token_ids(outputs) == harness.token_ids(reference(family, "videos"))
    assert counted["draft_load_bytes"] < 2 * 2**20  # of some 15 MB: what its copied attention layers take
    with harness.engine(family, "target", pruner=pruner, prune_ratio=0.9) as engine:
        outputs, counted = engine.measured(SCENARIOS["videos"](family))
    assert counted["visual_tokens_kept"] <= 0.1 * counted["visual_tokens_full"]
    assert counted["draft_tokens"] > counted["accepted_tokens"] > 0
    assert harness.token_ids(outputs) == harness.token_ids(reference(family, "videos"))


def test_shared_noise_accepts_everything_of_an_equal_draft(reference):
    """T = 1, draft = target: the coupling makes both draw the same token. Catches: salted or shifted draft noise."""
    with harness.engine("qwen2.5-vl", "target", pruner="none") as engine:
        outputs, counted = engine.measured(SCENARIOS["sampled"]("qwen2.5-vl"))
    assert harness.token_ids(outputs) == harness.token_ids(reference("qwen2.5-vl", "sampled"))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
