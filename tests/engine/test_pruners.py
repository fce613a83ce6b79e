"""What pruners are worth in running engines: by acceptance, each request by its own, and of inflated targets."""

import json

import pytest

from benchmarks import inflation
from tests.engine import harness
from tests.engine.harness import FAMILIES, LLAVA, QWEN3, assert_same_answers, skipped
from vllm_vidspec import metrics
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

PRUNERS = ("specvlm", "attention", "uv", "uniform")


@pytest.mark.parametrize("family", [*(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES), QWEN3])
def test_guided_beats_unguided_beats_blind(family):
    """Acceptance length over 8 held-out videos, a tenth kept. Catches: scores shifted, reversed or of another item."""
    lengths = {}
    with harness.engine(family, "draft", pruner="auto") as engine:
        for knobs in ({"pruner": "specvlm"}, {"pruner": "uv"}, {"pruner": "uniform"}, {"prune_ratio": 1.0}):
            engine.retune(**knobs)
            engine.llm.reset_prefix_cache()
            _, counted = engine.measured(harness.videos(family, 8, max_tokens=160))
            lengths[str(*knobs.values())] = 1 + counted["accepted_tokens"] / counted["drafts"]
    assert lengths["uniform"] > lengths["1.0"] + 0.3
    assert min(lengths["specvlm"], lengths["uv"]) > lengths["uniform"] + 0.3


def test_each_request_has_a_pruner_of_its_own(reference):
    """Four pruners in one batch: attention and hidden states are heard for those that need them, for nobody else."""
    expected = reference(LLAVA, "videos")
    with harness.engine(LLAVA, "draft", harness.NO_CACHE, is_ahead=True, pruner="auto") as engine:
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
    assert len({len(record["kept_indices"][0]) for record in seen}) == 1, "one budget, whatever the pruner"
    assert after["auto_requests_specvlm"] > 0 and after["auto_tokens_uv"] > after["auto_verify_steps_uv"] > 0
    assert sum(after[f"auto_requests_{pruner}"] for pruner in PRUNERS) == 8, "an end is learned of as the next begins"


@pytest.mark.slow  # that its layers add nothing: tests/tools/test_inflation.py
def test_an_inflated_target_is_the_original(tmp_path):
    """Both checkpoints inflated: the same tokens, logprobs to the last bit in fp32, scores, choices and drafts."""
    calibrated = json.loads(pairs.calibration(LLAVA).read_text())["config"]
    target, draft = (pairs.checkpoint(LLAVA, role) for role in ("target", "draft"))
    # Seven tenths of 8 layers is another layer than of 4, and all of 8 are more.
    copies = [str(inflation.inflate(path, 4, tmp_path)) for path in (target, draft)]
    knobs = inflation.guidance_knobs(target, {"lambda_r": calibrated["lambda_r"]})
    runs = []
    for one, other in ((target, draft), copies):
        runs.append([])
        with harness.engine(LLAVA, other, {"model": one} | harness.NO_CACHE, pruner="auto", **knobs) as engine:
            for pruner in ("specvlm", "uv"):
                engine.retune(pruner=pruner)
                with engine.watched() as records:
                    outputs, counted = engine.measured(harness.videos(LLAVA, 2, max_tokens=12, logprobs=3))
                assert counted["guided_prompts"] == counted["prompts"] == 2
                answers = [output.outputs[0] for output in outputs]
                told = [(a.token_ids, [{t: p.logprob for t, p in at.items()} for at in a.logprobs]) for a in answers]
                pruned = [(record["scores"][0].tolist(), record["kept_indices"][0].tolist()) for record in records]
                runs[-1].append((told, pruned, counted["drafts"], counted["accepted_tokens"]))
    assert runs[0] == runs[1]
