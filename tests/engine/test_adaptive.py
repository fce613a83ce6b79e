"""What is learned while serving: which pruner serves best, and whether drafting pays. Answers stay vanilla's."""

import json

import pytest

from tests.engine import harness
from tests.engine.harness import LLAVA, assert_same_answers, skipped
from vllm_vidspec import metrics
from vllm_vidspec.config import parse_config

pytestmark = pytest.mark.engine

PRUNERS = ("specvlm", "attention", "uv", "uniform")


def test_each_request_has_a_pruner_of_its_own(reference, tmp_path):
    """Four pruners in one batch: attention and hidden states are heard for those that need them, for nobody else.

    Catches: scores of one kind taken for the other's, a request that is heard twice, a way that is not read, an answer
    that differs.
    """
    expected, path = reference(LLAVA, "videos"), tmp_path / "learned.json"
    with (
        harness.async_scheduling(),
        harness.engine(LLAVA, "draft", pruner="auto", auto_file=str(path), overrides=harness.NO_CACHE) as engine,
    ):
        with engine.watched() as seen:
            outputs, counted = engine.measured(harness.videos(LLAVA, 8))
            engine.idle()
        assert_same_answers(expected, outputs)
        outputs = engine.generate(harness.videos(LLAVA, 8))
        assert_same_answers(expected, outputs)
        after = engine.counters()
    assert skipped(counted) == {}
    # The first twelve are given in turn: two of each pruner in the first batch, six of which are guided.
    assert counted["prompts"] == 8 and counted["guided_prompts"] == 6
    assert sum(counted[f"unguided_{reason}"] for reason in metrics.GUIDANCE_FALLBACKS) == 0
    assert [record["scores"] is not None for record in seen] == [True, True, True, False] * 2
    kept = {json.dumps([part.tolist() for part in record["kept_indices"]]) for record in seen[:4]}
    assert len({len(json.loads(one)[0]) for one in kept}) == 1, "one budget, whatever the pruner"
    assert after["auto_requests_specvlm"] > 0 and after["auto_tokens_uv"] > after["auto_verify_steps_uv"] > 0
    learned = json.loads(path.read_text())
    assert [arm["pruner"] for arm in learned["learned"]] == list(PRUNERS)
    assert sum(arm["num_requests"] for arm in learned["learned"]) == 16
    config, _ = parse_config({"model": "x", "num_speculative_tokens": 5, "calibration": str(path)})
    assert config.prune.pruner == learned["config"]["pruner"] in PRUNERS
