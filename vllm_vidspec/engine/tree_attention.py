"""Attention of tree nodes inside vLLM's layers: masks where a forward holds trees, vLLM's own backend elsewhere."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vidspec_kernels import CacheList, TreeAttentionScratch, tree_attention
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.kv_views import cache_views, check_layout, check_readable

REFUSAL = ("tree attention", "use draft chain")


@dataclass(frozen=True)
class TreeStep:
    """Where the trees of one forward are, and which KV entries each of their rows attends to.

    Attributes:
        rows: `[n]` int64 row of each tree in the forward's block table.
        query_start: `[>= n]` int32 its first query row.
        num_queries: `[>= n]` int32 its query rows; 0: it is no tree.
        prefix_lens: `[>= n]` int32 KV entries that all its rows attend to, the root's included.
        masks: `[>= n, >= max_queries]` int64; bit j: the row attends to entry prefix_lens + j (tree node j + 1).
        max_queries: Most query rows of a tree.
        is_whole_batch: Whether every row of the forward belongs to a tree, so that vLLM's own attention can stay out.
    """

    rows: torch.Tensor
    query_start: torch.Tensor
    num_queries: torch.Tensor
    prefix_lens: torch.Tensor
    masks: torch.Tensor
    max_queries: int
    is_whole_batch: bool


class TreeAttention:
    """Gives the attention layers of one model tree masks; forwards without trees take vLLM's path untouched.

    Args:
        layers: The model's attention layers (not those that another model shares with it).
        device: Where their caches live.
    """

    def __init__(self, layers: Iterable[Any], device: torch.device):
        self.layers = list(layers)
        self.scratch = TreeAttentionScratch(max((layer.impl.head_size for layer in self.layers), default=1), device)
        self.step: TreeStep | None = None  # of the forward that runs next
        for layer in self.layers:
            check_readable(layer, *REFUSAL)
            compat.intercept_attention(layer, self._forward)

    def caches(self) -> CacheList:
        """Return every layer's keys and values, for compaction; the caches must exist.

        Raises:
            VidSpecError: A cache layout that no view describes.
        """
        check_layout(self.layers, *REFUSAL)
        return CacheList([cache_views(layer.kv_cache, layer) for layer in self.layers])

    def _forward(
        self,
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
        """Compute what vLLM's backend cannot, after what it can; keys and values are in the cache already."""
        step = self.step
        if step is None or metadata is None:
            return original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        if not step.is_whole_batch:
            original(layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        impl = layer.impl
        shape = (-1, impl.num_heads, impl.head_size)
        tree_attention(
            query.view(shape),
            *cache_views(kv_cache, layer),
            metadata.block_table,
            step.rows,
            step.query_start,
            step.num_queries,
            step.prefix_lens,
            step.masks,
            output.view(shape),
            scale=impl.scale,
            max_queries=step.max_queries,
            scratch=self.scratch,
        )
        return output
