"""The launches that `compiled.py` compiles: the wrappers' own, at the shapes of real models, on meta tensors."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import vidspec_kernels as kernels
from vidspec_kernels import (
    PlanRules,
    TreeGrowBuffers,
    TreePlans,
    TreeTables,
    TreeTemplate,
    tree_begin,
    tree_plan,
    warm_up,
)
from vidspec_kernels.warm_up import floats, i32, i64

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MAX_REQS, BLOCK_SIZE, MAX_BLOCKS = 256, 16, 8192


@dataclass(frozen=True)
class Case:
    """One launch: the wrapper's name, what is special about it, and architectures that refuse it."""

    kernel: str
    label: str
    call: Callable[[], Any]
    not_on: tuple[int, ...] = ()


def cache_views(num_kv_heads: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values as FlashAttention's cache holds them in vLLM: side by side."""
    cache = floats(64, BLOCK_SIZE, num_kv_heads, 2 * head_size, dtype=dtype)
    return cache[..., :head_size], cache[..., head_size:]


def attend(
    shape: tuple[int, int, int], num_queries: int, dtype: torch.dtype = BF16, prefix: bool = False, lse: bool = False,
    cache: torch.dtype | None = None, query: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Attend from `num_queries` nodes of each request; `shape` is heads, KV heads, head size, `dtype` the outputs', and
    of caches and queries where nothing else is said.
    """
    num_heads, num_kv_heads, head_size = shape
    out, sums = floats(num_queries, num_heads, head_size, dtype=dtype), floats(num_heads, num_queries)
    queries, (keys, values) = out.to(query or dtype), cache_views(num_kv_heads, head_size, cache or dtype)
    kernels.tree_attention(
        queries, keys, values, i32(MAX_REQS, MAX_BLOCKS), i64(1), i32(1), i32(1), i32(1), i64(1, num_queries), out,
        scale=head_size**-0.5, max_queries=num_queries, scratch=kernels.TreeAttentionScratch(head_size, out.device),
        prefix=(out, sums) if prefix else None, lse=sums if lse else None, scales=warm_up.scales_of(keys, queries),
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


def guide(
    shape: tuple[int, int, int], num_queries: int, context: int, dtype: torch.dtype = BF16, lse: bool = False,
    cache: torch.dtype | None = None,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_size = shape
    query, (keys, _) = (
        floats(num_queries, num_heads, head_size, dtype=dtype), cache_views(num_kv_heads, head_size, cache or dtype)
    )  # fmt: skip
    kernels.guidance_scores(
        query, keys, i32(1, -(-context // BLOCK_SIZE)), i32(2), i32(num_queries), floats(1, context), i64(1), i32(1),
        head_size**-0.5, lse=floats(num_heads, num_queries).T if lse else None, scales=warm_up.scales_of(keys, query),
    )  # fmt: skip


def compact(num_drafts: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, dim_stride: int = 1) -> None:
    keys, values = cache_views(num_kv_heads, head_size * dim_stride, dtype)
    caches = kernels.CacheList([(keys[..., ::dim_stride], values[..., ::dim_stride])])
    warm_up.warm_kv_compact(caches, i32(MAX_REQS, MAX_BLOCKS), num_drafts)


def grow_buffers(
    max_width: int, num_candidates: int, num_drafts: int = 64, max_reqs: int = MAX_REQS
) -> TreeGrowBuffers:
    shape = (max_reqs, num_drafts + 1)
    tree = TreeTables(i64(*shape), i32(*shape), i32(*shape), i64(*shape), floats(*shape), i32(max_reqs))
    plans = TreePlans(max_reqs, PlanRules(3, 8, 2, max_width, min(10, num_candidates), 10, 2.0, 3.0), "meta")
    bounds = floats(max_width + 1, 8, num_candidates)
    return TreeGrowBuffers(tree, plans, floats(9, 8), bounds, 1 + 7 * max_width, max_width)


def template(num_cols: int) -> TreeTemplate:
    return TreeTemplate(i32(num_cols), i32(num_cols), i64(num_cols), floats(num_cols))


def place(num_drafts: int, num_axes: int) -> None:
    """Place trees of a model with so many axes of positions; with one they go into a copy."""
    rows = num_drafts + 1
    vector = functools.partial(i32, MAX_REQS)
    places = kernels.TreePlaces(vector(), vector(), vector(), vector(), i64(MAX_REQS, rows))
    positions, copy = i64(num_axes, 8193), i64(num_axes, 8193) if num_axes == 1 else None
    warm_up.warm_place_trees(i32(MAX_REQS, rows), i64(MAX_REQS, rows), places, positions, copy)


def step_buffers(
    num_axes: int = 3, path_cols: int = 0, max_batch: int = MAX_REQS, max_blocks: int = MAX_BLOCKS
) -> tuple[kernels.StepTables, kernels.StepBuffers]:
    """Return what `begin_step` reads and writes; `path_cols` is K + 1, 0: only chains are drafted."""
    tables = kernels.StepTables(
        num_tokens=i32(MAX_REQS), text=i32(MAX_REQS, 32_768), last_sampled=i64(MAX_REQS, 1), num_dropped=i32(MAX_REQS),
        pos_delta=i64(MAX_REQS), block_table=i32(MAX_REQS, max_blocks), fed=i64(MAX_REQS + 1),
        path=i32(MAX_REQS, path_cols) if path_cols else None,
    )  # fmt: skip
    positions = i64(num_axes, 2 * max_batch + 1)[:, : 2 * max_batch]
    return tables, kernels.StepBuffers.allocate(max_batch, max_blocks, positions, path_cols)


@triton.jit
def noise_of_draws(scores, token_ids, seed, pos, USE_FP64: tl.constexpr):
    """Stand in for vLLM's Gumbel noise, with a hash and logarithms of its weight."""
    word = token_ids.to(tl.uint32) * 0xCC9E2D51
    for _ in tl.static_range(4):
        word = ((word << 15) | (word >> 17)) * 0x1B873593 + seed.to(tl.uint32) + pos.to(tl.uint32)
        word ^= word >> 13
    uniform = (word >> 8).to(tl.float64 if USE_FP64 else tl.float32) * 5.9604645e-08 + 2.9802322e-08
    return scores - tl.log(-tl.log(uniform))


def sampling(use_fp64: bool = False) -> kernels.Noise:
    def reference(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, _: bool) -> np.ndarray:
        return np.random.default_rng(0).gumbel(size=(len(seeds), len(token_ids)))

    return kernels.Noise(noise_of_draws, reference, use_fp64=use_fp64)


MODELS = {
    "28/4": (28, 4, 128),  # Qwen2.5-VL 7B
    "40/8": (40, 8, 128),  # Qwen2.5-VL 32B
    "64/8": (64, 8, 128),  # Qwen2.5-VL 72B
    "16/2": (16, 2, 128),  # Qwen2.5-VL 3B
    "14/2 d64": (14, 2, 64),  # Qwen2 0.5B, LLaVA-OneVision's draft
}


@functools.cache
def cases() -> tuple[Case, ...]:
    found = []

    def add(kernel: str, label: str, call: Callable[..., Any], *args: Any, not_on: tuple[int, ...] = (), **kw: Any):
        found.append(Case(kernel, label, functools.partial(call, *args, **kw), not_on))

    for name, shape in MODELS.items():
        for num_queries in (1, 9, 26, 65):
            add("tree_attention", f"{name} Q{num_queries}", attend, shape, num_queries)
    add("tree_attention", "28/4 Q26, prefix given", attend, MODELS["28/4"], 26, prefix=True, lse=True)
    # vLLM hands over queries in float8 where its backend takes them (Hopper), and in bfloat16 elsewhere.
    for num_queries, query in itertools.product((9, 26), (FP8, BF16)):
        label = f"28/4 Q{num_queries} fp8{' cache' if query == BF16 else ''}"
        add("tree_attention", label, attend, MODELS["28/4"], num_queries, cache=FP8, query=query)
    add("tree_attention", "4/2 d256 Q9", attend, (4, 2, 256), 9)
    add("tree_attention", "4/2 d32 Q9 fp32", attend, (4, 2, 32), 9, dtype=FP32)
    add("tree_attention", "10/2 d80 Q9 fp16, prefix given", attend, (10, 2, 80), 9, dtype=FP16, prefix=True)
    for rows, num_tokens in itertools.product((6, 26, 65), (25_000, 100_000)):
        add("visual_relevance", f"3584 Q{rows} {num_tokens // 1000}k", relevance, 3584, rows, num_tokens)
    add("visual_relevance", "3584 Q11 25k top 10", relevance, 3584, 11, 25_000, top_n=10)
    add("visual_relevance", "3584 Q65 25k top 128", relevance, 3584, 65, 25_000, top_n=128)
    add("visual_relevance", "merge of 4 ranks, top 10", kernels.merge_relevance, floats(4, 26, 10))
    add("visual_relevance", "200 Q11 1k fp16 top 2", relevance, 200, 11, 1_000, FP16, 2, dtype=FP16)
    add("visual_relevance", "96 Q11 1k fp32", relevance, 96, 11, 1_000, FP32, 10, dtype=FP32)
    # fp8 needs a tensor core that knows it.
    add("visual_relevance", "3584 Q26 25k fp8", relevance, 3584, 26, 25_000, FP8, not_on=(80,))
    for name in ("28/4", "14/2 d64"):
        add("guidance_scores", f"{name} nq32 25k", guide, MODELS[name], 32, 25_000)
        add("guidance_scores", f"{name} nq32 25k, LSE given", guide, MODELS[name], 32, 25_000, lse=True)
    for query, label in ((FP8, "fp8"), (BF16, "fp8 cache")):
        add("guidance_scores", f"28/4 nq32 25k {label}", guide, MODELS["28/4"], 32, 25_000, query, cache=FP8)
    add("guidance_scores", "10/2 d80 nq32 1k fp16", guide, (10, 2, 80), 32, 1_000, FP16)
    add("guidance_scores", "14/2 d64 nq32 1k fp32", guide, (14, 2, 64), 32, 1_000, FP32)
    for num_drafts, in_trees, is_loose in itertools.product((10, 25, 64), (False, True), (False, True)):
        label = f"{'loose' if is_loose else 'strict'} {'tree' if in_trees else 'chain'} K{num_drafts}"
        add("accept", label, warm_up.accept_once, num_drafts, MAX_REQS, in_trees, is_loose, keeps=in_trees)
    add("accept", "loose tree K1", warm_up.accept_once, 1, MAX_REQS, True, True)
    words = i32(MAX_REQS, 152_064 // 32)
    add("loosen", "152k bits", warm_up.warm_loosen, 64, words, FP32, in_trees=True, is_measured=True)
    vector = functools.partial(floats, MAX_REQS)
    penalties = kernels.PenaltyTables(vector(), vector(), vector(), words, i32(MAX_REQS, 152_064))
    add("path_penalties", "K64 152k tokens", warm_up.warm_path_penalties, 152_064, i32(MAX_REQS + 1, 65), penalties)
    for dtype in (BF16, FP8, FP32, torch.float64):
        add("kv_compact", f"K64 4 heads d128 {8 * dtype.itemsize} bits", compact, 64, 4, 128, dtype)
    add("kv_compact", "K64 4 heads d128 16 bits, strided", compact, 64, 4, 128, BF16, 16)
    for width in (8, 10):
        add("tree_grow", f"F{width} C{width}", warm_up.grow_once, grow_buffers(width, width), width)
    growth = grow_buffers(10, 10)
    add("tree_begin", "adaptive K64", tree_begin, growth.tree, template(65), 1, growth, i64(1), i32(1))
    add("tree_place", "static K64", warm_up.warm_static_trees, growth.tree, template(65), 10)
    add("tree_plan", "roots C10", tree_plan, growth.plans, i64(1), floats(1, 10))
    add("tree_finish", "count K64", warm_up.finish_once, growth, False)
    add("tree_finish", "fill F10 C10 K64", warm_up.finish_once, growth, True)
    for num_drafts, ring in ((10, 64), (64, 512)):
        texts = (i32(MAX_REQS), i32(MAX_REQS, 32_768))
        add("gather_draft_windows", f"K{num_drafts}, ring {ring}", warm_up.warm_windows, *texts, ring, num_drafts)
    for num_axes, path_cols in ((1, 0), (3, 0), (3, 26), (3, 65)):
        label = f"{'tree' if path_cols else 'chain'} K{path_cols - 1 if path_cols else 10}, axes {num_axes}"
        add("begin_step", label, warm_up.warm_begin_step, *step_buffers(num_axes, path_cols), is_greedy=False)
    for num_axes in (1, 3):
        add("place_trees", f"K25, axes {num_axes}", place, 25, num_axes)
        step = step_buffers(num_axes)[1]
        out = kernels.LevelBuffers.allocate(MAX_REQS, i64(num_axes, 8 * MAX_REQS), 8)
        for kind, num_cols in (("chain K10", 0), ("tree K25", 26)):
            label = f"{kind}, axes {num_axes}"
            add("next_level", label, warm_up.warm_next_level, step, out, i64(MAX_REQS + 1), num_cols=num_cols)
    for dtype, vocab_size in ((BF16, 152_064), (FP32, 32_000)):
        scratch = kernels.SampleScratch(64, vocab_size, i64(1).device)
        add("draw", f"{vocab_size // 1000}k {dtype}", warm_up.warm_draw, sampling(), scratch, dtype)
        for num_candidates in (1, 10, 64):
            scratch = kernels.SampleScratch(64, vocab_size, i64(1).device, num_candidates)
            label = f"C{num_candidates} {vocab_size // 1000}k {dtype}"
            add("candidates", label, warm_up.warm_candidates, sampling(), scratch, dtype, with_log_probs=True)
    scratch = kernels.SampleScratch(64, 152_064, i64(1).device, use_fp64=True)
    add("draw", "152k noise of 64 bits", warm_up.warm_draw, sampling(use_fp64=True), scratch, BF16)
    return tuple(found)
