"""What the bundled models are made of: their sizes, tokenizer, processor and chat template; not trained yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from training import tiny_captioner
from training.tiny_captioner import token_ids
from vllm_vidspec import assets
from vllm_vidspec.shapeworld import world

TEXT_SIZES = {
    "target": dict(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=768
    ),
    "draft": dict(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=320
    ),
}
QWEN_VISION_SIZES = {
    "target": dict(depth=3, hidden_size=96, num_heads=3, intermediate_size=192),
    "draft": dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128),
}
LLAVA_VISION_SIZES = {
    "target": dict(num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=256),
    "draft": dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=160),
}
DEEPSTACK = {"target": [0, 1], "draft": [0]}  # blocks whose features Qwen3-VL adds to its first layers, one each
ROPE_THETA = 500.0
MAX_POSITIONS = 16384
MAX_FRAMES = 64  # of 112 x 112, before Qwen3-VL's processor shrinks them


def build_tokenizer(family: str, vocabulary: tuple[str, ...] = ()):
    """A word-level tokenizer whose ids are `tiny_captioner.token_ids(family, vocabulary)`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = token_ids(family, vocabulary)
    words = {word: i for word, i in ids.items() if word not in tiny_captioner.SPECIAL_TOKENS}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(tiny_captioner.SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(tiny_captioner.SPECIAL_TOKENS), clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )  # fmt: skip
    is_llava = family == "llava-onevision"
    tokenizer.image_token = "<image>" if is_llava else "<|image_pad|>"
    tokenizer.video_token = "<video>" if is_llava else "<|video_pad|>"
    if any(tokenizer.convert_tokens_to_ids(token) != i for token, i in ids.items()):
        raise RuntimeError("the tokenizer numbered its tokens differently")
    return tokenizer


def build_processor(family: str, vocabulary: tuple[str, ...] = (), side: int = world.FRAME_SIZE):
    """The family's own processor for frames of `side` x `side` pixels."""
    import transformers

    tokenizer = build_tokenizer(family, vocabulary)
    template = (assets.checkpoint(family, "target") / "chat_template.jinja").read_text()
    normal = dict(zip(("image_mean", "image_std"), tiny_captioner.NORMALISATION[family].tolist(), strict=True))
    shared = dict(tokenizer=tokenizer, chat_template=template)
    if family == "llava-onevision":
        size = dict(height=side, width=side)
        grids = dict(size=size, image_grid_pinpoints=_pinpoints())
        return transformers.LlavaOnevisionProcessor(
            image_processor=transformers.LlavaOnevisionImageProcessor(**grids, **normal),
            video_processor=transformers.LlavaOnevisionVideoProcessor(size=size, **normal),
            num_image_tokens=64, vision_feature_select_strategy="full", **shared,
        )  # fmt: skip
    if family == "qwen3-vl":
        image = dict(shortest_edge=28 * 28, longest_edge=side * side)
        video = dict(image, longest_edge=side * side * MAX_FRAMES)  # a limit of all frames together
        patches = dict(patch_size=14, merge_size=2, temporal_patch_size=2, **normal)
        return transformers.Qwen3VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(size=image, **patches),
            video_processor=transformers.Qwen3VLVideoProcessor(size=video, cap_pixels_per_frame=False, **patches),
            **shared,
        )
    pixels = dict(min_pixels=28 * 28, max_pixels=side * side)
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**pixels),
        video_processor=transformers.Qwen2VLVideoProcessor(**pixels, cap_pixels_per_frame=False),
        **shared,
    )


def build_model(family: str, role: str, seed: int) -> torch.nn.Module:
    """A randomly initialised model in fp32."""
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, tiny_captioner.MODEL_CLASSES[family])
    return model_class(build_config(family, role)).float()


def build_config(family: str, role: str, vocabulary: tuple[str, ...] = ()) -> Any:
    """A model's configuration; `vocabulary` as of `token_ids`."""
    import transformers

    ids = token_ids(family, vocabulary)
    special = dict(bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    rope: dict = {"rope_type": "default", "rope_theta": ROPE_THETA}
    if family == "qwen2.5-vl":
        rope["mrope_section"] = [8, 12, 12]
    if family == "qwen3-vl":
        rope |= {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    text = dict(
        TEXT_SIZES[role], **special, vocab_size=len(ids), max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False, rope_parameters=rope, rms_norm_eps=1e-6,
    )  # fmt: skip
    if family == "llava-onevision":
        return transformers.LlavaOnevisionConfig(
            text_config=dict(text, model_type="qwen2"),
            vision_config=dict(
                LLAVA_VISION_SIZES[role], model_type="siglip_vision_model", vision_use_head=False,
                image_size=world.FRAME_SIZE, patch_size=14,
            ),
            image_token_index=ids["<image>"], video_token_index=ids["<video>"], vision_feature_layer=-1,
            vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9",
            image_grid_pinpoints=_pinpoints(), tie_word_embeddings=False,
        )  # fmt: skip
    tokens = dict(
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    vision = dict(
        QWEN_VISION_SIZES[role], out_hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    if family == "qwen3-vl":
        patches = (world.FRAME_SIZE // 14) ** 2
        return transformers.Qwen3VLConfig(
            text_config=dict(text, head_dim=text["hidden_size"] // text["num_attention_heads"]),
            vision_config=dict(vision, num_position_embeddings=patches, deepstack_visual_indexes=DEEPSTACK[role]),
            **tokens,
        )
    of_windows = dict(window_size=112, fullatt_block_indexes=list(range(vision["depth"])), tokens_per_second=2)
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision | of_windows, **tokens)


def _pinpoints() -> list[list[int]]:
    side = world.FRAME_SIZE
    return [[side, side], [side, 2 * side], [2 * side, side]]


def use_hub_names(path: Path) -> None:
    """Rename SigLIP's weights as published checkpoints do: vLLM's loader knows `vision_tower.vision_model.*` only."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {
        name.replace(old, new, 1) if name.startswith(old) and not name.startswith(new) else name: weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
