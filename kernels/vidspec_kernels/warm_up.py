"""Prepares every variant of the kernels that an engine's steps can reach: compiled, and loaded onto the device.

Each function calls one wrapper with meta tensors (see `dispatch.launcher`) for all that changes from step to step and
makes another variant of a kernel: how many rows a request has, how long contexts are, which tables are given. What a
configuration fixes (shapes of the model, strides of caches and tables) is taken from its own tensors. Nothing is
launched, no memory of the device is used and nothing waits for it, beside what loading a kernel takes.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from vidspec_kernels.accept_chain import accept_chain
from vidspec_kernels.accept_loose import accept_loose
from vidspec_kernels.chain_step import chain_step
from vidspec_kernels.dispatch import as_meta
from vidspec_kernels.guidance_scores import guidance_scores
from vidspec_kernels.kv_compact import CacheList, kv_compact
from vidspec_kernels.tree_accept import tree_accept
from vidspec_kernels.tree_attention import tree_attention
from vidspec_kernels.tree_grow import TreeGrowBuffers, tree_grow
from vidspec_kernels.tree_step import tree_step
from vidspec_kernels.visual_relevance import visual_relevance

META = torch.device("meta")


def _i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


def _f32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=META)


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
        query = torch.empty(num_queries, num_heads, head_size, dtype=dtype, device=META)
        for context in (1, max_context):
            tree_attention(
                query, keys, values, block_table, _i64(1), _i32(1), _i32(1), _i32(1), _i64(1, num_queries),
                torch.empty_like(query), scale=1.0, max_queries=num_queries, max_prefix_len=context,
            )  # fmt: skip


def warm_kv_compact(caches: CacheList, block_table: Tensor, num_drafts: int) -> None:
    """Prepare `kv_compact` for paths of `num_drafts` + 1 columns."""
    kv_compact(caches.as_meta(), as_meta(block_table), _i64(1), _i32(1), _i32(1, num_drafts + 1), _i32(1))


def warm_accept(num_drafts: int, max_reqs: int, in_trees: bool, is_loose: bool) -> None:
    """Prepare what accepts drafts: of chains, and of trees and by loose rules where there are such."""
    rows, tables = num_drafts + 1, None
    tokens = (_i64(rows), _i64(rows), _i32(2))
    accept_chain(*tokens, num_drafts)
    if in_trees:
        tables = (_i32(max_reqs, rows), _i32(max_reqs, rows), _i64(max_reqs, rows))
        tree_accept(*tokens, _i64(1), *tables, num_drafts)
    if is_loose:
        settings = (_i64(1), _i32(max_reqs), _f32(max_reqs), _i32(max_reqs))
        signals = (_f32(rows), _f32(rows), torch.empty(rows, dtype=torch.bool, device=META))
        for trees in {None, tables}:
            accept_loose(*tokens, *settings, *signals, 0.5, num_drafts, trees)


def warm_chain_step(**arguments: Tensor | int) -> None:
    """Prepare `chain_step` for its arguments of one step, real tensors of any values."""
    chain_step(**_all_meta(arguments))


def warm_tree_step(max_width: int, **arguments: Tensor | int) -> None:
    """Prepare `tree_step` for levels of 1 to `max_width` nodes a request: its other arguments, of one step."""
    for width in range(1, max_width + 1):
        tree_step(**_all_meta(arguments), nodes=_i64(1, width))


def _all_meta(arguments: dict[str, Tensor | int]) -> dict:
    return {name: as_meta(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def warm_tree_grow(buffers: TreeGrowBuffers, max_width: int) -> None:
    """Prepare `tree_grow` for levels of 1 to `max_width` nodes a request."""
    buffers, num_candidates = buffers.as_meta(), buffers.num_candidates
    for width in range(1, max_width + 1):
        tree_grow(
            buffers, _i64(1), _i64(1, width), _f32(1, width), _f32(width, num_candidates), _i64(width, num_candidates),
            level=0, budget=buffers.num_cols - 1, first_parent=0, num_next=1,
        )  # fmt: skip


def warm_guidance_scores(layers: Iterable[tuple[Tensor, int]], block_table: Tensor, dtype: torch.dtype) -> None:
    """Prepare `guidance_scores` for layers given by their keys and their number of query heads."""
    columns = block_table.shape[1]
    for keys, num_heads in layers:
        query = torch.empty(1, num_heads, keys.shape[3], dtype=dtype, device=META)
        guidance_scores(
            query, as_meta(keys), _i32(1, columns), _i32(2), _i32(1), _f32(1, 1), _i64(1), _i32(1), 1.0,
            max_queries_per_req=1,
        )  # fmt: skip


def warm_visual_relevance(
    store: Tensor, block_fill: Tensor, block_table: Tensor, num_blocks: Tensor, dtype: torch.dtype, top_n: int,
    max_queries: int,
) -> None:  # fmt: skip
    """Prepare `visual_relevance` for videos of any length; see its arguments."""
    tables = tuple(map(as_meta, (store, block_fill, block_table, num_blocks)))
    max_reqs, max_blocks = block_table.shape
    lengths = {min(2**i, max_blocks) for i in range(max_blocks.bit_length() + 1)}
    for num_reqs in {1, max_reqs}:
        for length in sorted(lengths):
            queries = torch.empty(num_reqs, store.shape[2], dtype=dtype, device=META)
            visual_relevance(
                queries, _i32(num_reqs + 1), _i64(num_reqs), *tables, top_n, max_queries, length
            )  # fmt: skip
