"""Untrained thinkers of Qwen2.5-Omni and Qwen3-Omni, in the layout of the released checkpoints."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_vidspec import assets

QWEN25_OMNI, QWEN3_OMNI = NAMES = ("qwen2.5-omni", "qwen3-omni")
_SPREAD = 0.12
_AUDIO = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
_MELS = 16
_KINDS = {QWEN25_OMNI: "Qwen2_5Omni", QWEN3_OMNI: "Qwen3OmniMoe"}
_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def build(name: str, folder: Path, seed: int = 0) -> str:
    """Write a model of `NAMES` with the bundled tokenizer, sounds' markers added; return its directory."""
    import transformers

    torch.manual_seed(seed)
    processor = _processor(_KINDS[name])
    config = _config(name, processor.tokenizer.get_vocab())
    thinker = getattr(transformers, f"{_KINDS[name]}ThinkerForConditionalGeneration")(config.thinker_config).float()
    weights: dict[str, torch.Tensor] = {}
    for key, weight in thinker.state_dict().items():
        weights |= {f"thinker.{part}": value.contiguous() for part, value in _as_released(key, weight)}
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    processor.save_pretrained(folder)
    return str(folder)


def _as_released(key: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Split what transformers holds of all experts at once."""
    before, is_expert, part = key.partition(".experts.")
    if not is_expert:
        return [(key, weight)]
    found = []
    for i, expert in enumerate(weight):
        halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
        named = halves if part == "gate_up_proj" else [("down_proj", expert)]
        found += [(f"{before}.experts.{i}.{one}.weight", value) for one, value in named]
    return found


def _config(name: str, ids: dict[str, int]) -> Any:
    import transformers

    kind = _KINDS[name]
    text: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": len(ids),
        "max_position_embeddings": 16_384,
        "initializer_range": _SPREAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }
    vision = {"depth": 3, "num_heads": 2, "patch_size": 14, "hidden_size": 64, "intermediate_size": 128}
    vision |= {"out_hidden_size": 128, "initializer_range": _SPREAD}
    audio = {"num_mel_bins": _MELS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"d_model": 32, "output_dim": 128, "initializer_range": _SPREAD}
    if name == QWEN3_OMNI:
        text |= {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        vision |= {"image_size": 112, "apply_vit_abs_pos_embed": True}
        audio |= {"downsample_hidden_size": 8}
        more = {f"{one}_token_id": ids[_TOKENS[f"{one}_token"]] for one in ("image", "video", "audio")}
    else:
        vision |= {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 25}
        more = {f"{one}_token_index": ids[_TOKENS[f"{one}_token"]] for one in ("image", "video", "audio")}
    thinker = getattr(transformers, f"{kind}ThinkerConfig")(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
        **more,
    )
    config = getattr(transformers, f"{kind}Config")(thinker_config=thinker)
    config.architectures = [f"{kind}ForConditionalGeneration"]
    return config


def _processor(kind: str) -> Any:
    import transformers

    path = assets.checkpoint("qwen2.5-vl", "target")
    with contextlib.redirect_stdout(io.StringIO()):
        bundled = transformers.AutoProcessor.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, extra_special_tokens=_TOKENS)
    tokenizer.add_tokens(list(_AUDIO), special_tokens=True)
    ears = transformers.WhisperFeatureExtractor(feature_size=_MELS)
    make = getattr(transformers, f"{kind}Processor")
    return make(bundled.image_processor, bundled.video_processor, ears, tokenizer, bundled.chat_template)
