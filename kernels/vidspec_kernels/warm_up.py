"""Prepares every variant of the kernels that an engine's steps can reach: compiled, and loaded onto the device.

Each function calls one wrapper with meta tensors (see `dispatch.launcher`) for all that changes from step to step and
makes another variant of a kernel: how many rows a request has, how long contexts are, which tables are given. What a
configuration fixes (shapes of the model, strides of caches and tables) is taken from its own tensors. Nothing is
launched, no memory of the device is used and nothing waits for it, beside what loading a kernel takes.
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from vidspec_kernels.accept import Looseness, TreeShapes, accept
from vidspec_kernels.dispatch import as_meta
from vidspec_kernels.guidance_scores import guidance_scores
from vidspec_kernels.kv_compact import CacheList, kv_compact
from vidspec_kernels.step import step
from vidspec_kernels.tree_attention import tree_attention
from vidspec_kernels.tree_grow import TreeGrowBuffers, tree_grow
from vidspec_kernels.visual_relevance import merge_relevance, visual_relevance


def i32(*shape: int) -> Tensor:
    """Return an int32 meta tensor of a shape."""
    return torch.empty(shape, dtype=torch.int32, device="meta")


def i64(*shape: int) -> Tensor:
    """Return an int64 meta tensor of a shape."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a meta tensor of a shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def warm_tree_attention(
    keys: Tensor, values: Tensor, block_table: Tensor, num_heads: int, dtype: torch.dtype, max_queries: int,
    max_context: int,
) -> None:  # fmt: skip
    """Prepare `tree_attention` for 1 to `max_queries` rows a request, split over programs or not.

    Args:
        keys: [num_blocks, block_size, num_kv_heads, head_size], one layer's.
        values: The same shape.
        block_table: int32 [num_table_rows, max_blocks], as the layers get it.
        num_heads: Query heads.
        dtype: Of queries and outputs.
        max_queries: Most rows of a request.
        max_context: Most KV entries of one.
    """
    keys, values, block_table, head_size = as_meta(keys), as_meta(values), as_meta(block_table), keys.shape[3]
    for num_queries in range(1, max_queries + 1):
        query = floats(num_queries, num_heads, head_size, dtype=dtype)
        for context in (1, max_context):
            tree_attention(
                query, keys, values, block_table, i64(1), i32(1), i32(1), i32(1), i64(1, num_queries),
                torch.empty_like(query), scale=1.0, max_queries=num_queries, max_prefix_len=context,
            )  # fmt: skip


def warm_kv_compact(caches: CacheList, block_table: Tensor, num_drafts: int) -> None:
    """Prepare `kv_compact` for paths of `num_drafts` + 1 columns."""
    kv_compact(caches.as_meta(), as_meta(block_table), i64(1), i32(1), i32(1, num_drafts + 1), i32(1))


def warm_accept(num_drafts: int, max_reqs: int, in_trees: bool, is_loose: bool) -> None:
    """Prepare `accept`: of strict chains, and of trees and by loose rules where there are such."""
    for tree, loose in itertools.product({False, in_trees}, {False, is_loose}):
        accept_once(num_drafts, max_reqs, tree, loose)


def accept_once(num_drafts: int, max_reqs: int, in_trees: bool, is_loose: bool) -> None:
    """Prepare one variant of `accept`."""
    rows, trees, looseness = num_drafts + 1, None, None
    if in_trees:
        trees = TreeShapes(i64(1), i32(max_reqs, rows), i32(max_reqs, rows), i64(max_reqs, rows))
    if is_loose:
        settings = (i64(1), i32(max_reqs), floats(max_reqs), i32(max_reqs))
        looseness = Looseness(*settings, floats(rows), floats(rows), floats(rows, dtype=torch.bool), 0.5)
    accept(i64(rows), i64(rows), i32(2), num_drafts, trees, looseness)


def warm_step(max_width: int = 0, **arguments: Tensor | int) -> None:
    """Prepare `step` for its arguments of one step, real tensors of any values.

    Args:
        max_width: Prepare levels of trees with 1 to so many nodes a request; 0: of chains.
        **arguments: Those of `step` but `nodes`.
    """
    arguments = {name: as_meta(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    for nodes in [i64(1, width) for width in range(1, max_width + 1)] or [None]:
        step(**arguments, nodes=nodes)  # type: ignore[arg-type]


def warm_tree_grow(buffers: TreeGrowBuffers, max_width: int) -> None:
    """Prepare `tree_grow` for levels of 1 to `max_width` nodes a request."""
    for width in range(1, max_width + 1):
        grow_once(buffers, width)


def grow_once(buffers: TreeGrowBuffers, width: int) -> None:
    """Prepare `tree_grow` for levels of `width` nodes a request."""
    buffers, num_candidates = buffers.as_meta(), buffers.num_candidates
    tree_grow(
        buffers, i64(1), i64(1, width), floats(1, width), floats(width, num_candidates), i64(width, num_candidates),
        level=0, budget=buffers.num_cols - 1, first_parent=0, num_next=1,
    )  # fmt: skip


def warm_guidance_scores(layers: Iterable[tuple[Tensor, int]], block_table: Tensor, dtype: torch.dtype) -> None:
    """Prepare `guidance_scores` for layers given by their keys and their number of query heads.

    With the layer's own log-sum-exps and without: a backend may tell them in one step and not in another.
    """
    columns = block_table.shape[1]
    for keys, num_heads in layers:
        query = floats(1, num_heads, keys.shape[3], dtype=dtype)
        for lse in (None, floats(num_heads, 1).T):
            guidance_scores(
                query, as_meta(keys), i32(1, columns), i32(2), i32(1), floats(1, 1), i64(1), i32(1), 1.0, lse=lse,
                max_queries_per_req=1,
            )  # fmt: skip


def warm_visual_relevance(
    store: Tensor, block_fill: Tensor, block_table: Tensor, num_blocks: Tensor, dtype: torch.dtype, top_n: int,
    max_queries: int, num_shards: int,
) -> None:  # fmt: skip
    """Prepare `visual_relevance` for videos of any length, and its merge over shards; see their arguments."""
    store, block_fill, block_table, num_blocks = map(as_meta, (store, block_fill, block_table, num_blocks))
    cosines = visual_relevance(
        floats(1, store.shape[2], dtype=dtype), i32(2), i64(1), store, block_fill, block_table, num_blocks, top_n,
        max_queries, block_table.shape[1],
    )  # fmt: skip
    merge_relevance(cosines[None].expand(num_shards, -1, -1))
