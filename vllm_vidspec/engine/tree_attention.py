"""Attention of trees and chains inside vLLM's layers: masks where a forward holds them, vLLM's own backend elsewhere.

Chains, trees of width 1, get it where a layer's own backend would not split their keys (`compat.backends`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vidspec_kernels import CacheList, TreeAttentionScratch, tree_attention, warm_up
from vllm_vidspec.config.static_tree import TILE_ROWS
from vllm_vidspec.engine import kv_views
from vllm_vidspec.engine.compat import backends
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.errors import VidSpecError

logger = init_logger("vllm.vidspec")

READER = kv_views.Reader("tree attention", "use draft chain")
_SLOW = "chains are slow at long contexts"


@dataclass(frozen=True)
class TreeStep:
    """Where the trees of one forward are, and which KV entries each of their rows attends to."""

    rows: torch.Tensor  # [n] int64 row of each tree in the forward's block table
    query_start: torch.Tensor  # [>= n] int32 its first query row
    num_queries: torch.Tensor  # [>= n] int32 its query rows; 0: it is no tree
    prefix_lens: torch.Tensor  # [>= n] int32 KV entries that all its rows attend to, the root's included
    masks: torch.Tensor  # [>= n, >= max_queries] int64; bit j: the row attends to entry prefix_lens + j (node j + 1)
    max_queries: int  # most query rows of a tree
    is_whole_batch: bool  # whether every row of the forward is a tree's, so that vLLM's own attention can stay out


class TreeAttention:
    """Gives a model's attention layers (none that it shares) tree masks; without trees vLLM's path is untouched."""

    def __init__(self, layers: Iterable[Any], device: torch.device, *, is_targets: bool = False):
        self.layers = list(layers)
        self.scratch = TreeAttentionScratch(max((layer.impl.head_size for layer in self.layers), default=1), device)
        self.step: TreeStep | None = None  # of the forward that runs next
        # A draft's prefix, a tenth of the video, is not worth three launches in place of two.
        prefixes = backends.prefix_attentions(self.layers) if is_targets else [None] * len(self.layers)
        self._reads_prefix = any(prefixes)  # whether a layer's own attention may read the prefix
        for layer, read_prefix in zip(self.layers, prefixes, strict=True):
            kv_views.check_readable(layer, READER)
            compat.intercept_attention(layer, functools.partial(self._forward, read_prefix))

    def outruns(self, num_rows: int) -> bool:
        """Return whether a layer's own backend would not split the keys of requests with so many query rows."""
        return not all(backends.splits_keys(layer, num_rows) for layer in self.layers)

    def warm_up(self, block_table: torch.Tensor, dtype: torch.dtype, max_queries: int) -> None:
        """Prepare every variant of 1 to `max_queries` rows a request, of outputs of a dtype."""
        for keys, values, num_heads, is_fp8 in kv_views.distinct_views(self.layers):
            shape = (keys, values, block_table, num_heads, is_fp8, dtype, max_queries, self.scratch)
            warm_up.warm_tree_attention(*shape)
            if self._reads_prefix:
                warm_up.warm_tree_attention(*shape, with_prefix=True)

    def caches(self) -> CacheList:
        """Return every layer's keys and values, for compaction; the caches must exist."""
        kv_views.check_layout(self.layers, READER)
        return CacheList([kv_views.cache_views(layer.kv_cache, layer) for layer in self.layers])

    def _forward(
        self,
        read_prefix: backends.Prefix | None,
        original: Callable,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute what vLLM's backend cannot, after what it can; keys and values are in the cache already.

        Where one tile of FlashAttention 3 holds a request's rows it reads the prefix, and the nodes alone are ours: it
        reads at the memory's rate, and ours at two thirds of it.
        """
        step = self.step
        if step is None or metadata is None:
            return original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        if not step.is_whole_batch:
            original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        impl = layer.impl
        shape = (-1, impl.num_heads, impl.head_size)
        query, out = query.view(shape), output.view(shape)
        keys, values = kv_views.cache_views(kv_cache, layer)
        prefix, num_rows = None, step.max_queries * impl.num_heads // impl.num_kv_heads
        if read_prefix is not None and step.is_whole_batch and num_rows <= TILE_ROWS:
            prefix = read_prefix(query, keys, values, metadata, step.prefix_lens, step.max_queries, out)
        tree_attention(
            query,
            keys,
            values,
            metadata.block_table,
            step.rows,
            step.query_start,
            step.num_queries,
            step.prefix_lens,
            step.masks,
            out,
            scale=impl.scale,
            scales=kv_views.cache_scales(layer, query),
            max_queries=step.max_queries,
            scratch=self.scratch,
            prefix=prefix,
        )
        return output


def make_attention(
    layers: Iterable[Any], config: VllmConfig, device: torch.device, *, num_rows: int, in_trees: bool, whose: str
) -> TreeAttention | None:
    """Return the tree attention that a model's layers need: all of them for trees (a VidSpecError where one cannot be
    read), for chains of `num_rows` query rows those that it outruns; None where no layer needs it.

    A layer that it cannot stand for keeps its own backend, which loses nothing but time, and one line says so.
    """
    layers, is_targets = list(layers), whose == "target"
    if in_trees:
        return TreeAttention(layers, device, is_targets=is_targets)
    slow = [layer for layer in layers if not backends.splits_keys(layer, num_rows)]
    taken = []
    for layer in slow:
        problem = next(_obstacles(layer, config), None)
        if problem is None:
            taken.append(layer)
        else:
            logger.warning_once("vidspec: the %s keeps its own attention for chains: %s", whose, problem)
    if not taken:
        return None
    logger.info_once(
        "vidspec: the %s's chains take tree attention, as its own does not split keys over %d rows", whose, num_rows
    )
    return TreeAttention(taken, device, is_targets=is_targets)


def _obstacles(layer: Any, config: VllmConfig) -> Iterator[str]:
    try:
        kv_views.check_readable(layer, READER._replace(way_out=_SLOW))
    except VidSpecError as error:
        yield str(error)
    if envs.VLLM_BATCH_INVARIANT:
        yield f"tree attention's last bits depend on the batch, and VLLM_BATCH_INVARIANT is set: {_SLOW}"
    if config.parallel_config.use_ubatching:
        yield f"tree attention knows requests by their row, and --enable-dbo cuts a batch in two: {_SLOW}"
    if config.compilation_config.pass_config.fuse_attn_quant:
        yield f"tree attention writes no quantised outputs: {_SLOW} with fuse_attn_quant"
