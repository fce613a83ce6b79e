"""Attention of vLLM's CPU backend as an entry of a graph.

On a GPU the kernel reads lengths, block table and slots from the device when it runs, and has the numbers of its launch
frozen: tokens, the longest query, the longest sequence. The CPU's backend plans on the host instead, from the lengths
at the time. So the plan of a replay is made then, from the live lengths, and what would not fit the frozen launch is an
error. Requests without KV entries are padding: nothing is read for them, and their output is zero.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from vllm.model_executor.layers.attention import attention as layers
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import cpu_attn

from tests.graph_emulator.recorder import INSIDE, Recording, ReplayError

_NAMES = ("unified_attention_with_output", "unified_kv_cache_update")


@contextlib.contextmanager
def attention_as_on_a_gpu() -> Iterator[None]:
    """Let the backend's attention be an entry; before an engine is built, whose layers keep what they find."""
    plan, forward = cpu_attn.ops.cpu_attn_get_scheduler_metadata, cpu_attn.CPUAttentionBackendImpl.forward

    def plan_later(*args: Any, seq_lens: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        is_later = Recording.current is not None or not seq_lens.all()
        return None if is_later else plan(*args, seq_lens=seq_lens, **kwargs)

    @functools.wraps(forward)
    def attend(
        impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if attn_metadata is None or attn_metadata.scheduler_metadata is not None:
            return forward(impl, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        tensors = (
            query,
            kv_cache,
            output,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
        )

        def run(*live: torch.Tensor) -> None:
            _attend(forward, impl, layer, attn_metadata, *live)

        if Recording.current is None:  # a warm-up, with padding
            run(*tensors)
        else:
            Recording.current.launch("attention", run, tensors, *tensors)
        return output

    python = {f"vllm::{name}": getattr(layers, name) for name in _NAMES}
    with (
        mock.patch.object(cpu_attn.ops, "cpu_attn_get_scheduler_metadata", plan_later),
        mock.patch.object(cpu_attn.CPUAttentionBackendImpl, "forward", attend),
        mock.patch.object(cpu_attn.CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", True),
        mock.patch.object(cpu_attn.CPUAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.UNIFORM_BATCH),
        mock.patch.dict(INSIDE, python),
    ):
        yield


def _attend(
    forward: Callable, impl: Any, layer: Any, metadata: Any, query: torch.Tensor, kv_cache: torch.Tensor,
    output: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
) -> None:  # fmt: skip
    """Attend with live lengths and the launch's own numbers."""
    query_lens = query_start_loc.diff()
    longest, most = int(query_lens.max()), int(seq_lens.max())
    if longest > metadata.max_query_len or most > metadata.max_seq_len:
        captured = f"captured were at most {metadata.max_query_len} and {metadata.max_seq_len}"
        raise ReplayError(f"{longest} tokens of a request, {most} entries: {captured}")
    is_alive = seq_lens > 0
    rows = is_alive.repeat_interleave(query_lens).nonzero()[:, 0]
    output[: metadata.num_actual_tokens] = 0
    if not len(rows):
        return
    starts = torch.zeros(int(is_alive.sum()) + 1, dtype=torch.int32)
    starts[1:] = query_lens[is_alive].cumsum(0)
    lens, found = seq_lens[is_alive], torch.empty_like(output[rows])
    plan = cpu_attn.ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens), num_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads, head_dim=impl.head_size,
        seq_lens=lens, dtype=query.dtype, query_start_loc=starts, causal=metadata.causal,
        sliding_window_size=impl.sliding_window, isa=layer.isa, kv_cache_dtype=impl.kv_cache_dtype,
        enable_kv_split=cpu_attn.envs.VLLM_CPU_ATTN_SPLIT_KV,
    )  # fmt: skip
    live = dataclasses.replace(
        metadata, num_actual_tokens=len(rows), query_start_loc=starts, seq_lens=lens, block_table=block_table[is_alive],
        scheduler_metadata=plan,
    )  # fmt: skip
    forward(impl, layer, query[rows], None, None, kv_cache, live, found)
    output[rows] = found
