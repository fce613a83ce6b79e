"""Quantised drafts: their bytes, when a word is said of one, and what a plan says of them."""

import pytest

from vidspec_tools.gpus import GPUS
from vidspec_tools.planning.models import target_shape
from vidspec_tools.planning.planner import plan
from vidspec_tools.planning.question import Question
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.draft_cost import cost_hint, draft_share, stored_shape
from vllm_vidspec.planning.shapes import FP8, INT4

TARGET, DRAFT = target_shape("Qwen2.5-VL-32B"), target_shape("Qwen2.5-VL-7B")


def test_bytes_of_a_quantised_model_by_hand():
    """vLLM quantises the layers as it loads, not embedding and output head: 7B has 6.5e9 and 2 x 0.545e9 of weights.

    Catches: a head that is counted as quantised; a tied embedding counted twice.
    """
    head = 152_064 * 3584
    layers = DRAFT.read_params(1) - head
    assert DRAFT.read_bytes(1) == 2 * (layers + head)
    assert DRAFT.quantised(FP8).read_bytes(1) == layers + 2 * head == pytest.approx(7.62e9, rel=0.01)
    assert DRAFT.quantised(INT4).read_bytes(1) == pytest.approx(0.52 * layers + 2 * head, rel=1e-3)
    assert DRAFT.weight_bytes == 2 * DRAFT.params
    assert DRAFT.quantised(FP8).weight_bytes == layers + DRAFT.vision_params + 2 * 2 * head
    tied = target_shape("Qwen2.5-VL-3B")
    assert tied.quantised(FP8).weight_bytes == tied.params + tied.vocab * tied.hidden
    with pytest.raises(VidSpecError, match=r"--draft-quantization 'fp4' is none of fp8_per_tensor, int4"):
        DRAFT.quantised("fp4")


def test_when_a_word_is_said():
    """Catches: a third that is a share of a forward; a hint on a target that drafts for itself."""
    assert draft_share(TARGET, DRAFT, 5) == pytest.approx(5 * 14.14 / 64.0, rel=0.01)
    shares = [draft_share(TARGET, draft, 5) for draft in (DRAFT, DRAFT.quantised(FP8), DRAFT.quantised(INT4))]
    assert [round(100 * share) for share in shares] == [111, 60, 35], "as docs/models.md has it"
    assert cost_hint(TARGET, DRAFT, 1) is None
    assert cost_hint(TARGET, DRAFT, 2) is not None
    assert cost_hint(TARGET, TARGET, 5) is None
    assert cost_hint(TARGET, DRAFT.quantised(FP8), 5) is None


def test_a_stored_shape():
    """Catches: a configuration that nobody can plan for and that breaks the start-up."""
    config = {"model_type": "qwen2_5_vl", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    assert stored_shape(config) is None
    config |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 100}
    assert stored_shape({**config, "model_type": "bert"}) is None
    for stored, linear_bytes in (
        (None, 2),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "torchao"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": [4]}}}, None),
        ("unheard-of", None),
    ):
        shape = stored_shape({**config, "quantization_config": stored})
        assert (shape and shape.linear_bytes) == linear_bytes
    assert stored_shape(config, "fp8_per_tensor").linear_bytes == 1.0


def test_a_plan_compares_a_quantised_draft():
    """Its own figures, from the planner asked with that draft. Catches: a note on a draft that is quantised, that
    drafts for itself, or whose time was measured."""
    question = Question(TARGET, DRAFT, GPUS["h200"], draft_gpus=0, prune_ratios=(0.9,))
    result = plan(question, (1, 4))
    (note,) = [line for line in result["notes"] if FP8 in line]
    fp8 = Question(TARGET, DRAFT.quantised(FP8), GPUS["h200"], draft_gpus=0, prune_ratios=(0.9,))
    better = plan(fp8, (1, 4))
    assert result["quantised_draft"] == {
        "quantization": FP8, "answer_speedup": [row["answer_speedup"] for row in better["rows"]],
    }  # fmt: skip
    for plain, row in zip(result["rows"], better["rows"], strict=True):
        assert row["answer_speedup"] > plain["answer_speedup"]
        assert f"{row['answer_speedup']:.2f}x instead of {plain['answer_speedup']:.2f}x" in note
    assert better["quantised_draft"] is None and not any(FP8 in line for line in better["notes"])
    own = Question(TARGET, TARGET, GPUS["h200"], prune_ratios=(0.9,))
    timed = Question(TARGET, DRAFT, GPUS["h200"], prune_ratios=(0.9,), draft_ms=4.0)
    assert plan(own, (1,))["quantised_draft"] is plan(timed, (1,))["quantised_draft"] is None
