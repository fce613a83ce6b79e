"""What vLLM's attention backends say of themselves where its versions differ."""

import inspect
import sys
from collections.abc import Callable
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


def prefix_attention(layer: Any, schedules: dict[tuple[int, ...], torch.Tensor | None]) -> Prefix | None:
    """Return a layer's FlashAttention 3 over keys that all query rows of a request see; None if it has another backend,
    or a quantised cache.

    A call that brings no schedule launches a kernel that makes one. Layers that run after each other in every forward
    share `schedules`, by shape: the first of a shape, in the order of these calls, makes it for all, in the forward
    itself, so that a graph that holds the forward makes it too.

    It takes queries `[num_tokens, num_heads, head_size]`, keys and values `[num_blocks, block_size, num_kv_heads,
    head_size]`, the layer's metadata, the keys of each request `[>= num_reqs]` int32, the most rows of a request, and
    the output, like the queries; it returns that and the natural LSE `[num_heads, num_tokens]` float32.
    """
    impl = layer.impl
    is_version_3 = getattr(impl, "vllm_flash_attn_version", None) == 3
    if layer.get_attn_backend().get_name() != "FLASH_ATTN" or not is_version_3 or "fp8" in layer.kv_cache_dtype:
        return None
    backend, scale = sys.modules[type(impl).__module__], impl.scale
    shape = (impl.num_heads, impl.num_kv_heads, impl.head_size)
    is_first = shape not in schedules
    schedules[shape] = None

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
                num_heads_q=impl.num_heads,
                num_heads_kv=impl.num_kv_heads,
                headdim=impl.head_size,
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
            scheduler_metadata=schedules[shape],
            num_splits=num_splits,
        )

    return attend
