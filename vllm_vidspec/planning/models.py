"""Models by name, with the shapes of their public checkpoints, or by a directory's config.json."""

import json
import re
from pathlib import Path

from vllm_vidspec.errors import VidSpecError, quoted
from vllm_vidspec.planning.shapes import ModelShape, from_config

_NAMES = {"qwen2.5-vl": "Qwen2.5-VL", "qwen3-vl": "Qwen3-VL", "llava-onevision": "LLaVA-OneVision"}
_Sizes = tuple[int, int, int, int, int, int, int]


def _known(family: str, size: str, vision: int, sizes: _Sizes, tied: bool = False, experts: int = 0) -> ModelShape:
    """Return a model by its `sizes`, from `layers` to `vocab` of ModelShape, and `vision` millions of tower weights."""
    more = {"experts": experts, "active_experts": 8 if experts else 0, "vision_params": vision * 1_000_000}
    return ModelShape(f"{_NAMES[family]} {size}", family, *sizes, tied=tied, **more)


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
