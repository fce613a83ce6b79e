"""Paged KV caches of vLLM's attention backends as plain strided views, and which backends those are."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from vllm_vidspec.errors import VidSpecError

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
_CPU_LAYOUTS = ("vec", "vec16")
_DTYPES = ("auto", "float16", "bfloat16")  # whose elements are the numbers themselves


def attention_layers(vllm_config: VllmConfig) -> dict[str, Attention]:
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, Attention)}


def check_readable(layer: Any, what: str, way_out: str) -> None:
    """Refuse an attention layer whose cache we cannot read or whose softmax is not the plain one.

    The line of the VidSpecError says `what` reads it, the backend or the feature, and the `way_out`.
    """
    impl = layer.impl
    check_backend(layer.get_attn_backend().get_name(), what, way_out)
    check_dtype(layer.kv_cache_dtype, what, way_out)
    windowed = getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1))
    if windowed or getattr(impl, "alibi_slopes", None) is not None or getattr(impl, "sinks", None) is not None:
        raise VidSpecError(f"{what} knows no sliding windows, ALiBi or sinks: {way_out}")
    if getattr(impl, "logits_soft_cap", None):
        raise VidSpecError(f"{what} knows no soft caps of logits: {way_out}")


def check_backend(name: str, what: str, way_out: str) -> None:
    """Refuse an attention backend by its name; see `check_readable`."""
    if name not in BACKENDS:
        raise VidSpecError(f"{what} reads FLASH_ATTN, TRITON_ATTN and CPU_ATTN, not {name}: {way_out}")


def check_dtype(name: str, what: str, way_out: str) -> None:
    """Refuse a quantised KV cache by vLLM's name of its type; see `check_readable`."""
    if name not in _DTYPES:
        raise VidSpecError(f"{what} does not read {name} KV caches: use --kv-cache-dtype auto, or {way_out}")


def check_layout(layers: Iterable[Any], what: str, way_out: str) -> None:
    """Refuse keys packed in a way that no view describes (bf16 on AMX); call it once the caches exist."""
    for layer in layers:
        if (layout := getattr(layer, "isa", None)) is not None:
            check_layout_name(layout, what, way_out)


def check_layout_name(layout: str, what: str, way_out: str) -> None:
    """Refuse a layout of vLLM's CPU caches by its name; see `check_layout`."""
    if layout not in _CPU_LAYOUTS:
        raise VidSpecError(f"{what} cannot read the CPU cache layout {layout!r}: use --dtype float32, or {way_out}")


def cache_views(kv_cache: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a paged cache of vLLM's logical shape, `[num_blocks, num_kv_heads, block_size, 2 *
    head_size]`, as views `[num_blocks, block_size, num_kv_heads, head_size]`.
    """
    head_size = layer.impl.head_size
    if getattr(layer, "isa", None) is None:  # not the CPU backend
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., :head_size], by_token[..., head_size:]
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    block, head, _, _ = kv_cache.stride()
    shape, first = (num_blocks, block_size, num_kv_heads, head_size), kv_cache.storage_offset()
    # A block's first half is K, stored [head_size, block_size] per head; its second is V, [block_size, head_size].
    keys = kv_cache.as_strided(shape, (block, 1, head, block_size), first)
    return keys, kv_cache.as_strided(shape, (block, head_size, head, 1), first + block_size * head_size)


def distinct_views(layers: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return keys, values and the number of query heads of attention layers, of those that are alike only one's."""
    found = {}
    for layer in layers:
        keys, values = cache_views(layer.kv_cache, layer)
        num_heads = layer.impl.num_heads
        found[keys.shape, keys.stride(), keys.dtype, num_heads] = (keys, values, num_heads)
    return list(found.values())
