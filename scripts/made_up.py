"""Made-up checkpoints: the shapes of published models without their weights; the one owner of these shapes.

Standard library only. A directory holds the bundled pair's tokenizer and processor and a `config.json`; vLLM fills the
weights in itself (`load_format="dummy"`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A model of the Qwen2.5-VL family, by the `config.json` that is published with it.

    Attributes:
        vision_intermediate: Width of the tower's MLP; all else of the tower is the same in every size.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vision_intermediate: int = 3420
    vocab_size: int = 152_064

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token in bf16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * HEAD_SIZE * _BF16_BYTES

    def weight_bytes(self, fp8: bool) -> int:
        """Return the bytes of all weights; in fp8 those of the language model's layers have one byte each."""
        heads = (self.num_attention_heads + self.num_key_value_heads) * 2 * HEAD_SIZE  # q, k, v, o
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        vision = VISION["depth"] * VISION["hidden_size"] * (4 * VISION["hidden_size"] + 3 * self.vision_intermediate)
        ends = 2 * self.vocab_size * self.hidden_size  # embeddings and output
        return layer * self.num_hidden_layers * (1 if fp8 else _BF16_BYTES) + (vision + ends) * _BF16_BYTES


HEAD_SIZE = 128
VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "num_heads": 16, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
SHAPES = {
    "3b": Shape(2048, 11_008, 36, 16, 2, vocab_size=151_936),
    "7b": Shape(3584, 18_944, 28, 28, 4),
    "32b": Shape(5120, 27_648, 64, 40, 8, vision_intermediate=3456),
    "72b": Shape(8192, 29_568, 80, 64, 8, vision_intermediate=3456),
}
_ROPE = {"mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0, "rope_type": "default"}
MAX_POSITIONS = 128_000
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
    vision: dict[str, Any] | None = None,
    fp8: bool = False,
    frame_pixels: int | None = None,
) -> Path:
    """Write a checkpoint's directory without weights.

    Args:
        source: The bundled checkpoint, whose processor is taken over.
        target: The directory to write.
        shape: None for the bundled one's own.
        num_layers: Of the language model, in place of the shape's.
        vision: What the tower has in place of `VISION`.
        fp8: Whether the language model's layers are in fp8.
        frame_pixels: The most pixels that a frame is shown with, in place of the bundled processor's.

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
        config["text_config"] |= {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": count,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "layer_types": ["full_attention"] * count,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": _ROPE,
        }
        tower = {"intermediate_size": shape.vision_intermediate, "out_hidden_size": shape.hidden_size}
        config["vision_config"] |= VISION | tower | (vision or {})
    if fp8:
        config["quantization_config"] = _FP8
    (target / "config.json").write_text(json.dumps(config, indent=1))
    if frame_pixels is not None:
        processor = json.loads((source / "processor_config.json").read_text())
        for part in ("image_processor", "video_processor"):
            processor[part]["size"]["longest_edge"] = frame_pixels
        (target / "processor_config.json").write_text(json.dumps(processor, indent=1))
    return target
