"""Untrained models of families without a bundled pair, with a tokenizer of bytes, and prompts for them.

Weights are so wide that another video, or another order of its tokens, makes other tokens likely.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from tests.engine import minicpm_code
from tests.engine.random_models import SPREAD, byte_tokenizer, make_config, rename, widen
from vllm_vidspec.tools import pairs

_TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 16_384,
    "initializer_range": SPREAD,
}
_MAX_PIXELS = 112 * 112 * 16  # of an image or a video, so that vLLM's profile of the largest is small
_SIZE = {"shortest_edge": 112 * 112, "longest_edge": _MAX_PIXELS}
_NUM_FRAMES = 8


@dataclasses.dataclass(frozen=True)
class Family:
    """What of a family differs from another here: special tokens by the configuration's name for their ids, what makes
    configuration and processor, what a prompt holds in place of an item, and the most items of a prompt."""

    tokens: dict[str, str]
    config: Callable[[dict[str, int], dict[str, Any]], Any]
    processor: Callable[..., Any]
    visual: dict[str, str]
    limits: dict[str, int] = dataclasses.field(default_factory=lambda: {"image": 2, "video": 2})
    with_metadata: bool = False
    # As transformers 5 writes a module's weights -> as released checkpoints, and so vLLM, call them; the architecture.
    released_names: dict[str, str] = dataclasses.field(default_factory=dict)
    architecture: str = ""
    # (its configuration, a folder): writes the weights, where vLLM runs a part of transformers' model.
    write: Callable[[Any, Path], None] | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of `LLM`


def build(name: str, folder: Path, seed: int = 0) -> str:
    """Write an untrained model of a family; return its directory."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.tokens)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in family.tokens.items()}
    end = tokenizer.eos_token_id
    text = _TEXT | {"vocab_size": len(tokenizer), "eos_token_id": end, "bos_token_id": end, "pad_token_id": end}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    config = family.config(ids, text)
    if family.write is not None:
        family.write(config, folder)
    else:
        model = getattr(transformers, config.architectures[0])(config).float()
        widen(model)
        model.save_pretrained(folder)
    if family.architecture:
        config.architectures = [family.architecture]
        config.save_pretrained(folder)
    family.processor(tokenizer).save_pretrained(folder)
    rename(folder / "model.safetensors", family.released_names)
    return str(folder)


def write_released(name: str, model: str, num_layers: int, folder: Path) -> str:
    """Write a released model's configuration with fewer layers, and what lies beside it; return the directory."""
    from tests import released

    family, config = FAMILIES[name], released.config_of(model)
    tokenizer = byte_tokenizer(family.tokens)
    holder = config.get("thinker_config", config)
    for key, token in family.tokens.items():
        for spelling in (key, key.replace("_id", "_index"), key.removeprefix("context_")):
            if spelling in holder:
                holder[spelling] = tokenizer.convert_tokens_to_ids(token)
    holder["text_config"]["num_hidden_layers"] = num_layers
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    settings = released.DATA[name]["processor"]
    other = {"side": settings["size"]} if "size" in settings else {}
    if settings.get("patch_size", _PATCHES["patch_size"]) != _PATCHES["patch_size"]:
        other = {"patch_size": settings["patch_size"]}
    family.processor(tokenizer, **other).save_pretrained(folder)
    return str(folder)


