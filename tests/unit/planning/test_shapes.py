"""Shapes: the sizes that models go by, names as users write them, configurations, and refusals in one line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vidspec_tools.planning.models import KNOWN, draft_shape, target_shape
from vidspec_tools.planning.shapes import ModelShape, from_config
from vllm_vidspec import families
from vllm_vidspec.errors import VidSpecError

ASSETS = Path(__file__).resolve().parents[3] / "vllm_vidspec" / "assets"
# Billions of weights: all, and those that a token is multiplied with; from the model cards.
SIZES = {
    "Qwen2.5-VL 3B": (3.75, 3.09),
    "Qwen2.5-VL 7B": (8.29, 7.07),
    "Qwen2.5-VL 32B": (33.5, 32.0),
    "Qwen2.5-VL 72B": (73.4, 71.5),
    "Qwen3-VL 2B": (2.13, 1.72),
    "Qwen3-VL 4B": (4.44, 4.02),
    "Qwen3-VL 8B": (8.77, 7.57),
    "Qwen3-VL 32B": (33.4, 32.0),
    "Qwen3-VL 30B-A3B": (31.1, 3.04),
    "Qwen3-VL 235B-A22B": (235.7, 21.6),
    "LLaVA-OneVision 0.5B": (0.89, 0.49),
    "LLaVA-OneVision 7B": (8.03, 7.07),
    "LLaVA-OneVision 72B": (73.2, 71.5),
}


@pytest.mark.parametrize("shape", KNOWN, ids=lambda shape: shape.name)
def test_known_models_have_the_sizes_that_they_go_by(shape):
    """Catches: a wrong field of a model (layers, heads, intermediate, vocabulary, tied) or experts that all count."""
    whole, active = SIZES[shape.name]
    assert shape.params / 1e9 == pytest.approx(whole, rel=0.01)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=0.01)


def test_kv_of_a_token_is_what_the_papers_say():
    """80 layers x 8 heads x 128 x (K and V) x 2 bytes. Catches: query heads instead of KV heads, K without V."""
    assert target_shape("Qwen2.5-VL-72B").kv_bytes_per_token == 327_680
    assert target_shape("LLaVA-OneVision-0.5B").kv_bytes_per_token == 24 * 2 * 64 * 2 * 2


def test_a_forward_reads_the_experts_that_its_tokens_hit():
    """128 experts, 8 a token: one token reads 8 of them, many read all. Catches: all experts, or 8, whatever comes."""
    moe = target_shape("Qwen/Qwen3-VL-30B-A3B-Instruct")
    assert moe.read_params(1) == pytest.approx(moe.active_params)
    expert = 3 * 2048 * 768 * 48
    assert moe.read_params(2) - moe.read_params(1) == pytest.approx(expert * 8 * (1 - 8 / 128))
    assert moe.read_params(5000) == pytest.approx(moe.params - moe.vision_params - 151_936 * 2048, rel=1e-9)
    dense = target_shape("Qwen2.5-VL-7B")
    assert dense.read_params(1) == dense.read_params(5000) == dense.active_params


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-VL-72B-Instruct", "Qwen2.5-VL 72B"),
        ("qwen2.5-vl-7b-instruct", "Qwen2.5-VL 7B"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL 30B-A3B"),
        ("Qwen/Qwen3-VL-235B-A22B-Thinking", "Qwen3-VL 235B-A22B"),
        ("Qwen/Qwen3-VL-2B-Instruct", "Qwen3-VL 2B"),
        ("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "LLaVA-OneVision 0.5B"),
        ("llava-hf/llava-onevision-qwen2-72b-ov-hf", "LLaVA-OneVision 72B"),
    ],
)
def test_names_resolve(name, found):
    """Catches: the "2b" of 72b or 32b, and the "3b" of A3B, taken for a size."""
    assert target_shape(name).name == found


def test_a_short_draft_name_is_of_the_targets_family():
    for target, draft, found in (
        ("Qwen2.5-VL-72B", "7B", "Qwen2.5-VL 7B"),
        ("llava-onevision-72b", "7b", "LLaVA-OneVision 7B"),
        ("Qwen3-VL-235B-A22B", "30B-A3B", "Qwen3-VL 30B-A3B"),
    ):
        assert draft_shape(draft, target_shape(target)).name == found
    target = target_shape("Qwen2.5-VL-7B")
    assert draft_shape("self", target) is target


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "llava-onevision"])
def test_a_directory_is_read(family):
    """The bundled targets: 4 layers of 256, 4 heads of 64, 2 KV heads. Catches: the vision tower's numbers instead."""
    shape = target_shape(str(ASSETS / family / "target"))
    assert (shape.family, shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (family, 4, 256, 4, 2)
    assert (shape.head_dim, shape.intermediate, shape.tied) == (64, 768, False)
    assert shape.vision_params > 0


FLAT = dict(model_type="qwen2_5_vl", num_hidden_layers=80, hidden_size=8192, num_attention_heads=64)
FLAT |= dict(num_key_value_heads=8, intermediate_size=29_568, vocab_size=152_064, tie_word_embeddings=False)


def test_the_published_layout_gives_the_known_shape():
    """Qwen2.5-VL's config.json has the language model's fields on top. Catches: `text_config` taken for granted."""
    known = target_shape("Qwen2.5-VL-72B")
    read = from_config(FLAT | {"vision_config": {"num_heads": 16}}, known.name)
    assert read.active_params == known.active_params and read.kv_bytes_per_token == known.kv_bytes_per_token
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "head_dim": 128}
    text = {name: value for name, value in FLAT.items() if name != "model_type"} | experts
    moe = from_config({"model_type": "qwen3_vl_moe", "text_config": text}, "moe")
    assert (moe.experts, moe.active_experts, moe.intermediate, moe.head_dim) == (128, 8, 1536, 128)
    # GLM-4.5V calls them otherwise, and one is every token's.
    text["n_routed_experts"], text["n_shared_experts"] = text.pop("num_experts"), 1
    glm = from_config({"model_type": "glm4v_moe", "text_config": text}, "moe")
    assert (glm.family, glm.experts, glm.active_experts) == ("glm-v", 129, 9)


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
        (json.dumps(FLAT | {"quantization_config": {"quant_method": "fp8"}}), "it is quantised"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(VidSpecError) as error:
        target_shape(str(tmp_path))
    assert words in str(error.value) and "\n" not in str(error.value)


def as_hf(shape: ModelShape) -> SimpleNamespace:
    text = SimpleNamespace(num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads)
    vision = SimpleNamespace(num_heads=shape.vision_heads)
    return SimpleNamespace(model_type="qwen2_vl", get_text_config=lambda: text, vision_config=vision)


@pytest.mark.parametrize("shape", KNOWN, ids=lambda shape: shape.name)
def test_ranks_are_those_that_the_engine_takes(shape):
    """Catches: a plan for ranks that `families.check_ranks` refuses at start-up, or none for some that it takes."""
    for ranks in range(1, 17):
        try:
            families.check_ranks(as_hf(shape), ranks)
            is_taken = True
        except VidSpecError:
            is_taken = False
        assert shape.is_shared_by(ranks) == is_taken, ranks
