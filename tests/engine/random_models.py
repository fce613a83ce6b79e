"""Checkpoints that tests make: untrained ones of families without a bundled pair, and padded vocabularies."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests import tiny_captioner
from vllm_vidspec import assets

QWEN2, QWEN3, QWEN3_MOE = NAMES = ("qwen2-vl", "qwen3-vl", "qwen3-vl-moe")
# Wide enough that other visual features make other tokens likely.
SPREAD = 0.12
_EXPERT_SIZE = 48
_TEXT = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(name: str, folder: Path, seed: int = 0) -> str:
    """Write an untrained model of `NAMES` with the bundled tokenizer and 14-pixel patches; return its directory."""
    torch.manual_seed(seed)
    config = _config(name)
    model = getattr(transformers, config.architectures[0])(config).float()
    model.save_pretrained(folder)
    _processor(name).save_pretrained(folder)
    if name == QWEN3_MOE:
        _store_experts_as_released(folder / "model.safetensors")
    return str(folder)


def pad(checkpoint: str, num_rows: int, scale: float, folder: Path) -> str:
    """Write a copy with more rows in embeddings and head, multiples of the first ones; return its directory."""
    original = Path(checkpoint)
    for path in original.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["vocab_size"] += num_rows
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(original / "model.safetensors")
    for name, table in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[name] = torch.cat((table, scale * table[torch.arange(num_rows) % len(table)]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
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
    ids = tiny_captioner.token_ids()
    text = _TEXT | {
        "intermediate_size": 256,
        "vocab_size": len(ids),
        "max_position_embeddings": 16_384,
        "initializer_range": SPREAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    tokens = {f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    tokens |= {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 14}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    kind = "Qwen2VL"
    if name == QWEN2:
        vision |= {"embed_dim": 64, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    else:
        kind = "Qwen3VL"
        vision |= {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": text["hidden_size"]}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 32}
        text["rope_parameters"]["mrope_interleaved"] = True
    if name == QWEN3_MOE:
        kind = "Qwen3VLMoe"
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": _EXPERT_SIZE}
        text |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
    return make_config(kind, text, vision, **tokens)


def make_config(kind: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> Any:
    vision |= {"initializer_range": SPREAD}
    make = getattr(transformers, f"{kind}Config")
    config = make(text_config=text, vision_config=vision, tie_word_embeddings=False, **fields)
    config.architectures = [f"{kind}ForConditionalGeneration"]
    return config


def _processor(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        bundled = transformers.AutoProcessor.from_pretrained(assets.checkpoint("qwen2.5-vl", "target"))
    kind, video = transformers.Qwen2VLProcessor, bundled.video_processor
    if name != QWEN2:
        kind = transformers.Qwen3VLProcessor
        video = transformers.Qwen3VLVideoProcessor(
            patch_size=14,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 784, "longest_edge": 112 * 112 * 64},
        )
    return kind(bundled.image_processor, bundled.tokenizer, video, bundled.chat_template)


def byte_tokenizer(special: dict[str, str]) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>", *special.values()])
    names = {key.removesuffix("_id"): token for key, token in special.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>", extra_special_tokens=names
    )


def widen(model: Any) -> None:
    """Give what is not drawn by the initializer's range, such as biases of a router, its spread too."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" not in name and "layernorm" not in name:
            torch.nn.init.normal_(weight.data, std=SPREAD)


def rename(path: Path, prefixes: dict[str, str]) -> None:
    """Give the weights of a file the names of a released checkpoint, by what names begin with."""
    weights = load_file(path)
    for prefix, released in prefixes.items():
        weights = {name.replace(prefix, released): weight for name, weight in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})
