"""Quantised drafts: their bytes, when a word is said of one, and what a plan says of them."""

import pytest

from tests.released import config_of
from vllm_vidspec.planning.candidates import Question
from vllm_vidspec.planning.draft_cost import (
    FOUR_BITS,
    Weights,
    cost_hint,
    draft_share,
    four_bit_checkpoint,
    stored_weights,
)
from vllm_vidspec.planning.planner import plan
from vllm_vidspec.planning.roofline import GPUS
from vllm_vidspec.planning.shapes import FP8, INT4, from_config, target_shape

TARGET, DRAFT = target_shape("Qwen2.5-VL-32B"), target_shape("Qwen2.5-VL-7B")


def test_bytes_of_a_quantised_model_by_hand():
    """vLLM quantises layers, not embedding and head: 7B has 6.5e9 and 2 x 0.545e9 of weights, a tied one once."""
    head = 152_064 * 3584
    layers = DRAFT.read_params(1) - head
    assert DRAFT.read_bytes(1) == 2 * (layers + head)
    assert DRAFT.quantised(FP8).read_bytes(1) == layers + 2 * head == pytest.approx(7.62e9, rel=0.01)
    assert DRAFT.quantised(INT4).read_bytes(1) == pytest.approx(0.52 * layers + 2 * head, rel=1e-3)
    assert DRAFT.weight_bytes == 2 * DRAFT.params
    assert DRAFT.quantised(FP8).weight_bytes == layers + DRAFT.vision_params + 2 * 2 * head
    tied = target_shape("Qwen2.5-VL-3B")
    assert tied.quantised(FP8).weight_bytes == tied.params + tied.vocab * tied.hidden


def weights(shape):
    head = shape.vocab * shape.hidden
    return Weights(shape.read_params(1) - head, head, shape.linear_bytes)


def test_when_a_word_is_said():
    """Catches: a third that is a share of a forward; a hint on a target that drafts for itself."""
    target, draft = weights(TARGET), weights(DRAFT)
    assert draft_share(target, draft, 5) == pytest.approx(5 * 14.14 / 64.0, rel=0.01)
    drafts = (draft, weights(DRAFT.quantised(FP8)), weights(DRAFT.quantised(INT4)))
    assert [round(100 * draft_share(target, one, 5)) for one in drafts] == [111, 60, 35], "as docs/models.md has it"
    assert cost_hint(target, draft, 1) is None
    assert cost_hint(target, draft, 2) is not None
    assert cost_hint(target, target, 5) is None
    line = "111 % of the bytes of its target's weights, of a checkpoint in four bits 35 %"
    fp8 = ', with "quantization": "fp8_per_tensor" 60 % (modelled)'
    assert cost_hint(target, draft, 5).endswith(f"{line}{fp8}")
    assert cost_hint(target, draft, 5, "a/b-AWQ").endswith(f"{line} (a/b-AWQ){fp8}")
    assert cost_hint(target, drafts[1], 5).endswith("a checkpoint in four bits 35 % (modelled)")
    assert cost_hint(target, drafts[2], 5) is None, "there is nothing smaller"


@pytest.mark.parametrize("name", FOUR_BITS.values())
def test_a_checkpoint_in_four_bits_is_of_the_model_whose_place_it_takes(name):
    """Catches: a draft that is told to take another size, or a name that the planner cannot read."""
    shape = target_shape(name)
    plain = shape.name.removesuffix(" (int4)")
    assert shape == target_shape(plain).stored(INT4)
    config = config_of(f"Qwen/{plain.replace(' ', '-')}-Instruct")
    assert four_bit_checkpoint(config) == name
    assert four_bit_checkpoint(config | {"model_type": "llama"}) is four_bit_checkpoint({}) is None


def test_stored_weights():
    """Catches: a configuration that nobody can plan for and that breaks the start-up."""
    config = config_of("Qwen/Qwen2.5-VL-7B-Instruct")
    for known in (config, config_of("Qwen/Qwen3-VL-30B-A3B-Instruct")):
        assert stored_weights(known)[:2] == weights(from_config(known, ""))[:2]
    assert stored_weights({**config, "vocab_size": 0}) is None
    assert stored_weights({name: value for name, value in config.items() if name != "hidden_size"}) is None
    for stored, layer_bytes in (
        (None, 2),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "torchao"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": [4]}}}, None),
        ("unheard-of", None),
    ):
        found = stored_weights({**config, "quantization_config": stored})
        assert (found and found.layer_bytes) == layer_bytes
    assert stored_weights(config, "fp8_per_tensor").layer_bytes == 1.0


def test_a_plan_compares_quantised_drafts():
    """Their own figures, from the planner asked with such a draft; no note where it is quantised, own, or measured."""
    question = Question(TARGET, DRAFT, GPUS["h200"], draft_gpus=0, prune_ratios=(0.9,))
    result = plan(question, (1, 4))
    assert [*result["quantised_drafts"]] == [FP8, INT4]
    for kind, words in ((FP8, f'("quantization": "{FP8}")'), (INT4, "in four bits, as a checkpoint of its own,")):
        (note,) = [line for line in result["notes"] if words in line]
        asked = Question(TARGET, DRAFT.quantised(kind), GPUS["h200"], draft_gpus=0, prune_ratios=(0.9,))
        better = plan(asked, (1, 4))
        rows = [[row for row in of["rows"] if row["choice"] == "draft"][:2] for of in (result, better)]
        assert result["quantised_drafts"][kind] == pytest.approx([row["answer_speedup"] for row in rows[1]])
        for plain, row in zip(*rows, strict=True):
            assert row["answer_speedup"] > plain["answer_speedup"]
            assert f"{row['answer_speedup']:.2f}x instead of {plain['answer_speedup']:.2f}x" in note
        assert better["quantised_drafts"] is None and not any("would gain" in line for line in better["notes"])
    own = Question(TARGET, TARGET, GPUS["h200"], prune_ratios=(0.9,))
    timed = Question(TARGET, DRAFT, GPUS["h200"], prune_ratios=(0.9,), draft_ms=4.0)
    assert plan(own, (1,))["quantised_drafts"] is plan(timed, (1,))["quantised_drafts"] is None
