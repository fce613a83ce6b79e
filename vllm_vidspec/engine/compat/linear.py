"""How a draft's layers multiply, and its output head in eight or four bits: names and a helper of vLLM's."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, get_args

from vllm_vidspec.errors import VidSpecError, nearest, quoted

# What vLLM looks up in `linear_backend_per_quant`. It takes any name, and never reads one that it does not know.
SCHEMES = (
    *("fp8_block_w8a8", "fp8_w8a8", "int8_w8a8", "mixed_precision", "mxfp4", "mxfp6", "mxfp8", "nvfp4_w4a16"),
    *("nvfp4_w4a4", "w8a16_fp8"),
)


def check_linear_backends(given: Mapping[str, str]) -> None:
    """Refuse backends by quantisation that vLLM would not know, or where it takes none (VidSpecError)."""
    from vllm.config import kernel

    key = "linear_backend_per_quant"
    if key not in {field.name for field in dataclasses.fields(kernel.KernelConfig)}:
        raise VidSpecError(f"{key}: this vLLM chooses no backend by quantisation; leave it out")
    backends = get_args(kernel.LinearBackend)
    for kind, wrong, known in (
        ("quantisation of linear layers", set(given) - {*SCHEMES}, SCHEMES),
        ("linear backend", set(given.values()) - {*backends}, backends),
    ):
        for name in sorted(wrong):
            raise VidSpecError(f"{key}: vLLM has no {kind} {quoted(name)}{nearest(name, known)}; {', '.join(known)}")


def check_head_quantization(kind: str) -> None:
    """Refuse a quantised output head where vLLM makes none, or none of this kind (VidSpecError)."""
    helper = _head_quantisation()
    if helper is None:
        raise VidSpecError("draft_lm_head_quantization: this vLLM quantises no output heads, 0.33 does; leave it out")
    if kind not in helper._LM_HEAD_METHODS:
        raise VidSpecError(f"draft_lm_head_quantization: this vLLM makes no output head in {kind}")


def quantise_head(model: Any, kind: str) -> None:
    """Replace the output head of a draft, which is loaded, by vLLM's quantised copy of it.

    Why: vLLM makes such copies for drafts that share their target's head, and keeps the head that each is of. Ours has
    its own, whose memory is to be free: unless it is the embedding's too, nothing else refers to it.
    Until: vLLM quantises the head of a draft model.

    A VidSpecError for a head that is quantised already, has a bias or is not of 16 bits.
    """
    helper, language_model = _head_quantisation(), model.get_language_model()
    head = getattr(language_model, "lm_head", None)
    if helper is None or head is None:
        raise VidSpecError(f"draft_lm_head_quantization: {type(language_model).__name__} has no output head of its own")
    try:
        copied = helper.quantized_lm_head_copy(head, kind)
    except ValueError as error:
        raise VidSpecError(f"draft_lm_head_quantization: {error}") from None
    helper._SOURCES.pop(copied, None)
    language_model.lm_head = copied


def _head_quantisation() -> Any:
    """Return vLLM's module of quantised copies of output heads; None where it has none (0.32)."""
    name = "vllm.model_executor.layers.quantization.online.lm_head"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
