"""Which family a model is of, by this package's adapters, and whether it can draft for another. Reads configs only."""

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.families.base import FamilyAdapter, read_field
from vllm_vidspec.families.generic import GenericAdapter, has_tower


@functools.cache
def known_families() -> tuple[FamilyAdapter, ...]:
    """Return the adapters of the modules of this package."""
    names = sorted(found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return tuple(adapter for module in modules for adapter in getattr(module, "ADAPTERS", ()))


def adapter_for(hf_config: Any) -> FamilyAdapter:
    """Return the adapter of a Hugging Face config, by its `architectures`, or `model_type` where it names none; a
    generic one for any other model with a vision tower, and a VidSpecError where there is none.
    """
    architectures = tuple(getattr(hf_config, "architectures", None) or ())
    model_type = getattr(hf_config, "model_type", None)
    for adapter in known_families():
        if adapter.architectures.intersection(architectures):
            return adapter
        if not architectures and model_type in adapter.model_types:
            return adapter
    if architectures and has_tower(hf_config):
        return GenericAdapter(architectures[0])
    got = ", ".join(architectures) or f"model_type {model_type!r}"
    known = ", ".join(adapter.name for adapter in known_families())
    raise VidSpecError(
        f"unsupported model family: {got}, whose configuration names no vision tower; supported: {known}, and other "
        "models that vLLM shows videos to"
    )


def check_pair(target_hf: Any, draft_hf: Any) -> FamilyAdapter:
    """Return the common adapter of a pair; a VidSpecError names a family, or every property in which the two differ."""
    target, draft = adapter_for(target_hf), adapter_for(draft_hf)
    if target.name != draft.name:
        raise VidSpecError(
            f"draft and target are of different families: the target is {target.name}, the draft {draft.name}; "
            f"use a smaller {target.name} model as the draft"
        )
    problems = target.check_pair(target_hf, draft_hf)
    if problems:
        raise VidSpecError(f"the draft does not fit the target ({target.name}): " + "; ".join(problems))
    return target


def check_ranks(draft_hf: Any, num_ranks: int) -> None:
    """Refuse a draft whose heads, or groups of quantised weights, the tensor-parallel ranks cannot share; the
    VidSpecError names sizes that would do.
    """
    text = draft_hf.get_text_config()
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    vision_heads = read_field(draft_hf, adapter_for(draft_hf).vision_heads) or num_ranks  # unknown: vLLM will say

    def uneven(size: int) -> dict[str, int]:
        """Return whose heads, and how many, so many ranks cannot share."""
        found = {"vision tower": vision_heads} if vision_heads % size else {}
        found |= {"language model": heads} if heads % size else {}
        # vLLM gives several ranks a copy of one KV head where there are fewer heads than ranks.
        is_even = not max(kv_heads, size) % min(kv_heads, size)
        return found if is_even else {**found, "language model (keys and values)": kv_heads}

    group, inputs = _group_size(draft_hf), getattr(text, "intermediate_size", None) or 0

    def would_do() -> str:
        even = (size for size in range(1, heads + 1) if not uneven(size) and not (group and inputs % (group * size)))
        return f"--tensor-parallel-size {', '.join(map(str, even))} would do"

    for whose, count in uneven(num_ranks).items():
        raise VidSpecError(
            f"the draft's {whose} has {count} heads, which {num_ranks} tensor-parallel ranks cannot share evenly; "
            f"{would_do()}"
        )
    if num_ranks > 1 and group and inputs % (group * num_ranks):  # vLLM's kernels take whole groups alone
        raise VidSpecError(
            f"the draft's MLPs have {inputs} inputs in groups of {group} weights, which {num_ranks} tensor-parallel "
            f"ranks cannot share evenly; {would_do()}"
        )


def _group_size(hf_config: Any) -> int | None:
    """Return how many weights of a row share a scale in a checkpoint of few bits; None where that is not said."""
    stored = getattr(hf_config, "quantization_config", None)
    if not isinstance(stored, dict):
        return None
    weights = [group.get("weights") or {} for group in (stored.get("config_groups") or {}).values()]
    sizes = [found for one in (stored, *weights) if isinstance(found := one.get("group_size"), int) and found > 0]
    return max(sizes, default=None)
