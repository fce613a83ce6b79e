"""Quantises the language model of a bundled checkpoint, by rounding, in a format that vLLM reads.

Numbers are rounded and packed by the library of compressed-tensors, which vLLM brings, but for the order in which GPTQ
and AWQ lay them out. A cache in float8 can have scales, one of the tensor or one of each KV head.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

# By format: the preset of the library, and how a checkpoint calls it.
FORMATS = {
    "w8a8": ("W8A8", "int-quantized"),
    "w4a16": ("W4A16", "pack-quantized"),
    "gptq": ("W4A16", ""),
    "awq": ("W4A16_ASYM", ""),
}
GROUP = 32  # inputs that share a scale of four bits
_LINEAR = re.compile(r"model\.layers\..*_proj\.weight")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word
_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def quantise(source: Path, folder: Path, kind: str, cache: str | None = None) -> Path:
    """Write a quantised copy of a checkpoint of the Qwen2.5-VL family, and return its directory.

    `kind` is a key of FORMATS; `cache` says what a scale of a cache in float8 is for, "tensor" or "attn_head" (None:
    nothing is said of it).
    """
    preset, form = FORMATS[kind]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = GROUP
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if _LINEAR.fullmatch(name) is None:
                tensors[name] = tensor
            else:
                found = _quantised(tensor.float(), scheme, kind, form)
                tensors |= {name.removesuffix("weight") + key: value.contiguous() for key, value in found.items()}
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if cache is not None:
        heads = config["text_config"]["num_key_value_heads"] if cache == "attn_head" else 1
        for layer in range(config["text_config"]["num_hidden_layers"]):  # no two scales of keys are alike
            for i, part in enumerate("kv"):
                scale = 0.02 * (1 + i) * (1 + layer) * torch.arange(1.0, 1.0 + heads)
                tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = scale
    config["quantization_config"] = _config(scheme, kind, form, cache)
    path.write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _quantised(weight: Tensor, scheme: QuantizationScheme, kind: str, form: str) -> dict[str, Tensor]:
    grouped = weight.unflatten(1, (-1, GROUP)) if scheme.weights.group_size else weight[:, None]
    scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), scheme.weights)
    if form:
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        return BaseCompressor.get_value_from_registry(form).compress(given, scheme)
    # Inputs by outputs, of 0 to 15.
    levels = (quantize(weight, scale, zero, scheme.weights, dtype=torch.int8) + 8).T.int()
    zeros = (zero + 8).T.int()
    if kind == "awq":
        return {"qweight": _packed(levels, _AWQ_ORDER), "qzeros": _packed(zeros, _AWQ_ORDER), "scales": scale.T.half()}
    # Zeros of GPTQ are one less than they say.
    packed = {"qweight": _packed(levels.T, range(8)).T, "qzeros": _packed(zeros - 1, range(8))}
    return packed | {"scales": scale.T.half(), "g_idx": (torch.arange(weight.shape[1]) // GROUP).int()}


def _packed(levels: Tensor, order: Any) -> Tensor:
    """Return eight numbers of four bits to a word, along the last dimension; the lowest bits are the order's first."""
    return sum(levels.unflatten(-1, (-1, 8))[..., place] << 4 * i for i, place in enumerate(order)).int()


def _config(scheme: QuantizationScheme, kind: str, form: str, cache: str | None) -> dict[str, Any]:
    if not form:
        common = {"quant_method": kind, "bits": 4, "group_size": GROUP}
        if kind == "awq":
            return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["visual", "lm_head"]}
        return common | {"desc_act": False, "sym": True, "lm_head": False, "dynamic": {"-:.*visual.*": {}}}
    return QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed",
        ignore=["re:.*lm_head", "re:.*visual.*"], kv_cache_scheme=_CACHE | {"strategy": cache} if cache else None,
    ).to_dict()  # fmt: skip
