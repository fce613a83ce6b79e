"""Shapes: what a model's sizes, by its name or its config.json, say of its weights, KV and arithmetic."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError, quoted
from vllm_vidspec.planning.draft_cost import FOUR_BITS, FP8, INT4_BYTES, WEIGHT_BYTES, Decoder, bytes_of_layers, part

KV_BYTES = 2  # of a number: bf16
PATCHES = 4  # of a visual token, which a tower sees one by one
# Visual tokens of a frame: of LLaVA-OneVision whatever its size, of the others at 640 x 360.
FRAME_TOKENS = {"qwen2.5-vl": 150, "qwen3-vl": 110, "llava-onevision": 196}
# Bytes of a weight of a layer: vLLM's `quantization: fp8_per_tensor` makes it of a 16-bit checkpoint, or the checkpoint
# has it; four bits are a checkpoint's own (AWQ, GPTQ, compressed-tensors).
INT4 = "int4"
QUANTISATIONS = {FP8: 1.0, INT4: INT4_BYTES}


@dataclass(frozen=True)
class ModelShape:
    """A decoder and the vision tower before it, in numbers; biases and norms are left out."""

    name: str  # as users see it
    family: str  # as `vllm_vidspec.families` names it
    layers: int  # decoder layers
    hidden: int  # size of the residual stream
    heads: int  # query heads of a layer
    kv_heads: int  # KV heads of a layer
    head_dim: int  # size of a head
    intermediate: int  # inner size of an MLP, or of one expert
    vocab: int  # rows of the embedding and of the output head
    tied: bool = False  # whether the two are one matrix
    experts: int = 0  # of a layer; 0: dense
    active_experts: int = 0  # that a token goes through
    vision_params: int = 0  # weights of the vision tower, roughly, or of a map; no time while text is decoded
    has_map: bool = False  # a linear map of the target's visual embeddings is in the tower's place
    vision_heads: int = 16  # heads of a layer of the tower; 0: ranks do not share them
    # Of a weight of the layers, and of one of the tower; embedding and output head have 16 bits
    linear_bytes: float = WEIGHT_BYTES
    vision_bytes: float = WEIGHT_BYTES
    checkpoint: str = field(default="", compare=False)  # as `vllm serve` takes it; "": none is known

    def _decoder_params(self, experts: float) -> float:
        """Return the weights of all layers and of the output head, with so many experts in a layer."""
        decoder = Decoder(*(getattr(self, name) for name in Decoder._fields))
        return decoder.layer_params(experts) + decoder.head_params

    @property
    def params(self) -> float:
        """All weights, the vision tower's included."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self._decoder_params(self.experts) + embedding + self.vision_params

    @property
    def active_params(self) -> float:
        """Weights that a token is multiplied with."""
        return self._decoder_params(self.active_experts)

    def read_params(self, tokens: int) -> float:
        """Return the weights that a forward over so many tokens reads.

        Of a layer's experts those that any token chose, as if each chose at random: E (1 - (1 - k / E)^tokens).
        """
        if not self.experts:
            return self._decoder_params(0)
        missed = (1 - self.active_experts / self.experts) ** tokens
        return self._decoder_params(self.experts * (1 - missed))

    @property
    def weight_bytes(self) -> float:
        vocab, vision = self.vocab * self.hidden * (1 if self.tied else 2), self.vision_params
        layers = self.params - vocab - vision
        return layers * self.linear_bytes + vision * self.vision_bytes + vocab * WEIGHT_BYTES

    def read_bytes(self, tokens: int) -> float:
        head = self.vocab * self.hidden
        return (self.read_params(tokens) - head) * self.linear_bytes + head * WEIGHT_BYTES

    def quantised(self, name: str) -> "ModelShape":
        """Return the same with its layers quantised as one of QUANTISATIONS, or refuse (VidSpecError); what vLLM
        quantises as it loads has its tower quantised too.
        """
        if name not in QUANTISATIONS:
            raise VidSpecError(f"--draft-quantization {quoted(name)} is none of {', '.join(QUANTISATIONS)}")
        if self.linear_bytes < WEIGHT_BYTES:
            raise VidSpecError(f"--draft-quantization: {self.name} is quantised already")
        if name == FP8:
            return replace(self.stored(name), vision_bytes=QUANTISATIONS[name])
        of_family = self.family.replace("-", "_").replace(".", "_")
        return replace(self.stored(name), checkpoint=FOUR_BITS.get((of_family, self.layers, self.hidden), ""))

    def stored(self, name: str | None) -> "ModelShape":
        """Return the same as a checkpoint of one of QUANTISATIONS has it, whose tower keeps 16 bits; None: as it is."""
        if name is None:
            return self
        return replace(self, name=f"{self.name} ({name.split('_')[0]})", linear_bytes=QUANTISATIONS[name])

    def with_eyes_of(self, target: "ModelShape") -> "ModelShape":
        """Return the same without a tower: it reads the target's visual embeddings through a linear map."""
        return replace(self, vision_params=self.hidden * target.hidden, vision_bytes=WEIGHT_BYTES, has_map=True)

    @property
    def vision_flops(self) -> float:
        """Operations of the tower, or of the map, for one visual token; a tower's attention is left out."""
        return 2 * self.vision_params * (1 if self.has_map else PATCHES)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token takes in the KV cache, over all layers and ranks."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_BYTES

    def is_shared_by(self, ranks: int) -> bool:
        """Return whether tensor-parallel ranks can share the heads evenly: the rule of `families.check_ranks`."""
        kv_heads = self.kv_heads
        uneven = self.heads % ranks or self.vision_heads % ranks or max(kv_heads, ranks) % min(kv_heads, ranks)
        return not uneven


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a Hugging Face configuration, as JSON has it; KeyError: what it lacks, VidSpecError: a family
    that is not supported, weights neither of 16 bits, of four nor in fp8, or numbers that are none.
    """
    from vllm_vidspec.families import known_families  # with torch, which models by name do without
    from vllm_vidspec.families.base import read_field

    families = {model_type: known for known in known_families() for model_type in sorted(known.model_types)}
    adapter = families.get(config["model_type"])
    if adapter is None:
        raise VidSpecError(f"model_type {quoted(config['model_type'])} is none of {', '.join(families)}")
    kind = _stored_as(config.get("quantization_config") or {})
    if kind == "":
        raise VidSpecError(f"how it is quantised is not known here; {_PLANNED}")
    text, vision = part(config, "text_config") or config, part(config, "vision_config")
    shape = ModelShape(
        name,
        adapter.name,
        **Decoder.of(config)._asdict(),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        vision_params=_vision_params(vision),
        vision_heads=read_field(config, adapter.vision_heads) or 0,  # 0: any number of ranks
        checkpoint=name,
    )
    sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocab)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise VidSpecError("its sizes are not all positive integers")
    return shape.stored(kind)


def _stored_as(stored: Mapping[str, Any]) -> str | None:
    """Return the key of QUANTISATIONS that a checkpoint's own quantisation is; None: 16 bits, "": another."""
    is_float = "fp8" in str(stored.get("quant_method")) or "float" in str(stored.get("format"))
    kinds: dict[float | None, str | None] = {WEIGHT_BYTES: None, 1.0: FP8 if is_float else "", 0.5: INT4}
    return kinds.get(bytes_of_layers(None, stored), "")


