"""Models by name, with the shapes of their public checkpoints, or by a directory's config.json."""

import json
import re
from pathlib import Path

from vidspec_tools.planning.shapes import ModelShape, from_config
from vllm_vidspec.errors import VidSpecError, quoted


def _qwen25(size: str, *numbers: int, tied: bool = False) -> ModelShape:
    layers, hidden, heads, kv_heads, intermediate, vocab = numbers
    name, vision = f"Qwen2.5-VL {size}", 670_000_000
    return ModelShape(
        name, "qwen2.5-vl", layers, hidden, heads, kv_heads, 128, intermediate, vocab, tied, vision_params=vision
    )


def _qwen3(size: str, vision: int, *numbers: int, tied: bool = False, experts: int = 0) -> ModelShape:
    layers, hidden, heads, kv_heads, intermediate = numbers
    return ModelShape(
        *(f"Qwen3-VL {size}", "qwen3-vl", layers, hidden, heads, kv_heads, 128, intermediate, 151_936, tied),
        experts=experts,
        active_experts=8 if experts else 0,
        vision_params=vision,
    )


def _llava(size: str, *numbers: int, tied: bool = False) -> ModelShape:
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = numbers
    return ModelShape(
        *(f"LLaVA-OneVision {size}", "llava-onevision", layers, hidden, heads, kv_heads, head_dim, intermediate),
        *(vocab, tied),
        vision_params=400_000_000,
    )


# From the config.json of each model's public checkpoint; a test holds the sums to the sizes that the models go by.
KNOWN: tuple[ModelShape, ...] = (
    _qwen25("3B", 36, 2048, 16, 2, 11_008, 151_936, tied=True),
    _qwen25("7B", 28, 3584, 28, 4, 18_944, 152_064),
    _qwen25("32B", 64, 5120, 40, 8, 27_648, 152_064),
    _qwen25("72B", 80, 8192, 64, 8, 29_568, 152_064),
    _qwen3("2B", 410_000_000, 28, 2048, 16, 8, 6144, tied=True),
    _qwen3("4B", 410_000_000, 36, 2560, 32, 8, 9728, tied=True),
    _qwen3("8B", 580_000_000, 36, 4096, 32, 8, 12_288),
    _qwen3("32B", 580_000_000, 64, 5120, 64, 8, 25_600),
    _qwen3("30B-A3B", 580_000_000, 48, 2048, 32, 4, 768, experts=128),
    _qwen3("235B-A22B", 580_000_000, 94, 4096, 64, 4, 1536, experts=128),
    _llava("0.5B", 24, 896, 14, 2, 64, 4864, 152_000, tied=True),
    _llava("7B", 28, 3584, 28, 4, 128, 18_944, 152_128),
    _llava("72B", 80, 8192, 64, 8, 128, 29_568, 152_128),
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?b(?:-a\d+b)?)(?![a-z0-9])")
_QUANTISED = re.compile(r"awq|gptq|fp8|int[48]|w[48]a|[34]bit|gguf")


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
    return draft


def _shape(name: str, option: str, family: str | None) -> ModelShape:
    if Path(name).is_dir():
        return from_folder(name, option)
    words = name.lower().rsplit("/", 1)[-1]
    if _QUANTISED.search(words):
        raise VidSpecError(f"{option}: {quoted(name)} is quantised; plans are made for 16-bit weights")
    named = next((known.family for known in KNOWN if known.family in words), None)
    sizes = _SIZE.findall(words)
    is_short = bool(sizes) and words == sizes[0]
    for known in KNOWN:
        if sizes and known.family == (family if is_short else named) and known.name.lower().endswith(f" {sizes[-1]}"):
            return known
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
