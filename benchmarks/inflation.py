"""Cost inflation: a target with appended decoder layers that change no token and cost what layers cost; no engine.

A small model's step is mostly overhead, so its ratio of target time to draft time says nothing of a large pair.
Appended layers whose output projections are zero make steps longer: the residual stream passes through them unchanged,
so the target says exactly what it said (bit for bit in float32; in bfloat16 the last norm sees a residual that was
rounded once more), while every step reads their weights, writes their KV and does their arithmetic. The draft is
inflated likewise where a ratio must be less than it is.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning.pruners import default_uv_layer
from vllm_vidspec.tools.user_files import writing

WORDS = "no-op layers appended"  # of every label that names an inflated target
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
APPENDED = "appended-layers.safetensors"
# What a layer adds to the residual stream; the weights and, where there are any, the biases.
OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
# A decoder layer's tensor: what comes before its number, the number, its name in the layer.
_TENSOR = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")


def label(num_appended: int) -> str:
    """Return how results name a target with so many layers appended, "" for none."""
    return f"inflated: {num_appended} {WORDS}" if num_appended else ""


def cache_folder() -> Path:
    """Return where inflated checkpoints and measured costs are kept; nothing in it is needed for good."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vidspec" / "inflated"


def num_layers(checkpoint: str | Path) -> int:
    return _text_config(_read_config(Path(checkpoint)))["num_hidden_layers"]


def guidance_knobs(checkpoint: str | Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return knobs with which guided pruners see, of an inflated target, what they would see of the original.

    These are its `knobs`, with `guidance_layers` and `uv_layer` as numbers of the original's layers.
    """
    count = num_layers(checkpoint)
    layers = knobs.get("guidance_layers", "all")
    uv_layer = knobs.get("uv_layer")
    return knobs | {
        "guidance_layers": list(range(count)) if layers == "all" else layers,
        "uv_layer": default_uv_layer(count) if uv_layer is None else uv_layer,
    }


def digest(checkpoint: str | Path) -> str:
    """Return 16 hexadecimal digits that tell a checkpoint's configuration and weights from any other's."""
    folder, found = Path(checkpoint), hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def inflate(checkpoint: str | Path, num_appended: int, folder: Path | None = None) -> Path:
    """Return the directory of a copy of a checkpoint with layers appended; it is made once, by default in the cache.

    The checkpoint is in Hugging Face layout, its weights in one safetensors file. With nothing appended it is itself.
    """
    original = Path(checkpoint).resolve()
    if num_appended == 0:
        return original
    config = _read_config(original)
    folder = folder or cache_folder()
    copy = folder / f"{digest(original)}-{num_appended}"
    if copy.is_dir():
        return copy
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Under another name first: who comes at the same time, or after an interrupt, sees a whole copy or none.
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder))
        try:
            _write(original, unfinished, config, num_appended)
            unfinished.rename(copy)
        except OSError:
            if not copy.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return copy


def _write(original: Path, copy: Path, config: dict[str, Any], num_appended: int) -> None:
    from safetensors.torch import load_file, save_file

    if not (original / WEIGHTS).is_file():
        raise VidSpecError(f"{original} has no {WEIGHTS}")
    weights, count = load_file(original / WEIGHTS), _text_config(config)["num_hidden_layers"]
    layers = _appended_layers(weights, count, num_appended)
    shutil.copytree(original, copy, dirs_exist_ok=True)
    save_file(layers, copy / APPENDED, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS) | dict.fromkeys(layers, APPENDED)}
    (copy / INDEX).write_text(json.dumps(index, indent=1))
    (copy / "config.json").write_text(json.dumps(with_layers(config, num_appended), indent=2))


def _appended_layers(weights: dict[str, Any], count: int, num_appended: int) -> dict[str, Any]:
    """Return the tensors of the appended layers: real layers again in turn, but for their output projections."""
    prefix = _decoder_prefix(weights)
    layers: dict[int, dict[str, Any]] = {}  # number -> name in the layer -> tensor
    for name, tensor in weights.items():
        if (match := _TENSOR.fullmatch(name)) and match[1] == prefix:
            layers.setdefault(int(match[2]), {})[match[3]] = tensor
    if sorted(layers) != list(range(count)):
        raise VidSpecError(f"config.json says {count} layers, the weights have {len(layers)}")
    found = {}
    for appended in range(num_appended):
        for name, tensor in layers[appended % count].items():
            if not bool(tensor.isfinite().all()):  # 0 * inf is no zero
                raise VidSpecError(f"{name} of layer {appended % count} holds numbers that are not finite")
            is_output = name.rpartition(".")[0] in OUTPUTS
            found[f"{prefix}{count + appended}.{name}"] = (
                tensor.new_zeros(tensor.shape) if is_output else tensor.clone()
            )
    return found


def _decoder_prefix(names: Iterable[str]) -> str:
    """Return what the decoder layers' names begin with, up to the number: "language_model.model.layers."."""
    matches = [match for name in names if (match := _TENSOR.fullmatch(name))]
    prefixes = [{match[1] for match in matches if match[3] == f"{output}.weight"} for output in OUTPUTS]
    common = set.intersection(*prefixes)
    if len(common) != 1:
        raise VidSpecError(f"cannot append layers: the weights have {len(common)} stacks of layers with {OUTPUTS}")
    return common.pop()


def with_layers(config: dict[str, Any], num_appended: int) -> dict[str, Any]:
    """Return a configuration with so many decoder layers more; all other numbers are the same."""
    config = json.loads(json.dumps(config))
    text = _text_config(config)
    count = text["num_hidden_layers"]
    text["num_hidden_layers"] = count + num_appended
    if "layer_types" in text:
        text["layer_types"] = [*text["layer_types"], *text["layer_types"][-1:] * num_appended]
    # Layers from this one on have a sliding window: where none had, none has.
    if text.get("max_window_layers", -1) >= count:
        text["max_window_layers"] = max(text["max_window_layers"], count + num_appended)
    return config


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise VidSpecError(f"{folder} has no config.json of a checkpoint") from None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the language model; older ones have it at the top."""
    return config.get("text_config", config)
