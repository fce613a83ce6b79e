"""An inflated target is the original to the last bit in float32, and its pruners see what they saw of the original."""

import json

import pytest
import torch

from tests.engine import harness
from tests.engine.harness import LLAVA
from vidspec_tools import inflation
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine
FOUND = {"max_tokens": 12, "logprobs": 3}


def exact(outputs):
    """Token ids and logprobs of every answer as they are, not rounded."""
    return [
        (
            list(output.outputs[0].token_ids),
            [{t: p.logprob for t, p in at.items()} for at in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(("family", "pruner"), [(LLAVA, "specvlm"), (LLAVA, "uv")])
def test_pruners_see_the_originals_layers(family, pruner, tmp_path):
    """Both checkpoints inflated: the same scores, choices, drafts. Catches: "all" layers, or seven tenths of more."""
    calibrated = json.loads(pairs.calibration(family).read_text())["config"] if pruner == "specvlm" else {}
    target, draft = (pairs.checkpoint(family, role) for role in ("target", "draft"))
    # Seven tenths of 8 layers is another layer than of 4, and all of 8 are more.
    copies = [str(inflation.inflate(path, 4, tmp_path)) for path in (target, draft)]
    knobs = inflation.guidance_knobs(target, {name: value for name, value in calibrated.items() if name == "lambda_r"})
    runs = []
    for one, other in ((target, draft), copies):
        with harness.engine(family, other, {"model": one}, pruner=pruner, **knobs) as engine:
            with engine.watched() as records:
                outputs, counted = engine.measured(harness.videos(family, 2, **FOUND))
            scores = [record["scores"][0] for record in records]
            kept = [record["kept_indices"][0].tolist() for record in records]
            assert not any(n for name, n in counted.items() if name.startswith("unguided"))
            runs.append((exact(outputs), scores, kept, counted["drafts"], counted["accepted_tokens"]))
    (expected, expected_scores, *others), (found, found_scores, *found_others) = runs
    assert found == expected and found_others == others
    assert all(torch.equal(a, b) for a, b in zip(found_scores, expected_scores, strict=True))
