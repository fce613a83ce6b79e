"""Made-up checkpoints: the shapes of published models (`vllm_vidspec.planning.shapes`) without their weights.

Standard library only. A directory holds the bundled pair's tokenizer and processor and a `config.json`; vLLM fills the
weights in itself (`load_format="dummy"`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec import assets
from vllm_vidspec.planning.shapes import KNOWN, ModelShape

SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in KNOWN}
# What else `config.json` has: of the text model by family, of the tower by model.
TEXT: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {
        "max_position_embeddings": 128_000,
        "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0, "rope_type": "default"},
    },
    "qwen3-vl": {
        "max_position_embeddings": 262_144,
        "head_dim": 128,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5_000_000.0, "rope_type": "default",
        },
    },
}  # fmt: skip
_TOWER = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "fullatt_block_indexes": [7, 15, 23, 31]}
_QWEN3_TOWER = {"num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL 3B": _TOWER | {"intermediate_size": 3420},
    "Qwen2.5-VL 7B": _TOWER | {"intermediate_size": 3420},
    "Qwen2.5-VL 32B": _TOWER | {"intermediate_size": 3456},
    "Qwen2.5-VL 72B": _TOWER | {"intermediate_size": 3456},
    "Qwen3-VL 2B": _QWEN3_TOWER
    | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    "Qwen3-VL 8B": _QWEN3_TOWER
    | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
}
# Target and draft of a family, and the most pixels of an image and of a video that their processors let through.
PAIRS = {
    "qwen2.5-vl": ("Qwen2.5-VL 7B", "Qwen2.5-VL 3B", 12_845_056, 12_845_056),
    "qwen3-vl": ("Qwen3-VL 8B", "Qwen3-VL 2B", 16_777_216, 25_165_824),
}
# Weights by output channel, activations by token as they come: how FP8 checkpoints of this family are published.
_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True,
            },
        }
    },
    "ignore": ["re:.*lm_head", "re:.*visual.*"],
}  # fmt: skip
# Weights alone in four bits, with a scale for a group: as compressed-tensors publishes w4a16.
_W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
        }
    },
    "ignore": ["re:.*lm_head", "re:.*visual.*"],
}
_FOUR_BITS = {"bits": 4, "group_size": 128}
# What a checkpoint says of its language model's layers, by name.
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": _FP8,
    "w4a16": _W4A16,
    "awq": _FOUR_BITS
    | {"quant_method": "awq", "zero_point": True, "version": "gemm", "modules_to_not_convert": ["visual"]},
    "gptq": _FOUR_BITS
    | {"quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": False, "dynamic": {"-:.*visual.*": {}}},
}


def write_checkpoint(
    source: Path,
    target: Path,
    name: str | None,
    *,
    num_layers: int | None = None,
    weights: str | None = None,
    pixels: tuple[int, int] | None = None,
) -> Path:
    """Write a checkpoint's directory without weights, and return it.

    It has the processor of `source`, and the shape of `name`, a key of `VISION` (None: of the bundled model), with
    `num_layers` in its language model, `weights` as one of `QUANTISED` (None: as the bundled ones), and at most so many
    `pixels` of an image and of a video (of Qwen2.5-VL, of its frame).
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    if name is not None:
        shape, text = SHAPES[name], config["text_config"]
        text |= {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": num_layers or shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
            **TEXT[shape.family],
        }
        if "layer_types" in text:
            text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
        config["tie_word_embeddings"] = shape.tied
        config["vision_config"] |= {"out_hidden_size": shape.hidden} | VISION[name]
    if weights is not None:
        config["quantization_config"] = QUANTISED[weights]
    (target / "config.json").write_text(json.dumps(config, indent=1))
    processor = json.loads((source / "processor_config.json").read_text())
    for part, most in zip(("image_processor", "video_processor"), pixels or (None, None), strict=True):
        processor[part]["patch_size"] = config["vision_config"]["patch_size"]
        processor[part]["size"]["longest_edge"] = most or processor[part]["size"]["longest_edge"]
    (target / "processor_config.json").write_text(json.dumps(processor, indent=1))
    return target


def write_pair(
    family: str, folder: Path, names: Sequence[str | None] = (), *, pixels: Sequence[int] = (),
    weights: str | None = None, share: int = 1,
) -> dict[str, str]:  # fmt: skip
    """Write a target's and a draft's checkpoint, with a family's tokenizer and processor; return them by role.

    `names` are keys of `VISION`, None for the bundled shapes; they and `pixels` are those of `PAIRS` if empty. `share`
    says which part of the language models' layers to have, for a small device: a half, a third, ...
    """
    names, (image, video) = names or PAIRS[family][:2], pixels or PAIRS[family][2:]
    return {
        role: str(
            write_checkpoint(
                assets.checkpoint(family, role), folder / role, name, pixels=(image, video), weights=weights,
                num_layers=SHAPES[name].layers // share if name else None,
            )
        )
        for role, name in zip(assets.PAIR, names, strict=True)
    }  # fmt: skip


def user_kwargs(where: dict[str, str], spec: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of `LLM` that name models and what drafts: all else is the default that users have."""
    kwargs = {"model": where["target"], "load_format": "dummy", "disable_log_stats": True}
    return kwargs if spec is None else kwargs | {"speculative_config": spec}
