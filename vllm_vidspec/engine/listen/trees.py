"""The target's side of tree drafts: their shapes by persistent row, what its forward needs, and its KV afterwards.

This listener writes: positions and masks of the forward's tree nodes, and the accepted paths' KV. Its failures are not
survived, because the answer would be wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import kv_compact
from vllm_vidspec.drafting import DraftTree, topology_tables
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.listen.protocol import Forward, TargetListener
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.engine.tree_attention import TreeAttention, TreeStep
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import TreeShapes


class TargetTrees(TargetListener):
    """Lets the target verify trees in its ordinary forward.

    A tree's nodes take consecutive slots after the root, as a chain's drafts do; what differs is the rope position
    (root + depth), the attention mask (ancestors only) and, after scoring, that the accepted path's KV must move
    together.

    Args:
        layers: The target's attention layers.
        model_state: The runner's, whose positions are adjusted.
        requests: Its `is_tree` is written here.
        max_nodes: K.
        max_num_tokens: Most tokens of one forward.
        device: Where all of it lives.
    """

    loss = "trees cannot be verified"

    def __init__(
        self,
        layers: Iterable[Any],
        model_state: Any,
        requests: RequestRows,
        max_nodes: int,
        max_num_tokens: int,
        device: torch.device,
    ):
        self.device = device
        self._is_tree = requests.is_tree
        max_num_reqs = len(self._is_tree)
        # [max_num_reqs, K + 1] each; a chain wherever no tree was drafted
        self._chain = topology_tables(list(range(max_nodes)), device)
        self.parents, self.depths, self.ancestors = (
            table.expand(max_num_reqs, -1).contiguous() for table in self._chain
        )
        # [max_num_reqs, K + 1] int32 node behind each output of the last verify step; the drafter reads it
        self._in_order = torch.arange(max_nodes + 1, dtype=torch.int32, device=device)
        self.path = self._in_order.repeat(max_num_reqs, 1)
        self.attention = TreeAttention(layers, device)
        # Models with 1-D positions read the batch's own buffer, which must not change: they get a copy.
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._step: _Step | None = None
        self._grids: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # see `_grid`
        compat.adjust_positions(model_state, self._adjust, lambda num_tokens: self._positions[:num_tokens])

    def init_kv(self, runner: Any) -> None:
        """Find the caches; see `TargetListener`."""
        if len(runner.kv_cache_config.kv_cache_groups) != 1:
            raise VidSpecError(
                "targets that mix attention kinds (several KV cache groups) cannot verify trees: use chain"
            )
        self.caches = self.attention.caches()

    # ---- what was drafted ------------------------------------------------------------------------------------------

    def store(self, idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray, tree: DraftTree | None) -> None:
        """Remember the shapes of a batch's drafts, `[num_reqs]` persistent rows; None: they are chains."""
        if tree is None and not self._is_tree[idx_mapping_np].any():
            return
        num_reqs = len(idx_mapping_np)
        shapes = self._chain if tree is None else (tree.parents, tree.depths, tree.ancestors)
        for table, shape in zip((self.parents, self.depths, self.ancestors), shapes, strict=True):
            table[idx_mapping] = shape if tree is None else shape[:num_reqs]
        self._is_tree[idx_mapping_np] = tree is not None

    def release(self, req_state_idx: int) -> None:
        """Let a row be a chain again: its request ended, or drafts no more."""
        if self._is_tree[req_state_idx]:
            for table, shape in zip((self.parents, self.depths, self.ancestors), self._chain, strict=True):
                table[req_state_idx] = shape
            self._is_tree[req_state_idx] = False

    # ---- the forward -----------------------------------------------------------------------------------------------

    def before_forward(self, batch: Any) -> None:
        """Find the trees among a batch's scheduled drafts, of which the scheduler may have dropped the last ones."""
        self._step = self.attention.step = None
        num_drafts = batch.num_draft_tokens_per_req
        if num_drafts is None:
            return
        chosen = np.flatnonzero((num_drafts > 0) & self._is_tree[batch.idx_mapping_np] & ~batch.is_prefilling_np)
        if len(chosen):
            self._step = self._find(batch, chosen)
            self.attention.step = self._step.attention

    def _find(self, batch: Any, chosen: np.ndarray) -> "_Step":
        counts = batch.num_draft_tokens_per_req[chosen] + 1  # [n] with the root
        total, max_queries, min_queries = int(counts.sum()), int(counts.max()), int(counts.min())
        is_whole_batch = total == batch.num_tokens
        if is_whole_batch and max_queries == min_queries:  # the usual decode step: a grid, nothing to look up
            rows, query_start, num_queries = self._grid(len(chosen), max_queries)
            state_rows, tokens, root_tokens = batch.idx_mapping, None, None
            depths = self.depths[state_rows, :max_queries]
        else:
            starts = batch.query_start_loc_np[chosen + 1] - counts  # [n]
            node = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)  # [total] node of each token
            by_token = (np.repeat(starts, counts), node, np.repeat(batch.idx_mapping_np[chosen], counts))
            packed = np.concatenate((chosen, starts, counts, *by_token)).astype(np.int32)
            by_tree, by_token = async_tensor_h2d(packed, device=self.device).tensor_split((3 * len(chosen),))
            rows, query_start, num_queries = by_tree.view(3, -1)
            root_tokens, nodes, token_rows = by_token.view(3, -1).long()
            rows = rows.long()
            state_rows, tokens = batch.idx_mapping[rows], root_tokens + nodes
            depths = self.depths[token_rows, nodes]
        attention = TreeStep(
            rows=rows,
            query_start=query_start,
            num_queries=num_queries,
            prefix_lens=batch.seq_lens[rows] - num_queries + 1,
            masks=self.ancestors[state_rows, :max_queries],
            max_queries=max_queries,
            is_whole_batch=is_whole_batch,
        )
        return _Step(attention, state_rows, depths, tokens, root_tokens)

    def _grid(self, num_trees: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, first queries and numbers of queries of a batch of equal trees, `[num_trees]` each."""
        if (num_trees, num_queries) not in self._grids:
            rows = torch.arange(num_trees, device=self.device)
            starts = (rows * num_queries).to(torch.int32)
            self._grids[num_trees, num_queries] = (rows, starts, torch.full_like(starts, num_queries))
        return self._grids[num_trees, num_queries]

    def _adjust(self, positions: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens]` or `[num_axes, num_tokens]` positions with every tree node at root + depth."""
        if positions.ndim == 1:
            positions = self._positions[: positions.shape[0]].copy_(positions)
        step = self._step
        if step is None:
            return positions
        if step.tokens is None:
            num_trees, num_queries = step.depths.shape
            grid = positions[..., : num_trees * num_queries].unflatten(-1, (num_trees, num_queries))
            grid.copy_(grid[..., :1] + step.depths)
        else:
            positions[..., step.tokens] = positions[..., step.root_tokens] + step.depths
        return positions

    def after_forward(self, forward: Forward) -> None:
        """Leave other forwards (dummy runs, other graphs) alone."""
        self.attention.step = None

    # ---- scoring ---------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether the batch that is being verified holds a tree."""
        return self._step is not None

    def shapes(self, idx_mapping: torch.Tensor) -> TreeShapes:
        """Return the shapes of `[num_reqs]` persistent rows, for a scorer."""
        return TreeShapes(idx_mapping, self.parents, self.depths, self.ancestors)

    def remember(self, idx_mapping: torch.Tensor, path: torch.Tensor | None) -> None:
        """Keep the accepted paths for the drafter: `[num_reqs]` persistent rows, `Scored.path`; None for chains."""
        self.path[idx_mapping] = self._in_order if path is None else path

    def compact(self, num_accepted: torch.Tensor) -> None:
        """Move the accepted paths' KV together, so that the committed text is contiguous.

        Args:
            num_accepted: `[num_reqs]` int32 accepted drafts by batch row.
        """
        step, self._step = self._step, None
        if step is None:
            return
        attention = step.attention
        kv_compact(
            self.caches,
            self.attention.block_table,
            attention.rows,
            attention.prefix_lens - 1,
            self.path[step.state_rows],
            num_accepted[attention.rows],
        )


@dataclass(frozen=True)
class _Step:
    """The trees of the batch in flight.

    Attributes:
        attention: What the layers need.
        state_rows: `[n]` int64 persistent row of each tree.
        depths: `[total]` int32 of each tree token; `[n, num_queries]` where the batch is a grid of equal trees.
        tokens: `[total]` int64 place of each tree token in the batch, `root_tokens` that of its root; None in a grid.
    """

    attention: TreeStep
    state_rows: torch.Tensor
    depths: torch.Tensor
    tokens: torch.Tensor | None
    root_tokens: torch.Tensor | None
