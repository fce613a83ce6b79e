"""Shapes: what a token reads and keeps, names as users write them, and refusals in one line."""

import json
from types import SimpleNamespace

import pytest

from tests.released import config_of
from vllm_vidspec import families
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.shapes import FP8, INT4, KNOWN, QUANTISATIONS, draft_shape, from_config, target_shape


def test_kv_of_a_token_is_what_the_papers_say():
    """80 layers x 8 heads x 128 x (K and V) x 2 bytes. Catches: query heads instead of KV heads, K without V."""
    assert target_shape("Qwen2.5-VL-72B").kv_bytes_per_token == 327_680
    assert target_shape("LLaVA-OneVision-0.5B").kv_bytes_per_token == 24 * 2 * 64 * 2 * 2


def test_a_forward_reads_the_experts_that_its_tokens_hit():
    """128 experts, 8 a token: one token reads 8 of them, many read all. Catches: all experts, or 8, whatever comes."""
    moe = target_shape("Qwen/Qwen3-VL-30B-A3B-Instruct")
    assert moe.read_params(1) == pytest.approx(moe.active_params) == pytest.approx(3.04e9, rel=0.01)
    expert = 3 * 2048 * 768 * 48
    assert moe.read_params(2) - moe.read_params(1) == pytest.approx(expert * 8 * (1 - 8 / 128))
    assert moe.read_params(5000) == pytest.approx(moe.params - moe.vision_params - 151_936 * 2048, rel=1e-9)
    dense, tied = target_shape("Qwen2.5-VL-7B"), target_shape("Qwen2.5-VL-3B")
    assert dense.read_params(1) == dense.read_params(5000) == dense.active_params == pytest.approx(7.07e9, rel=0.01)
    assert tied.active_params == pytest.approx(3.09e9, rel=0.01)
    # 128 experts, 8 a token, and one more that is every token's.
    glm = from_config(config_of("zai-org/GLM-4.5V"), "moe")
    assert (glm.experts, glm.active_experts, glm.intermediate) == (129, 9, 1408)


def test_names_are_found_as_users_write_them():
    """Those of the released checkpoints: tests/unit/families/test_released.py. A draft's may be its size alone."""
    assert target_shape("qwen2.5-vl-7b-instruct").name == "Qwen2.5-VL 7B"
    assert target_shape("Qwen/Qwen3-VL-235B-A22B-Thinking").name == "Qwen3-VL 235B-A22B"
    for target, draft, found in (
        ("Qwen2.5-VL-72B", "7B", "Qwen2.5-VL 7B"),
        ("llava-onevision-72b", "7b", "LLaVA-OneVision 7B"),
        ("Qwen3-VL-235B-A22B", "30B-A3B", "Qwen3-VL 30B-A3B"),
    ):
        assert draft_shape(draft, target_shape(target)).name == found
    target = target_shape("Qwen2.5-VL-7B")
    assert draft_shape("self", target) is target


FLAT = config_of("Qwen/Qwen2.5-VL-72B-Instruct")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct-AWQ", INT4),
        ("RedHatAI/Qwen2.5-VL-7B-Instruct-quantized.w4a16", INT4),
        ("hfl/Qwen2.5-VL-7B-Instruct-GPTQ-Int4", INT4),
        ("cyankiwi/Qwen3-VL-4B-Instruct-AWQ-4bit", INT4),
        ("RedHatAI/Qwen2.5-VL-7B-Instruct-FP8-dynamic", FP8),
        ("Qwen/Qwen3-VL-8B-Instruct-FP8", FP8),
        ("cyankiwi/Qwen3-VL-4B-Instruct-AWQ-8bit", ""),
        ("RedHatAI/Qwen2.5-VL-7B-Instruct-quantized.w8a8", ""),
        ("Qwen2-VL-7B-Instruct-GPTQ-Int8", ""),
    ],
)
def test_a_checkpoints_name_says_how_its_layers_are_stored(name, kind):
    """A draft's and a target's. Catches: a tower that a checkpoint leaves in 16 bits counted in four; eight bits of an
    integer for fp8's.
    """
    if not kind:
        with pytest.raises(VidSpecError, match=r"plans are made for weights of 16 bits, of four bits and in fp8$"):
            target_shape(name)
        return
    found = target_shape(name)
    plain = target_shape(found.name.split(" (")[0])
    assert found.linear_bytes == QUANTISATIONS[kind] and draft_shape(name, plain) == found
    layers = plain.read_params(1) - plain.vocab * plain.hidden
    assert plain.weight_bytes - found.weight_bytes == pytest.approx((2 - QUANTISATIONS[kind]) * layers)
    with pytest.raises(VidSpecError, match="is quantised already"):
        found.quantised(FP8)


def test_a_configuration_says_how_its_layers_are_stored():
    awq, block = {"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}
    dynamic = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    dynamic |= {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
    for stored, kind in ((awq, INT4), (block, FP8), (dynamic, FP8)):
        assert from_config(FLAT | {"quantization_config": stored}, "").linear_bytes == QUANTISATIONS[kind]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "it is no configuration of a model"),
        ("[]", "it is no configuration of a model"),
        (json.dumps(FLAT | {"model_type": "llama"}), "model_type 'llama' is none of"),
        (json.dumps({"model_type": "qwen2_5_vl"}), "has no hidden_size"),
        (json.dumps(FLAT | {"num_hidden_layers": 0}), "not all positive integers"),
        (json.dumps(FLAT | {"hidden_size": "much"}), "it is no configuration of a model"),
        (json.dumps(FLAT | {"num_attention_heads": 0}), "it is no configuration of a model"),
        (json.dumps(FLAT | {"quantization_config": {"quant_method": "torchao"}}), "how it is quantised is not known"),
        (json.dumps(FLAT | {"quantization_config": {"quant_method": "gptq", "bits": 8}}), "how it is quantised is not"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(VidSpecError) as error:
        target_shape(str(tmp_path))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("shape", KNOWN, ids=lambda shape: shape.name)
def test_ranks_are_those_that_the_engine_takes(shape):
    """Catches: a plan for ranks that `families.check_ranks` refuses at start-up, or none for some that it takes."""
    text = SimpleNamespace(num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads)
    vision = SimpleNamespace(num_heads=shape.vision_heads)
    config = SimpleNamespace(model_type="qwen2_vl", get_text_config=lambda: text, vision_config=vision)
    for ranks in range(1, 17):
        try:
            families.check_ranks(config, ranks)
            is_taken = True
        except VidSpecError:
            is_taken = False
        assert shape.is_shared_by(ranks) == is_taken, ranks
