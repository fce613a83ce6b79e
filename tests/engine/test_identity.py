"""Output equals vanilla vLLM's: every sampling parameter in one batch, knobs, padded vocabularies, self-speculation.

That a draft equal to the target is always accepted, in every shape, family and way of prefill: test_matrix.py.
"""

import pytest

from tests.engine import harness, random_models
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import LLAVA, QWEN, assert_all_stands, assert_same_answers
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

CHAIN = pytest.param(QWEN, "chain", marks=pytest.mark.slow)  # the one line of a tree


@pytest.mark.parametrize(("family", "shape"), [CHAIN, (LLAVA, "tree-static")])
def test_rows_that_only_the_draft_has_are_never_drafted(reference, tmp_path, family, shape):
    """66 rows more, whose logits win over every token's. Catches: drafts of padding, noise by another width."""
    expected = {scenario: reference(family, scenario) for scenario in ("videos", "sampled")}
    draft = random_models.pad(pairs.checkpoint(family, "target"), 66, 4.0, tmp_path)
    with harness.engine(family, draft, pruner="none", drafting=shape) as engine:
        for scenario, answers in expected.items():
            outputs, counted = engine.measured(SCENARIOS[scenario](family))
            assert_same_answers(answers, outputs)
            assert_all_stands(counted)


@pytest.mark.parametrize(("family", "shape"), [CHAIN, (LLAVA, "tree-adaptive")])
def test_rows_that_only_the_target_has_are_its_own(tmp_path, family, shape):
    """A target with 66 rows more than its draft; one request says some of them, which the draft has no embedding of."""
    target = random_models.pad(pairs.checkpoint(family, "target"), 66, 0.0, tmp_path)
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
    ("family", "shape", "pruner", "overrides"),
    [
        (LLAVA, "tree-adaptive", "specvlm", {}),
        pytest.param(QWEN, "tree-static", "dycoke", {"enforce_eager": False}, marks=pytest.mark.slow),  # compiles
    ],
)
def test_small_pruned_draft_changes_nothing(reference, family, shape, pruner, overrides):
    """Twenty requests of every modality and parameter in one batch, prefix hits among them, with a draft at 10 %."""
    expected = reference(family, "mixed")
    with harness.engine(family, "draft", overrides, drafting=shape, pruner=pruner, image_prune_ratio=0.9) as engine:
        outputs, counted = engine.measured(SCENARIOS["mixed"](family))
    assert_same_answers(expected, outputs)
    assert counted["accepted_tokens"] > 0
    assert counted["visual_tokens_kept"] <= 0.1 * counted["visual_tokens_full"]
    assert not any(value for name, value in counted.items() if name.startswith(("skipped_", "unguided_")))


def test_knobs_leave_the_output_alone(reference):
    """One draft a step, positions renumbered, half the frames; text alone. Catches: a knob that reaches the target."""
    expected = reference(QWEN, "sampled")
    spec = {"num_speculative_tokens": 1, "draft_positions": "compacted", "draft_noise": "independent"}
    with harness.engine(QWEN, "draft", pruner="frame", prune_ratio=0.5, **spec) as engine:
        for knobs in ({}, {"prune_ratio": 1.0, "image_prune_ratio": 0.0}):
            engine.retune(**knobs)
            outputs, counted = engine.measured(SCENARIOS["sampled"](QWEN))
            assert_same_answers(expected, outputs)
            assert counted["draft_tokens"] > 0


def test_self_speculation_shares_the_weights_and_is_exact(reference):
    """One copy of the weights; all of the video kept, no misses; hooks do not hear the draft's forwards."""
    expected = reference(LLAVA, "videos")
    with harness.engine(LLAVA, "target", harness.NO_CACHE, pruner="auto", prune_ratio=0.0) as engine:
        for pruner in ("uv", "specvlm"):
            engine.retune(pruner=pruner)
            outputs, counted = engine.measured(SCENARIOS["videos"](LLAVA))
            assert_same_answers(expected, outputs)
            assert_all_stands(counted)
    assert counted["draft_load_bytes"] < 2 * 2**20  # of some 15 MB: what its copied attention layers take
