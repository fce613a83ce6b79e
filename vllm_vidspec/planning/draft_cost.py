"""What a draft step reads beside its target's, and what is said where quantising the draft would help; plain Python."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.shapes import FP8, QUANTISATIONS, WEIGHT_BYTES, ModelShape, from_config

DEAR = 1 / 3  # a draft step that reads more than this of the target's bytes is worth a word
USUAL_FORWARDS = 5  # of a draft step, where nobody has said


def draft_share(target: ModelShape, draft: ModelShape, num_forwards: int) -> float:
    """Return the bytes of weights that a draft step of one request reads, of those that a step of its target reads."""
    return num_forwards * draft.read_bytes(1) / target.read_bytes(1)


def cost_hint(target: ModelShape, draft: ModelShape, num_forwards: int = USUAL_FORWARDS) -> str | None:
    """Return a line on a draft with 16-bit weights whose step reads more than `DEAR` of its target's; else None.

    Args:
        target: The target.
        draft: The draft; the target's own shape where it drafts for itself, of which nothing is said.
        num_forwards: Of a draft step, one behind the other.
    """
    share = draft_share(target, draft, num_forwards)
    if draft == target or draft.linear_bytes < WEIGHT_BYTES or share <= DEAR:
        return None
    less = draft_share(target, draft.quantised(FP8), num_forwards)
    return (
        f"a draft step of {num_forwards} forwards reads {100 * share:.0f} % of the bytes of its target's weights, with "
        f'"quantization": "{FP8}" for the draft {100 * less:.0f} % (modelled)'
    )


def stored_shape(config: Mapping[str, Any], quantization: str | None = None) -> ModelShape | None:
    """Return the shape of a Hugging Face configuration as it is stored; None where it cannot be told.

    Args:
        config: As JSON has it.
        quantization: What vLLM quantises as it loads, or calls the checkpoint's own.
    """
    try:
        linear_bytes = _linear_bytes(quantization, config.get("quantization_config") or {})
        shape = from_config({**config, "quantization_config": None}, str(config.get("model_type")))
    except (VidSpecError, LookupError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return None if linear_bytes is None else replace(shape, linear_bytes=linear_bytes)


def _linear_bytes(quantization: str | None, stored: Mapping[str, Any]) -> float | None:
    """Return the bytes of a layer's weight; None of a method that is not known here."""
    method = str(stored.get("quant_method") or quantization or "")
    if not method:
        return WEIGHT_BYTES
    if "fp8" in method:
        return QUANTISATIONS[FP8]
    groups = stored.get("config_groups") or {}
    found = [group["weights"]["num_bits"] for group in groups.values() if (group.get("weights") or {}).get("num_bits")]
    bits = stored.get("bits") or stored.get("w_bit") or (found[0] if found else None)
    return None if bits is None else bits / 8
