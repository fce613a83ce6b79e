"""The launches that compile_report.py compiles: the wrappers' own, at the shapes of real models, on meta tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import vidspec_kernels as kernels
from vidspec_kernels.tree_grow import TreeGrowBuffers, tree_grow

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MAX_REQS, BLOCK_SIZE, MAX_BLOCKS = 256, 16, 8192


@dataclass(frozen=True)
class Case:
    """One launch: the wrapper's name, what is special about it, and architectures that refuse it."""

    kernel: str
    label: str
    call: Callable[[], Any]
    not_on: tuple[int, ...] = ()


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def floats(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cache_views(num_kv_heads: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values as FlashAttention's cache holds them in vLLM: side by side."""
    cache = floats(64, BLOCK_SIZE, num_kv_heads, 2 * head_size, dtype=dtype)
    return cache[..., :head_size], cache[..., head_size:]


def attend(
    shape: tuple[int, int, int], num_queries: int, context: int, num_reqs: int = 1, dtype: torch.dtype = BF16,
    prefix: bool = False, lse: bool = False,
) -> None:  # fmt: skip
    """Attend from `num_queries` nodes of each request; `shape` is heads, KV heads, head size."""
    num_heads, num_kv_heads, head_size = shape
    query = floats(num_reqs * num_queries, num_heads, head_size, dtype=dtype)
    sums = floats(num_heads, num_reqs * num_queries)
    kernels.tree_attention(
        query, *cache_views(num_kv_heads, head_size, dtype), i32(MAX_REQS, MAX_BLOCKS), i64(num_reqs), i32(num_reqs),
        i32(num_reqs), i32(num_reqs), i64(num_reqs, num_queries), torch.empty_like(query), scale=head_size**-0.5,
        max_queries=num_queries, max_prefix_len=context, prefix=(query, sums) if prefix else None,
        lse=sums if lse else None,
    )  # fmt: skip


def relevance(
    hidden: int, num_queries: int, num_tokens: int, store: torch.dtype = BF16, top_n: int = 32, num_reqs: int = 1,
    dtype: torch.dtype = BF16,
) -> None:  # fmt: skip
    blocks = -(-num_tokens // 64)
    kernels.visual_relevance(
        floats(num_reqs * num_queries, hidden, dtype=dtype), i32(num_reqs + 1), i64(num_reqs),
        floats(64, 64, hidden, dtype=store), i32(64), i32(MAX_REQS, blocks + 256), i32(MAX_REQS), top_n, num_queries,
        blocks,
    )  # fmt: skip


def guide(shape: tuple[int, int, int], num_queries: int, context: int, dtype: torch.dtype = BF16) -> None:
    num_heads, num_kv_heads, head_size = shape
    kernels.guidance_scores(
        floats(num_queries, num_heads, head_size, dtype=dtype), cache_views(num_kv_heads, head_size, dtype)[0],
        i32(1, -(-context // BLOCK_SIZE)), i32(2), i32(num_queries), floats(1, context), i64(1), i32(1),
        head_size**-0.5,
    )  # fmt: skip


def tables(num_drafts: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (MAX_REQS, num_drafts + 1)
    return i32(*shape), i32(*shape), i64(*shape)


def accept_loosely(num_drafts: int, in_trees: bool, num_reqs: int = 32) -> None:
    rows = num_reqs * (num_drafts + 1)
    kernels.accept_loose(
        i64(rows), i64(rows), i32(num_reqs + 1), i64(num_reqs), i32(MAX_REQS), floats(MAX_REQS), i32(MAX_REQS),
        floats(rows), floats(rows), floats(rows, dtype=torch.bool), 0.1, num_drafts,
        tables(num_drafts) if in_trees else None,
    )  # fmt: skip


def accept_trees(num_drafts: int, num_reqs: int = 32) -> None:
    rows = num_reqs * (num_drafts + 1)
    kernels.tree_accept(i64(rows), i64(rows), i32(num_reqs + 1), i64(num_reqs), *tables(num_drafts), num_drafts)


def accept_chains(num_drafts: int, num_reqs: int = 32) -> None:
    rows = num_reqs * (num_drafts + 1)
    kernels.accept_chain(i64(rows), i64(rows), i32(num_reqs + 1), num_drafts)


def compact(num_drafts: int, num_kv_heads: int, head_size: int, num_reqs: int = 32) -> None:
    caches = kernels.CacheList([cache_views(num_kv_heads, head_size, BF16)])
    kernels.kv_compact(
        caches, i32(MAX_REQS, MAX_BLOCKS), i64(num_reqs), i32(num_reqs), i32(num_reqs, num_drafts + 1), i32(num_reqs)
    )


def grow(width: int, num_candidates: int, num_drafts: int = 64, num_reqs: int = 32) -> None:
    shape = (MAX_REQS, num_drafts + 1)
    buffers = TreeGrowBuffers(
        i64(*shape), i32(*shape), i32(*shape), i64(*shape), floats(*shape), i64(MAX_REQS), i64(MAX_REQS),
        floats(9, 8), floats(num_candidates + 1, 8, num_candidates), 1 + 7 * num_candidates,
    )  # fmt: skip
    rows = num_reqs * width
    tree_grow(
        buffers, i64(num_reqs), i64(num_reqs, width), floats(num_reqs, width), floats(rows, num_candidates),
        i64(rows, num_candidates), level=1, budget=num_drafts, first_parent=1, num_next=width,
    )  # fmt: skip


def step_chains(num_axes: int, num_reqs: int = 32) -> None:
    kernels.chain_step(
        i64(num_reqs), i32(MAX_REQS), i32(MAX_REQS), i64(MAX_REQS), i32(MAX_REQS, MAX_BLOCKS), block_size=BLOCK_SIZE,
        level=1, max_position=100_000, positions=i64(num_axes, MAX_REQS), logical_pos=i64(MAX_REQS),
        seq_lens=i32(MAX_REQS), slot_mapping=i64(MAX_REQS),
    )  # fmt: skip


def step_trees(num_axes: int, width: int = 8, num_reqs: int = 32) -> None:
    places = MAX_REQS * width
    kernels.tree_step(
        i64(num_reqs), i32(MAX_REQS), i32(MAX_REQS), i64(MAX_REQS), i32(MAX_REQS, MAX_BLOCKS), i64(num_reqs, width),
        block_size=BLOCK_SIZE, level=1, max_position=100_000, positions=i64(num_axes, places),
        logical_pos=i64(places), slot_mapping=i64(places), prefix_lens=i32(MAX_REQS),
    )  # fmt: skip


MODELS = {
    "28/4": (28, 4, 128),  # Qwen2.5-VL 7B
    "40/8": (40, 8, 128),  # Qwen2.5-VL 32B
    "64/8": (64, 8, 128),  # Qwen2.5-VL 72B
    "16/2": (16, 2, 128),  # Qwen2.5-VL 3B
    "14/2 d64": (14, 2, 64),  # Qwen2 0.5B, LLaVA-OneVision's draft
}


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return every launch of the report."""
    found = []

    def add(kernel: str, label: str, call: Callable[..., Any], *args: Any, not_on: tuple[int, ...] = (), **kw: Any):
        found.append(Case(kernel, label, functools.partial(call, *args, **kw), not_on))

    for name, shape in MODELS.items():
        for num_queries in (1, 9, 26, 65):
            add("tree_attention", f"{name} Q{num_queries} 25k", attend, shape, num_queries, 25_000)
    add("tree_attention", "28/4 Q26 200, 8 requests", attend, MODELS["28/4"], 26, 200, 8)
    add("tree_attention", "28/4 Q1 200, 8 requests", attend, MODELS["28/4"], 1, 200, 8)
    add("tree_attention", "14/2 d64 Q8 200, 64 requests", attend, MODELS["14/2 d64"], 8, 200, 64)
    add("tree_attention", "28/4 Q26, prefix given", attend, MODELS["28/4"], 26, 25_000, prefix=True, lse=True)
    add("tree_attention", "28/4 Q26 25k fp16", attend, MODELS["28/4"], 26, 25_000, dtype=FP16)
    add("tree_attention", "4/2 d32 Q9 fp32", attend, (4, 2, 32), 9, 1_000, dtype=FP32)
    for num_queries in (6, 26, 65):
        for num_tokens in (25_000, 100_000):
            add(
                "visual_relevance",
                f"3584 Q{num_queries} {num_tokens // 1000}k",
                relevance,
                3584,
                num_queries,
                num_tokens,
            )
    add("visual_relevance", "5120 Q26 25k", relevance, 5120, 26, 25_000)
    add("visual_relevance", "3584 Q11 25k top 10", relevance, 3584, 11, 25_000, top_n=10)
    # fp8 needs a tensor core that knows it.
    add("visual_relevance", "3584 Q26 25k fp8", relevance, 3584, 26, 25_000, FP8, not_on=(80,))
    add("visual_relevance", "3584 Q65 100k fp8", relevance, 3584, 65, 100_000, FP8, not_on=(80,))
    for name in ("28/4", "14/2 d64"):
        add("guidance_scores", f"{name} nq32 25k", guide, MODELS[name], 32, 25_000)
    for num_drafts in (10, 25, 64):
        add("accept_loose", f"chain K{num_drafts}", accept_loosely, num_drafts, False)
        add("accept_loose", f"tree K{num_drafts}", accept_loosely, num_drafts, True)
    add("tree_accept", "K64", accept_trees, 64)
    add("accept_chain", "K10", accept_chains, 10)
    add("kv_compact", "K64 4 heads d128", compact, 64, 4, 128)
    add("tree_grow", "F8 C8", grow, 8, 8)
    add("tree_grow", "F10 C10", grow, 10, 10)
    add("chain_step", "3 axes", step_chains, 3)
    add("tree_step", "3 axes", step_trees, 3)
    return tuple(found)