def _vision_params(vision: Mapping[str, Any]) -> int:
    """Return the weights of a tower's layers, three matrices to an MLP; 0 where the configuration says too little."""
    depth = vision.get("depth") or vision.get("num_hidden_layers") or 0
    hidden, inner = vision.get("hidden_size") or 0, vision.get("intermediate_size") or 0
    return depth * (4 * hidden * hidden + 3 * hidden * inner)


# ---- models by name --------------------------------------------------------------------------------------------------

_NAMES = {"qwen2.5-vl": "Qwen2.5-VL", "qwen3-vl": "Qwen3-VL", "llava-onevision": "LLaVA-OneVision"}
_CHECKPOINTS = {
    "qwen2.5-vl": "Qwen/Qwen2.5-VL-{}-Instruct",
    "qwen3-vl": "Qwen/Qwen3-VL-{}-Instruct",
    "llava-onevision": "llava-hf/llava-onevision-qwen2-{}-ov-hf",
}
_Sizes = tuple[int, int, int, int, int, int, int]


def _known(family: str, size: str, vision: int, sizes: _Sizes, tied: bool = False, experts: int = 0) -> ModelShape:
    """Return a model by its `sizes`, from `layers` to `vocab` of ModelShape, and `vision` millions of tower weights."""
    more: dict[str, Any] = {
        "experts": experts,
        "active_experts": 8 if experts else 0,
        "vision_params": vision * 1_000_000,
    }
    checkpoint = _CHECKPOINTS[family].format(size if family.startswith("qwen") else size.lower())
    return ModelShape(f"{_NAMES[family]} {size}", family, *sizes, tied=tied, checkpoint=checkpoint, **more)