def prompt(
    name: str,
    question: str,
    videos: Sequence[np.ndarray] = (),
    images: Sequence[np.ndarray] = (),
    sound: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return a prompt of `LLM.generate`: videos `[num_frames, height, width, 3]` uint8, images, sound, then text."""
    family = FAMILIES[name]
    shown = [family.visual["video"] for _ in videos] + [family.visual["image"] for _ in images]
    data: dict[str, Any] = {}
    if videos:
        sampled = [pairs.sample_frames(pairs.FAMILIES[0], frames, _NUM_FRAMES) for frames in videos]
        data["video"] = sampled if family.with_metadata else [frames for frames, _ in sampled]
    if images:
        data["image"] = [Image.fromarray(image) for image in images]
    if sound is not None:
        shown.append(family.visual["audio"])
        data["audio"] = [(sound, 16_000)]
    text = f"user: {''.join(shown)}{question}\nassistant:"
    return {"prompt": text, "multi_modal_data": data} if data else {"prompt": text}


def _patches(kind: str, tokenizer: Any) -> Any:
    """Return a processor of merged patches, of the kinds of transformers that begin so."""
    image = getattr(transformers, f"{kind}ImageProcessor")(size=_SIZE)
    video = getattr(transformers, f"{kind}VideoProcessor")(size=_SIZE, max_image_size={"longest_edge": _MAX_PIXELS})
    return getattr(transformers, f"{kind}Processor")(image, tokenizer, video)


_PATCHES = {"depth": 3, "num_heads": 2, "hidden_size": 64, "patch_size": 14, "out_hidden_size": 128}
_TILES = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}


def _internvl(ids: dict[str, int], text: dict[str, Any]) -> Any:
    text |= {"model_type": "qwen3"}
    vision = _TILES | {"image_size": [112, 112], "patch_size": [14, 14], "layer_scale_init_value": 1.0}
    tokens = {"image_token_id": ids["context_image_token_id"]}
    return make_config("InternVL", text, vision, image_seq_length=16, downsample_ratio=0.5, **tokens)


def _internvl_processor(tokenizer: Any, side: int = 112) -> Any:
    size = {"height": side, "width": side}
    image = transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=2)
    video = transformers.InternVLVideoProcessor(size=size)
    return transformers.InternVLProcessor(image, tokenizer, video, image_seq_length=(side // 28) ** 2)


def _glm(kind: str, more: dict[str, Any], ids: dict[str, int], text: dict[str, Any]) -> Any:
    text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    vision = _PATCHES | {"intermediate_size": 256, "image_size": 112}
    return make_config(kind, text | more, vision, **ids)


# `use_qk_norm` is in the released configurations, and vLLM asks for it.
_EXPERTS = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": False}


# vLLM divides by the image size over the square of the patch size: with 112 and 14 that is 0.
def _next_video(ids: dict[str, int], text: dict[str, Any]) -> Any:
    text |= {"model_type": "llama"}
    vision = _TILES | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 7, "projection_dim": 64}
    tokens = {f"{kind}_token_index": ids[f"{kind}_token_id"] for kind in ("image", "video")}
    return make_config("LlavaNextVideo", text, vision, image_grid_pinpoints=[[56, 56]], **tokens)


def _next_video_processor(tokenizer: Any, side: int = 56) -> Any:
    sides = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    video = transformers.LlavaNextVideoVideoProcessor(**sides)
    image = transformers.LlavaNextImageProcessor(**sides, image_grid_pinpoints=[[side, side]])
    return transformers.LlavaNextVideoProcessor(
        video, image, tokenizer, patch_size=7 if side == 56 else 14, vision_feature_select_strategy="default"
    )


def _exaone(ids: dict[str, int], text: dict[str, Any]) -> Any:
    text |= {"model_type": "exaone4", "sliding_window": None}
    text |= {"layer_types": ["full_attention"] * text["num_hidden_layers"]}
    vision = _PATCHES | {"intermediate_size": 128, "num_key_value_heads": 1, "window_size": 56}
    return make_config("Exaone4_5_", text, vision | {"fullatt_block_indexes": [1]}, **ids)


def _clova(ids: dict[str, int], text: dict[str, Any]) -> Any:
    text |= {"model_type": "hyperclovax"}
    vision = _PATCHES | {"intermediate_size": 128, "window_size": 56, "fullatt_block_indexes": [1]}
    return make_config("HyperCLOVAXVisionV2", text, vision | {"out_hidden_size": 64}, **ids)


def _qwen_patches(patch_size: int = 14) -> tuple[Any, Any]:
    """Return the processors of images and of videos of those who have Qwen2-VL's."""
    kinds = transformers.Qwen2VLImageProcessor, transformers.Qwen2VLVideoProcessor
    image, video = (kind(size=_SIZE, patch_size=patch_size) for kind in kinds)
    return image, video


def _with_qwen_patches(kind: str, tokenizer: Any) -> Any:
    image, video = _qwen_patches()
    return getattr(transformers, f"{kind}Processor")(image, tokenizer, video)


def _omni(kind: str, ids: dict[str, int], text: dict[str, Any]) -> Any:
    rope = text["rope_parameters"] | {"mrope_section": [4, 6, 6]}
    vision = _PATCHES | {"intermediate_size": 128, "initializer_range": SPREAD}
    audio = {"num_mel_bins": _MELS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"d_model": 32, "output_dim": 128, "initializer_range": SPREAD}
    tokens = {name: ids[f"{name}_token_id"] for name in ("image", "video", "audio")}
    if kind == "Qwen3OmniMoe":
        tokens = {f"{name}_token_id": token for name, token in tokens.items()}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        rope |= {"mrope_interleaved": True}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "image_size": 112}
        vision |= {"apply_vit_abs_pos_embed": True}
        audio |= {"downsample_hidden_size": 8}
    else:
        tokens = {f"{name}_token_index": token for name, token in tokens.items()}
        vision |= {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 25}
    tokens |= {
        f"audio_{where}_token_id": ids[f"audio_{end}_token_id"] for where, end in (("start", "bos"), ("end", "eos"))
    }
    text |= {"rope_parameters": rope, "tie_word_embeddings": False}
    make = getattr(transformers, f"{kind}ThinkerConfig")
    thinker = make(text_config=text, vision_config=vision, audio_config=audio, **tokens)
    config = getattr(transformers, f"{kind}Config")(thinker_config=thinker)
    config.architectures = [f"{kind}ForConditionalGeneration"]
    return config


