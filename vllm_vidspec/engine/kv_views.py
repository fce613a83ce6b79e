"""Paged KV caches of vLLM's attention backends as plain strided views, and which backends those are."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from vidspec_kernels import NO_SCALES, Scales
from vllm_vidspec.errors import VidSpecError

FLASHINFER = "FLASHINFER"
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
FP8 = torch.float8_e4m3fn
_CPU_LAYOUTS = ("vec", "vec16")
_DTYPES = ("auto", "float16", "bfloat16")  # whose elements are the numbers themselves
_FP8_DTYPES = ("fp8", "fp8_e4m3")  # e4m3, in a cache of bytes


class Reader(NamedTuple):
    """What of ours reads a model's KV cache."""

    what: str  # how a refusal calls it
    way_out: str  # what else there is to do
    backends: tuple[str, ...] = BACKENDS  # whose caches it reads


def attention_layers(vllm_config: VllmConfig) -> dict[str, Attention]:
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, Attention)}


def check_readable(layer: Any, reader: Reader) -> None:
    """Refuse an attention layer whose cache a reader cannot read, or whose softmax is not the plain one."""
    impl, (what, way_out, _) = layer.impl, reader
    check_backend(layer.get_attn_backend().get_name(), reader)
    check_dtype(layer.kv_cache_dtype, reader)
    windowed = getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1))
    if windowed or getattr(impl, "alibi_slopes", None) is not None or getattr(impl, "sinks", None) is not None:
        raise VidSpecError(f"{what} knows no sliding windows, ALiBi or sinks: {way_out}")
    if getattr(impl, "logits_soft_cap", None):
        raise VidSpecError(f"{what} knows no soft caps of logits: {way_out}")


def check_backend(name: str, reader: Reader) -> None:
    """Refuse an attention backend by its name."""
    what, way_out, (*others, last) = reader
    if name not in reader.backends:
        raise VidSpecError(f"{what} reads {', '.join(others)} and {last}, not {name}: {way_out}")


def check_dtype(name: str, reader: Reader) -> None:
    """Refuse a KV cache by vLLM's name of its type, unless it is plain or e4m3 with a scale of the tensor or head."""
    if name not in _DTYPES + _FP8_DTYPES:
        raise VidSpecError(
            f"{reader.what} does not read {name} KV caches: use --kv-cache-dtype auto or fp8, or {reader.way_out}"
        )


def check_layout(layers: Iterable[Any], reader: Reader) -> None:
    """Refuse keys packed in a way that no view describes; call it once the caches exist."""
    for layer in layers:
        if (layout := getattr(layer, "isa", None)) is not None:
            check_layout_name(layout, reader)


def check_layout_name(layout: str, reader: Reader) -> None:
    """Refuse a layout of vLLM's CPU caches by its name; see `check_layout`."""
    if layout not in _CPU_LAYOUTS:
        raise VidSpecError(
            f"{reader.what} cannot read the CPU cache layout {layout!r}: use --dtype float32, or {reader.way_out}"
        )


def cache_views(kv_cache: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a paged cache of vLLM's logical shape, `[num_blocks, num_kv_heads, block_size, 2 *
    head_size]`, as views `[num_blocks, block_size, num_kv_heads, head_size]`; of a cache of bytes in float8.
    """
    head_size = layer.impl.head_size
    if layer.kv_cache_dtype in _FP8_DTYPES:
        kv_cache = kv_cache.view(FP8)
    if getattr(layer, "isa", None) is None:  # not the CPU backend
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., :head_size], by_token[..., head_size:]
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    block, head, _, _ = kv_cache.stride()
    shape, first = (num_blocks, block_size, num_kv_heads, head_size), kv_cache.storage_offset()
    # A block's first half is K, stored [head_size, block_size] per head; its second is V, [block_size, head_size].
    keys = kv_cache.as_strided(shape, (block, 1, head, block_size), first)
    return keys, kv_cache.as_strided(shape, (block, head_size, head, 1), first + block_size * head_size)


def cache_scales(layer: Any, query: torch.Tensor) -> Scales:
    """Return what a layer's query, keys and values are to be multiplied by (`Scales`): one number, or one a KV head."""
    if layer.kv_cache_dtype not in _FP8_DTYPES:
        return NO_SCALES
    own, heads = (layer._k_scale, layer._v_scale), layer.impl.num_kv_heads
    if getattr(layer, "isa", None) is not None:  # the CPU backend takes the heads' largest for all of them
        own = (own[0].amax(), own[1].amax())
    of_query = layer._q_scale.expand(heads) if query.dtype == FP8 else None
    return of_query, own[0].expand(heads), own[1].expand(heads)


def distinct_views(layers: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor, int, bool]]:
    """Return keys, values, query heads and whether queries come in float8, of attention layers; of equal ones once."""
    found = {}
    for layer in layers:
        keys, values = cache_views(layer.kv_cache, layer)
        kind = (layer.impl.num_heads, getattr(layer, "query_quant", None) is not None)
        found[keys.shape, keys.stride(), keys.dtype, kind] = (keys, values, *kind)
    return list(found.values())
