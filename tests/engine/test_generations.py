"""Qwen2-VL and Qwen3-VL, dense and with experts: the same promises, on untrained models with Qwen2.5-VL's prompts, and
on the bundled pair of Qwen3-VL.
"""

import pytest
import torch

from tests.engine import harness, loose_reference, random_models
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import NO_CACHE, QWEN, TREES, assert_all_stands, assert_same_answers, skipped
from tests.engine.random_models import QWEN3, QWEN3_MOE
from tests.engine.test_parallel import PARALLEL, let_drafts_come

pytestmark = pytest.mark.engine

# A step holds one video, and no more than the beginning of another prompt.
CHUNKED = {"max_num_batched_tokens": 420}


def requests():
    """Videos twice, greedily and not, two of them in one prompt, and images: the prefix cache has the second half."""
    # Two images, two videos, and both: without penalties, of which a draft knows the committed text's only.
    several = [(prompt, {"temperature": 0.0}) for prompt, _ in harness.mixed_batch(QWEN)[7:10]]
    once = [*harness.videos(QWEN, 3), *harness.videos(QWEN, 3, temperature=1.0), *several]
    return once + once[:6]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(name, seed)` -> the checkpoint; `answers(name)` -> vanilla's answers."""
    found: dict = {}

    def checkpoint(name, seed=0):
        if (name, seed) not in found:
            found[name, seed] = random_models.build(name, tmp_path_factory.mktemp(name), seed)
        return found[name, seed]

    def answers(name):
        if name not in found:
            with harness.engine(QWEN, overrides={"model": checkpoint(name), **CHUNKED}) as engine:
                found[name] = engine.generate(requests())
        return found[name]

    checkpoint.answers = answers
    return checkpoint


@pytest.mark.parametrize("name", random_models.NAMES)
def test_a_draft_equal_to_the_target_is_always_accepted(made, name):
    """In chunks, with prefix hits, at T = 0 and 1. Catches: deepstack features lost, or of another chunk or prompt."""
    expected = made.answers(name)
    with harness.engine(QWEN, "target", {"model": made(name), **CHUNKED}, pruner="none") as engine:
        outputs, counted = engine.measured(requests())
    assert_same_answers(expected, outputs)
    assert_all_stands(counted)


def test_deepstack_features_are_looked_at(made, monkeypatch):
    """The test above sees a draft whose deeper features are those of the token before."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Target

    original = Target._set_deepstack_input_embeds
    drafting = False

    def rolled(self, deeper):
        original(self, torch.roll(deeper, 1, dims=1) if drafting else deeper)

    monkeypatch.setattr(Target, "_set_deepstack_input_embeds", rolled)
    with harness.engine(QWEN, "target", {"model": made(QWEN3), **CHUNKED}, pruner="none") as engine:
        embed = engine.draft.embed

        def embedding(*args):
            nonlocal drafting
            drafting = True
            try:
                return embed(*args)
            finally:
                drafting = False

        monkeypatch.setattr(engine.draft, "embed", embedding)
        outputs, counted = engine.measured(requests())
    assert_same_answers(made.answers(QWEN3), outputs)
    assert counted["accepted_tokens"] < counted["draft_depth"]


@pytest.mark.parametrize(
    ("target", "draft", "shape", "pruner"),
    [
        (QWEN3, QWEN3, "tree-static", "specvlm"),
        pytest.param(QWEN3_MOE, QWEN3, "chain", "uv", marks=pytest.mark.slow),
        (QWEN3_MOE, QWEN3, "tree-adaptive", "dycoke"),
    ],
)
def test_a_small_pruned_draft_changes_nothing(made, target, draft, shape, pruner):
    """A draft of the family that knows nothing. Catches: features of dropped tokens, a target with experts refused."""
    spec = {"drafting": shape, "pruner": pruner, "image_prune_ratio": 0.5}
    with harness.engine(QWEN, made(draft, seed=1), {"model": made(target), **CHUNKED}, **spec) as engine:
        outputs, counted = engine.measured(requests())
    assert_same_answers(made.answers(target), outputs)
    assert counted["drafts"] > 0 and counted["visual_tokens_kept"] < counted["visual_tokens_full"]


# ---- the bundled pair -----------------------------------------------------------------------------------------------

BUNDLED = harness.QWEN3


@pytest.mark.parametrize("shape", ["chain", *(pytest.param(shape, marks=pytest.mark.slow) for shape in TREES)])
def test_the_bundled_target_drafts_for_itself_without_a_miss(reference, shape):
    """Greedily and at T = 1, in chunks. Catches: a tree's positions or features by slot."""
    scenarios = ("videos", "sampled")
    expected = [reference(BUNDLED, scenario) for scenario in scenarios]
    chunks = {"max_num_batched_tokens": harness.CHUNK_SIZES[BUNDLED]}
    with harness.engine(BUNDLED, "target", overrides=chunks, pruner="none", drafting=shape) as engine:
        for scenario, answers in zip(scenarios, expected, strict=True):
            outputs, counted = engine.measured(SCENARIOS[scenario](BUNDLED))
            assert_same_answers(answers, outputs)
            assert_all_stands(counted)


@pytest.mark.parametrize(
    ("shape", "pruner"),
    [
        ("chain", "uv"),
        pytest.param("tree-static", "specvlm", marks=pytest.mark.slow),
        pytest.param("tree-adaptive", "dycoke", marks=pytest.mark.slow),
    ],
)
def test_the_bundled_draft_changes_nothing(reference, shape, pruner):
    """Twenty requests of every modality and sampling parameter in one batch, the draft at a tenth of the video."""
    expected = reference(BUNDLED, "mixed")
    with harness.engine(BUNDLED, "draft", drafting=shape, pruner=pruner, image_prune_ratio=0.9) as engine:
        outputs, counted = engine.measured(SCENARIOS["mixed"](BUNDLED))
    assert_same_answers(expected, outputs)
    assert counted["accepted_tokens"] > 0
    assert counted["visual_tokens_kept"] <= 0.1 * counted["visual_tokens_full"]
    assert not any(value for name, value in counted.items() if name.startswith(("skipped_", "unguided_")))


def test_the_bundled_draft_in_a_process_of_its_own(reference):
    """Deepstack features and interpolated positions, in the drafter's process: accepted drafts, no request without.

    Catches: a tower that runs outside inference mode, where the weights of its position embedding want gradients.
    """
    expected = reference(BUNDLED, "videos")
    spec = {"pruner": "uv", "parallel": PARALLEL, "on_draft_error": "skip"}
    with harness.engine(BUNDLED, "draft", **spec) as engine, let_drafts_come(engine):
        outputs, counted = engine.measured(SCENARIOS["videos"](BUNDLED))
    assert_same_answers(expected, outputs)
    assert skipped(counted) == {}
    assert counted["guided_prompts"] == counted["prompts"] == len(outputs)
    assert 0 < counted["accepted_tokens"] <= counted["stream_tokens"]


def test_the_bundled_pair_verifies_loosely():
    """Each token is what the record says of it, read back by the Hugging Face model in float64."""
    spec = {"scorer": "loose", "request_scorers": ["strict", "loose"], "lambda_max": 1.0}
    spec |= {"num_speculative_tokens": 10, "prune_ratio": 0.95}
    with (
        harness.engine(BUNDLED, "draft", **spec, overrides=NO_CACHE) as engine,
        engine.watched("watch_scores") as records,
    ):
        outputs, counted = engine.measured(harness.videos(BUNDLED, 4, max_tokens=80))
    shown = [[frames] for frames in harness.shown(4)]
    assert loose_reference.check(BUNDLED, outputs, shown, records) > 0
    assert counted["loosened_tokens"] + counted["shifted_tokens"] > 0