def _write_thinker(config: Any, folder: Path) -> None:
    """Write what vLLM loads of an Omni model, experts one by one as released."""
    kind = config.architectures[0].replace("For", "ThinkerFor")
    model = getattr(transformers, kind)(config.thinker_config).float()
    widen(model)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        before, are_experts, part = name.partition(".experts.")
        if not are_experts:
            weights[f"thinker.{name}"] = weight
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for i, expert in enumerate(weight):
            for one, value in zip(parts, expert.chunk(len(parts)), strict=True):
                weights[f"thinker.{before}.experts.{i}.{one}.weight"] = value.contiguous()
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _omni_processor(kind: str, tokenizer: Any, patch_size: int = 14) -> Any:
    ears = transformers.WhisperFeatureExtractor(feature_size=_MELS)
    return getattr(transformers, f"{kind}Processor")(*_qwen_patches(patch_size), ears, tokenizer)


_MELS = 16
_OMNI = {
    "tokens": {
        **{f"{name}_token_id": f"<|{name}|>" for name in ("image", "video", "audio")},
        **{f"{name}_{end}_token_id": f"<|{name}_{end}|>" for name in ("vision", "audio") for end in ("bos", "eos")},
    },
    "visual": {
        **{name: f"<|vision_bos|><|{name}|><|vision_eos|>" for name in ("image", "video")},
        "audio": "<|audio_bos|><|audio|><|audio_eos|>",
    },
    "limits": {"image": 2, "video": 2, "audio": 1},
    "with_metadata": True,
    "write": _write_thinker,
    "overrides": {"mm_processor_kwargs": {"size": _SIZE}},
}


def _minicpm(ids: dict[str, int], text: dict[str, Any]) -> Any:
    vision = _TILES | {"image_size": minicpm_code.SIDE, "patch_size": minicpm_code.PATCH, "initializer_range": SPREAD}
    config = minicpm_code.MiniCPMVConfig(vision, **text, tie_word_embeddings=False)
    config.architectures = ["MiniCPMV"]
    config.auto_map = {"AutoConfig": "minicpm_code.MiniCPMVConfig"}
    return config


