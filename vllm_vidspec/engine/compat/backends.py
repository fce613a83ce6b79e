"""What vLLM's attention backends say of themselves where its versions differ."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def splits_keys(layer: Any, num_rows: int) -> bool:
    """Return whether a layer's backend shares a request's keys out among programs for `num_rows` query rows of it.

    Else one program walks all keys of a query head: at long contexts a verify step then takes several times what a
    decode step does. FlashAttention 2 splits keys for single rows alone; vLLM's Triton kernel names its bound.
    """
    impl, name = layer.impl, layer.get_attn_backend().get_name()
    if name == "FLASH_ATTN":
        return num_rows <= 1 or impl.vllm_flash_attn_version != 2
    if name == "TRITON_ATTN":
        kernel = sys.modules[type(impl).__module__].unified_attention
        return num_rows <= getattr(inspect.getmodule(kernel), "MAX_3D_QUERY_LEN", 1)
    return True


Prefix = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Shape = tuple[int, int, int]  # heads, KV heads, head size


def prefix_attentions(layers: Sequence[Any]) -> list[Prefix | None]:
    """Return each layer's FlashAttention 3 over keys that all query rows of a request see; None for a layer that has
    another backend, or a quantised cache.

    A call that brings no schedule launches a kernel that makes one. Layers are those that run in every forward, in this
    order: the first of a shape makes it for all, in the forward itself, so that a graph that holds the forward makes it
    too, and the last one lets it go, as it lies in that graph's memory.

    It takes queries `[num_tokens, num_heads, head_size]`, keys and values `[num_blocks, block_size, num_kv_heads,
    head_size]`, the layer's metadata, the keys of each request `[>= num_reqs]` int32, the most rows of a request, and
    the output, like the queries; it returns that and the natural LSE `[num_heads, num_tokens]` float32.
    """
    shapes = [_shape(layer) if _is_flash_3(layer) else None for layer in layers]
    schedules: dict[Shape, torch.Tensor | None] = {}
    return [
        shape and _prefix_attention(layer, shape, schedules, shape not in shapes[:i], shape not in shapes[i + 1 :])
        for i, (layer, shape) in enumerate(zip(layers, shapes, strict=True))
    ]


def _is_flash_3(layer: Any) -> bool:
    is_version_3 = getattr(layer.impl, "vllm_flash_attn_version", None) == 3
    return layer.get_attn_backend().get_name() == "FLASH_ATTN" and is_version_3 and "fp8" not in layer.kv_cache_dtype


def _shape(layer: Any) -> Shape:
    return layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size


def _prefix_attention(
    layer: Any, shape: Shape, schedules: dict[Shape, torch.Tensor | None], is_first: bool, is_last: bool
) -> Prefix:
    impl = layer.impl
    backend, scale = sys.modules[type(impl).__module__], impl.scale

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: Any,
        num_keys: torch.Tensor,
        max_queries: int,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = metadata.query_start_loc
        num_keys, num_splits = num_keys[: len(starts) - 1], metadata.max_num_splits
        if is_first:
            schedules[shape] = backend.get_scheduler_metadata(
                batch_size=len(num_keys),
                max_seqlen_q=max_queries,
                max_seqlen_k=metadata.max_seq_len,
                num_heads_q=shape[0],
                num_heads_kv=shape[1],
                headdim=shape[2],
                cache_seqlens=num_keys,
                qkv_dtype=query.dtype,
                cu_seqlens_q=starts,
                page_size=keys.shape[1],
                causal=False,
                num_splits=num_splits,
            )
        return backend.flash_attn_varlen_func(
            q=query,
            k=backend.canonicalize_singleton_dim_strides(keys),
            v=backend.canonicalize_singleton_dim_strides(values),
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=max_queries,
            seqused_k=num_keys,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=scale,
            causal=False,
            block_table=metadata.block_table,
            return_softmax_lse=True,
            fa_version=3,
            scheduler_metadata=schedules.pop(shape) if is_last else schedules[shape],
            num_splits=num_splits,
        )

    return attend
