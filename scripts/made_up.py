"""Made-up checkpoints: the shapes of published models without their weights; the one owner of these shapes.

Standard library only. A directory holds the bundled pair's tokenizer and processor and a `config.json`; vLLM fills the
weights in itself (`load_format="dummy"`).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BF16_BYTES = 2
HEAD_SIZE = 128
MAX_POSITIONS = 128_000
VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "num_heads": 16, "fullatt_block_indexes": [7, 15, 23, 31],
    "intermediate_size": 3420,
}  # fmt: skip
_QWEN3_VISION = {"num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304}
_TEXT = {
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0, "rope_type": "default"},
}
_QWEN3_TEXT = {
    "max_position_embeddings": 262_144,
    "head_dim": HEAD_SIZE,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5_000_000.0, "rope_type": "default",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model by the `config.json` that is published with it; Qwen2.5-VL unless `text` and `vision` are given.

    Attributes:
        tied: Whether the output head is the embedding.
        text: What is left of its text model's configuration.
        vision: Of its tower's.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 152_064
    tied: bool = False
    text: dict[str, Any] = field(default_factory=_TEXT.copy)
    vision: dict[str, Any] = field(default_factory=VISION.copy)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token in bf16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * HEAD_SIZE * _BF16_BYTES

    def weight_bytes(self, fp8: bool) -> int:
        """Return the bytes of all weights; in fp8 those of the language model's layers have one byte each."""
        heads = (self.num_attention_heads + self.num_key_value_heads) * 2 * HEAD_SIZE  # q, k, v, o
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        width = self.vision["hidden_size"]
        vision = self.vision["depth"] * width * (4 * width + 3 * self.vision["intermediate_size"])
        ends = (1 if self.tied else 2) * self.vocab_size * self.hidden_size  # embeddings and output
        return layer * self.num_hidden_layers * (1 if fp8 else _BF16_BYTES) + (vision + ends) * _BF16_BYTES


def _qwen3(*numbers: int, tied: bool, **vision: Any) -> Shape:
    return Shape(*numbers, vocab_size=151_936, tied=tied, text=_QWEN3_TEXT, vision=_QWEN3_VISION | vision)


_WIDE = VISION | {"intermediate_size": 3456}
SHAPES = {
    "3b": Shape(2048, 11_008, 36, 16, 2, vocab_size=151_936, tied=True),
    "7b": Shape(3584, 18_944, 28, 28, 4),
    "32b": Shape(5120, 27_648, 64, 40, 8, vision=_WIDE),
    "72b": Shape(8192, 29_568, 80, 64, 8, vision=_WIDE),
    "qwen3-2b": _qwen3(
        *(2048, 6144, 28, 16, 8), tied=True,
        depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17],
    ),
    "qwen3-8b": _qwen3(
        *(4096, 12_288, 36, 32, 8), tied=False,
        depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24],
    ),
}  # fmt: skip
# Target and draft of a family, and the most pixels of an image and of a video that their processors let through.
PAIRS = {
    "qwen2.5-vl": ("7b", "3b", 12_845_056, 12_845_056),
    "qwen3-vl": ("qwen3-8b", "qwen3-2b", 16_777_216, 25_165_824),
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


def write_checkpoint(
    source: Path,
    target: Path,
    shape: Shape | None,
    *,
    num_layers: int | None = None,
    fp8: bool = False,
    pixels: tuple[int, int] | None = None,
) -> Path:
    """Write a checkpoint's directory without weights.

    Args:
        source: The bundled checkpoint, whose processor is taken over.
        target: The directory to write.
        shape: None for the bundled one's own.
        num_layers: Of the language model, in place of the shape's.
        fp8: Whether the language model's layers are in fp8.
        pixels: The most pixels of an image and of a video (of Qwen2.5-VL, of its frame), in place of the bundled ones.

    Returns:
        `target`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and "index" not in file.name and file.name != "config.json":
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    if shape is not None:
        count = num_layers or shape.num_hidden_layers
        config["tie_word_embeddings"] = shape.tied
        config["text_config"] |= {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": count,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": shape.tied,
            **({"layer_types": ["full_attention"] * count} if "layer_types" in config["text_config"] else {}),
            **shape.text,
        }
        config["vision_config"] |= {"out_hidden_size": shape.hidden_size} | shape.vision
    if fp8:
        config["quantization_config"] = _FP8
    (target / "config.json").write_text(json.dumps(config, indent=1))
    processor = json.loads((source / "processor_config.json").read_text())
    for part, most in zip(("image_processor", "video_processor"), pixels or (None, None), strict=True):
        processor[part]["patch_size"] = config["vision_config"]["patch_size"]
        processor[part]["size"]["longest_edge"] = most or processor[part]["size"]["longest_edge"]
    (target / "processor_config.json").write_text(json.dumps(processor, indent=1))
    return target


def whole_pair(family: str, bundled: dict[str, Path], folder: Path, share: int = 1) -> dict[str, str]:
    """Write a family's pair of `PAIRS`, all layers, towers and pixels as published; return its directories by role.

    Args:
        family: A key of `PAIRS`.
        bundled: The bundled checkpoints by role, "target" and "draft".
        folder: Where to write.
        share: Which part of the language models' layers to have, for a small device: a half, a third, ...
    """
    *sizes, image, video = PAIRS[family]
    return {
        role: str(
            write_checkpoint(
                bundled[role], folder / role, SHAPES[size], pixels=(image, video),
                num_layers=SHAPES[size].num_hidden_layers // share,
            )
        )
        for role, size in zip(("target", "draft"), sizes, strict=True)
    }  # fmt: skip


def user_kwargs(where: dict[str, str], spec: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of `LLM` that name models and what drafts: all else is the default that users have.

    Args:
        where: Directories by role.
        spec: A speculative config, None for vanilla vLLM.
    """
    kwargs = {"model": where["target"], "load_format": "dummy", "disable_log_stats": True}
    return kwargs if spec is None else kwargs | {"speculative_config": spec}