# From the config.json of each model's public checkpoint; a test holds the sums to the sizes that the models go by.
KNOWN: tuple[ModelShape, ...] = (
    _known("qwen2.5-vl", "3B", 670, (36, 2048, 16, 2, 128, 11_008, 151_936), tied=True),
    _known("qwen2.5-vl", "7B", 670, (28, 3584, 28, 4, 128, 18_944, 152_064)),
    _known("qwen2.5-vl", "32B", 670, (64, 5120, 40, 8, 128, 27_648, 152_064)),
    _known("qwen2.5-vl", "72B", 670, (80, 8192, 64, 8, 128, 29_568, 152_064)),
    _known("qwen3-vl", "2B", 410, (28, 2048, 16, 8, 128, 6144, 151_936), tied=True),
    _known("qwen3-vl", "4B", 410, (36, 2560, 32, 8, 128, 9728, 151_936), tied=True),
    _known("qwen3-vl", "8B", 580, (36, 4096, 32, 8, 128, 12_288, 151_936)),
    _known("qwen3-vl", "32B", 580, (64, 5120, 64, 8, 128, 25_600, 151_936)),
    _known("qwen3-vl", "30B-A3B", 580, (48, 2048, 32, 4, 128, 768, 151_936), experts=128),
    _known("qwen3-vl", "235B-A22B", 580, (94, 4096, 64, 4, 128, 1536, 151_936), experts=128),
    _known("llava-onevision", "0.5B", 400, (24, 896, 14, 2, 64, 4864, 152_000), tied=True),
    _known("llava-onevision", "7B", 400, (28, 3584, 28, 4, 128, 18_944, 152_128)),
    _known("llava-onevision", "72B", 400, (80, 8192, 64, 8, 128, 29_568, 152_128)),
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?b(?:-a\d+b)?)(?![a-z0-9])")
_PLANNED = "plans are made for weights of 16 bits, of four bits and in fp8"
# What a checkpoint's name says of its weights, the first that holds; 8 bits of AWQ and GPTQ are integers.
_FORMATS = (
    (re.compile(r"int[38]|w8a|[38]-?bit|gguf"), ""),
    (re.compile(r"fp8"), FP8),
    (re.compile(r"awq|gptq|int4|w4a16|4-?bit"), INT4),
)


def video_tokens(family: str, minutes: float, fps: float) -> int:
    """Return the visual tokens of a video of 640 x 360 pixels, sampled at so many frames a second."""
    if family not in FRAME_TOKENS:
        raise VidSpecError(f"--minutes: how many tokens a frame has of {family} is not known here; give --video-tokens")
    if not 0 < fps < float("inf"):
        raise VidSpecError(f"--fps must be above 0 and finite, not {fps:g}")
    return round(60 * minutes * fps * FRAME_TOKENS[family])


def target_shape(name: str) -> ModelShape:
    """Return the shape of a known model, as `Qwen/Qwen2.5-VL-72B-Instruct`, or of a directory with a config.json."""
    return _shape(name, "--target", None)


def draft_shape(name: str, target: ModelShape) -> ModelShape:
    """Return the shape of a draft: "self", a size of the target's family as `7B`, or what `target_shape` takes."""
    if name == "self":
        return target
    draft = _shape(name, "--draft", target.family)
    if draft.family != target.family:
        raise VidSpecError(f"--draft: {draft.name} is of the family {draft.family}, the target of {target.family}")
    return replace(draft)  # never the target's object, which is "self"


def _shape(name: str, option: str, family: str | None) -> ModelShape:
    if Path(name).is_dir():
        return from_folder(name, option)
    words = name.lower().rsplit("/", 1)[-1]
    kind = next((kind for pattern, kind in _FORMATS if pattern.search(words)), None)
    if kind == "":
        raise VidSpecError(f"{option}: {quoted(name)}: {_PLANNED}")
    named = next((known.family for known in KNOWN if known.family in words), None)
    sizes = _SIZE.findall(words)
    is_short = bool(sizes) and words == sizes[0]
    for known in KNOWN:
        if sizes and known.family == (family if is_short else named) and known.name.lower().endswith(f" {sizes[-1]}"):
            return replace(known.stored(kind), checkpoint=name) if kind or "/" in name else known
    shown = [known.name for known in KNOWN if known.family == (named or family)] or [known.name for known in KNOWN]
    raise VidSpecError(
        f"{option}: no model {quoted(name)} is known; there are {', '.join(shown)}, or a local directory"
    )


def from_folder(folder: str, option: str = "--target") -> ModelShape:
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
        return from_config(config, str(folder))
    except OSError:
        raise VidSpecError(f"{option}: {folder} has no config.json") from None
    except KeyError as error:
        raise VidSpecError(f"{option}: {path} has no {error.args[0]}") from None
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        reason = str(error) if isinstance(error, VidSpecError) else "it is no configuration of a model"
        raise VidSpecError(f"{option}: {path}: {reason}") from None