def _write_minicpm(config: Any, folder: Path) -> None:
    """Write the weights of its three parts, and the code that comes with them."""
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    size, kv_size = config.hidden_size, config.vision_config.hidden_size
    parts = {"llm": transformers.Qwen3ForCausalLM(config), "vpm": Idefics2VisionTransformer(config.vision_config)}
    weights = {}
    for part, model in parts.items():
        widen(model)
        weights |= {f"{part}.{name}": weight for name, weight in model.float().state_dict().items()}
    shapes = {"query": (config.query_num, size), "proj": (size, size), "kv_proj.weight": (size, kv_size)}
    shapes |= {"attn.in_proj_weight": (3 * size, size), "attn.in_proj_bias": (3 * size,)}
    shapes |= {"attn.out_proj.weight": (size, size), "attn.out_proj.bias": (size,)}
    for norm in ("ln_q", "ln_kv", "ln_post"):
        shapes |= {f"{norm}.weight": (size,), f"{norm}.bias": (size,)}
    weights |= {f"resampler.{name}": SPREAD * torch.randn(shape) for name, shape in shapes.items()}
    for norm in ("ln_q", "ln_kv", "ln_post"):
        weights[f"resampler.{norm}.weight"] += 1
    config.save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    shutil.copy(minicpm_code.__file__, folder)
    code = {f"Auto{kind}": f"minicpm_code.MiniCPMV{kind}" for kind in ("ImageProcessor", "Processor")}
    names = {"image_processor_type": "MiniCPMVImageProcessor", "processor_class": "MiniCPMVProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**names, "auto_map": code}))


_GLM_TOKENS = {
    **{f"{kind}_token_id": f"<|{kind}|>" for kind in ("image", "video")},
    **{f"{kind}_start_token_id": f"<|begin_of_{kind}|>" for kind in ("image", "video")},
    **{f"{kind}_end_token_id": f"<|end_of_{kind}|>" for kind in ("image", "video")},
}
_GLM = {
    "tokens": _GLM_TOKENS,
    "visual": {kind: f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")},
    "limits": {"image": 2, "video": 1},
    "with_metadata": True,
}


def _tokens(text: str) -> dict[str, str]:
    """Return tokens by the configuration's name for their ids, given names and tokens by turns."""
    words = text.split()
    return {f"{name}_token_id": token for name, token in zip(words[::2], words[1::2], strict=True)}


FAMILIES = {
    "minicpm-v": Family(
        tokens=_tokens(
            "bos <s> unk <unk> im_start <image> im_end </image> im_id_start <image_id> im_id_end </image_id>"
        ),
        config=_minicpm,
        processor=lambda tokenizer: tokenizer,
        visual={"image": "(<image>./</image>)", "video": "(<video>./</video>)"},
        write=_write_minicpm,
        overrides={"trust_remote_code": True},
    ),
    "qwen2.5-omni": Family(
        config=partial(_omni, "Qwen2_5Omni"), processor=partial(_omni_processor, "Qwen2_5Omni"), **_OMNI
    ),
    "qwen3-omni": Family(
        config=partial(_omni, "Qwen3OmniMoe"), processor=partial(_omni_processor, "Qwen3OmniMoe"), **_OMNI
    ),
    "internvl": Family(
        tokens=_tokens("context_image <IMG_CONTEXT> start_image <img> end_image </img> video <video>"),
        config=_internvl,
        processor=_internvl_processor,
        visual={"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
    ),
    "glm-v": Family(config=partial(_glm, "Glm4v", {}), processor=partial(_patches, "Glm4v"), **_GLM),
    "glm-v-moe": Family(config=partial(_glm, "Glm4vMoe", _EXPERTS), processor=partial(_patches, "Glm46V"), **_GLM),
    "glm-ocr": Family(config=partial(_glm, "GlmOcr", {}), processor=partial(_patches, "Glm46V"), **_GLM),
    "llava-next-video": Family(
        tokens=_tokens("image <image> video <video>"),
        config=_next_video,
        processor=_next_video_processor,
        visual={"video": "<video>\n"},
        limits={"video": 1},
        released_names={"vision_tower.": "vision_tower.vision_model."},
    ),
    "hyperclovax": Family(
        tokens=_tokens("image <|IMAGE_PAD|> video <|VIDEO_PAD|>"),
        config=_clova,
        processor=partial(_with_qwen_patches, "HyperCLOVAXVisionV2"),
        visual={kind: f"<|{kind}_start|><|{kind.upper()}_PAD|><|{kind}_end|>" for kind in ("image", "video")},
        architecture="HCXVisionV2ForCausalLM",
        released_names={
            "model.language_model.": "model.language_model.model.",
            "language_model.model.lm_head": "language_model.lm_head",
            "vision_projector": "mm_projector",
        },
    ),
    # It has no adapter.
    "exaone4.5": Family(
        tokens=_tokens("image <|image_pad|> video <|video_pad|> vision_start <vision> vision_end </vision>"),
        config=_exaone,
        processor=partial(_with_qwen_patches, "Exaone4_5_"),
        visual={kind: f"<vision><|{kind}_pad|></vision>" for kind in ("image", "video")},
        with_metadata=True,
    ),
}
