"""The target's side of tree drafts: their shapes by persistent row, what its forward needs, and its KV afterwards.

What a forward needs lies in memory whose addresses stay (`TreePlaces`, the model's positions), and one launch before it
writes all of it. So a whole forward can be one CUDA graph, whatever is drafted: a chain is a tree of width 1. This hook
writes: positions and masks of the forward's tree nodes, and the accepted paths' KV; its failures are not survived,
because the answer would be wrong.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from vidspec_kernels import TreePlaces, kv_compact, place_trees, warm_up
from vllm_vidspec.drafting import DraftTree, topology_tables
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHook
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.engine.tree_attention import TreeAttention, TreeStep
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import Tally, TreeShapes


class TargetTrees(TargetHook):
    """Lets the target verify trees in its ordinary forward.

    Their nodes take consecutive slots after the root, as a chain's drafts do; what differs is the rope position
    (root + depth), the attention mask (ancestors only), and that the accepted path's KV must move together.
    """

    loss = "trees cannot be verified"

    def __init__(
        self,
        attention: TreeAttention,
        model_state: Any,
        requests: RequestRows,  # its `is_tree` is written here
        max_nodes: int,
        max_num_tokens: int,
        device: torch.device,
        in_trees: bool = True,  # whether drafts can be trees; else all are chains, whose KV never moves
    ):
        self.attention, self._in_trees, self._is_tree = attention, in_trees, requests.is_tree
        max_num_reqs = len(self._is_tree)
        # [max_num_reqs + 1, K + 1] each; a chain wherever no tree was drafted. The last row is the draft's padding's.
        self._chain = topology_tables(list(range(max_nodes)), device)
        tables = (table.expand(max_num_reqs + 1, -1).contiguous() for table in self._chain)
        self.parents, self.depths, self.ancestors = tables
        # [max_num_reqs, K + 1] int32 node behind each output of the last verify step; the drafter reads it
        self.path = torch.arange(max_nodes + 1, dtype=torch.int32, device=device).repeat(max_num_reqs, 1)
        self.num_accepted = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)  # drafts on these paths
        self.places = TreePlaces.empty(max_num_reqs, max_nodes + 1, device)  # of the forward that runs next
        self._rows = torch.arange(max_num_reqs, device=device)
        # Models with 1-D positions read the batch's own buffer, which must not change: they get a copy.
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._step_of = functools.cache(self._make_step)
        self._planned: TreeStep | None = None  # what the layers of the batch in flight do
        self._batch: Any = None  # the batch in flight, where it holds a tree
        self._block_table: torch.Tensor  # [num_reqs, max_blocks] int32 of the last forward's layers
        compat.adjust_positions(model_state, self._adjust, lambda num_tokens: self._positions[:num_tokens])
        compat.observe_attention_metadata(model_state, self._observe)

    def init_kv(self, runner: Any) -> None:
        if not self._in_trees:
            return
        if len(runner.kv_cache_config.kv_cache_groups) != 1:
            mixed = "targets that mix attention kinds (several KV cache groups)"
            raise VidSpecError(f"{mixed} cannot verify trees: use chain")
        self.caches = self.attention.caches()

    # ---- what was drafted ------------------------------------------------------------------------------------------

    def expect(self, rows_np: np.ndarray) -> None:
        """Expect trees of `[n]` persistent rows from here on. It comes before `take`, which may fail half way."""
        self._is_tree[rows_np] = True

    def take(self, rows: torch.Tensor, tree: DraftTree) -> None:
        """Remember the shapes of drafts by `[R]` persistent rows, padding's too: the last part of a captured draft."""
        for table, shape in zip(self._tables(), (tree.parents, tree.depths, tree.ancestors), strict=True):
            table[rows] = shape[: len(rows)]

    def take_chains(self, rows: torch.Tensor | int, rows_np: np.ndarray | int) -> None:
        """Remember that the drafts of `[n]` persistent rows are chains; `rows_np` the same on the host."""
        if self._is_tree[rows_np].any():
            for table, shape in zip(self._tables(), self._chain, strict=True):
                table[rows] = shape
            self._is_tree[rows_np] = False

    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.parents, self.depths, self.ancestors

    def remove(self, req_state_idx: int) -> None:
        """Let a row be a chain again: its request ended, or drafts no more."""
        self.take_chains(req_state_idx, req_state_idx)

    def active_rows(self) -> Iterable[int]:
        return np.flatnonzero(self._is_tree).tolist()

    # ---- the forward -----------------------------------------------------------------------------------------------

    def before_forward(self, batch: Any) -> None:
        """Find out whether a batch's scheduled drafts are trees; the scheduler may have dropped a tree's last nodes."""
        self._planned = self._batch = None
        num_drafts = batch.num_draft_tokens_per_req
        if num_drafts is None:
            return
        step = self._step(batch, int(batch.num_scheduled_tokens.max()))
        if ((num_drafts > 0) & self._is_tree[batch.idx_mapping_np] & ~batch.is_prefilling_np).any():
            self._batch = batch
        if self._batch is not None or step.is_whole_batch:
            self._planned = step

    def _step(self, batch: Any, max_query_len: int) -> TreeStep:
        """Return what the layers do with a batch of at most so many query rows a request.

        One of short requests, as in decode, is all tree attention's; of others it takes those after vLLM's own.
        """
        num_cols = self.ancestors.shape[1]
        return self._step_of(batch.num_reqs, min(max_query_len, num_cols), max_query_len <= num_cols)

    def _make_step(self, num_reqs: int, max_queries: int, is_whole_batch: bool) -> TreeStep:
        places, rows = self.places, self._rows[:num_reqs]
        where = (places.query_start, places.num_queries, places.prefix_lens, places.masks)
        return TreeStep(rows, *where, max_queries, is_whole_batch)

    def _observe(self, batch: Any, metadata: dict[str, Any], for_capture: bool) -> None:
        """Plan the layers' part of a forward; a captured one is planned for whatever batch it may be replayed on."""
        self._block_table = metadata[self.attention.layers[0].layer_name].block_table
        self.attention.step = self._planned
        if for_capture:
            # What a batch of before has left there lies past the end of this one.
            self._place(batch, self._positions[: batch.num_tokens])
            longest = batch.max_query_len or int(batch.num_scheduled_tokens.max())
            # A root alone is vLLM's: nothing is drafted for such batches.
            step = self._step(batch, longest) if longest > 1 else None
            is_ours = step is not None and (self._in_trees or step.is_whole_batch)
            self.attention.step = step if is_ours else None

    def _adjust(self, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens]` or `[num_axes, num_tokens]` positions with every tree node at root + depth."""
        out = self._positions[: len(positions)] if positions.ndim == 1 else None
        self._place(batch, positions, out)
        return positions if out is None else out

    def _place(self, batch: Any, positions: torch.Tensor, out: torch.Tensor | None = None) -> None:
        place_trees(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            self.depths,
            self.ancestors,
            positions,
            self.places,
            size=batch.num_reqs_after_padding,
            out_positions=out,
        )

    def warm_up(self, runner: Any) -> None:
        """Prepare the launch before each forward, before anything is captured."""
        rope_state = getattr(runner.model_state, "rope_state", None)
        positions = runner.input_buffers.positions if rope_state is None else rope_state.positions
        out = self._positions if rope_state is None else None
        warm_up.warm_place_trees(self.depths, self.ancestors, self.places, positions, out)

    def after_forward(self, forward: Forward) -> None:
        """Leave other forwards (dummy runs, other graphs) alone."""
        self._planned = self.attention.step = None

    # ---- scoring ---------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        return self._batch is not None

    def shapes(self, idx_mapping: torch.Tensor) -> TreeShapes:
        """Return the shapes of `[num_reqs]` persistent rows, for a scorer."""
        return TreeShapes(idx_mapping, self.parents, self.depths, self.ancestors)

    def remember(self, tally: Tally) -> Tally:
        """Return a scorer's tally that keeps the accepted paths too: for `compact`, and for the drafter."""
        return tally._replace(path=self.path, num_accepted=self.num_accepted)

    def compact(self) -> None:
        """Move the accepted paths' KV together, so that the committed text is contiguous."""
        batch, self._batch = self._batch, None
        if batch is not None:
            rows, roots = self._rows[: batch.num_reqs], self.places.roots[: batch.num_reqs]
            kv_compact(self.caches, self._block_table, rows, roots, self.path, self.num_accepted, batch.idx_mapping)
