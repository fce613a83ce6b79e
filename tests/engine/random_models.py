"""Untrained checkpoints of families that have no bundled pair: identity needs no sense, only features that matter."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training import tiny_captioner
from vllm_vidspec import assets

QWEN2, QWEN3, QWEN3_MOE = NAMES = ("qwen2-vl", "qwen3-vl", "qwen3-vl-moe")
# Wide enough that other visual features make other tokens likely.
_SPREAD = 0.12
_EXPERT_SIZE = 48
_TEXT = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(name: str, folder: Path, seed: int = 0) -> str:
    """Write an untrained model with the bundled tokenizer and 14-pixel patches; return its directory.

    Args:
        name: One of `NAMES`.
        folder: To write to.
        seed: Of its weights.
    """
    import transformers

    torch.manual_seed(seed)
    config = _config(name)
    model = getattr(transformers, config.architectures[0])(config).float()
    model.save_pretrained(folder)
    _processor(name).save_pretrained(folder)
    if name == QWEN3_MOE:
        _store_experts_as_released(folder / "model.safetensors")
    return str(folder)


def _store_experts_as_released(path: Path) -> None:
    """Turn experts' weights to `[experts, in, out]`, as released: transformers 5 writes the other way."""
    weights = load_file(path)
    for name, weight in weights.items():
        size = {"gate_up_proj": _TEXT["hidden_size"], "down_proj": _EXPERT_SIZE}.get(name.rpartition(".")[2])
        if ".experts." in name and weight.shape[1] != size:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def _config(name: str) -> Any:
    import transformers

    ids = tiny_captioner.token_ids()
    text = _TEXT | {
        "intermediate_size": 256,
        "vocab_size": len(ids),
        "max_position_embeddings": 16_384,
        "initializer_range": _SPREAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
    vision |= {"temporal_patch_size": 2, "initializer_range": _SPREAD}
    if name == QWEN2:
        vision |= {"embed_dim": 64, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
        config.architectures = ["Qwen2VLForConditionalGeneration"]
        return config
    vision |= {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": text["hidden_size"]}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text |= {"head_dim": 32}
    text["rope_parameters"]["mrope_interleaved"] = True
    if name == QWEN3:
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
        config.architectures = ["Qwen3VLForConditionalGeneration"]
        return config
    text |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _EXPERT_SIZE,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    return config


def _processor(name: str) -> Any:
    import transformers

    with contextlib.redirect_stdout(io.StringIO()):
        bundled = transformers.AutoProcessor.from_pretrained(assets.checkpoint("qwen2.5-vl", "target"))
    if name == QWEN2:
        kind = transformers.Qwen2VLProcessor
        return kind(bundled.image_processor, bundled.tokenizer, bundled.video_processor, bundled.chat_template)
    side = 112
    video = transformers.Qwen3VLVideoProcessor(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 784, "longest_edge": side * side * 64},
    )
    kind = transformers.Qwen3VLProcessor
    return kind(bundled.image_processor, bundled.tokenizer, video, bundled.chat_template)
