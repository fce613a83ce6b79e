"""Forwards: the draft's forwards of a decode step, each of which can be captured, and the buffers between them."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from vidspec_kernels import LevelBuffers, StepBuffers, kv_compact, next_level
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.model import DraftModel, Layout
from vllm_vidspec.engine.tree_attention import TreeAttention, TreeStep


class DraftBuffers:
    """What a step hands from launch to launch, at fixed addresses: R requests, with padding, use the first R rows.

    A padding row has the persistent row `max_num_reqs`, slot -1, which no kernel writes, and no KV entry to read: it
    touches nothing. `begin_step` says where padding begins; nothing later needs to know. Below, M is `max_num_reqs`, W
    the most nodes of a request in a forward (`tree_width` 0: drafts are chains), and K `max_drafts`.
    """

    def __init__(self, model: DraftModel, kv: DraftKV, max_num_reqs: int, tree_width: int, max_drafts: int):
        device, num_places = model.device, max_num_reqs * max(tree_width, 1)
        positions = torch.zeros(model.num_axes, max(2 * max_num_reqs, num_places), dtype=torch.int64, device=device)
        self.max_num_reqs = max_num_reqs
        # What `begin_step` writes, the first forward's inputs among it, and `next_level`, those of the others.
        self.step = StepBuffers.allocate(max_num_reqs, kv.max_blocks, positions, max_drafts + 1 if tree_width else 0)
        self.level = LevelBuffers.allocate(max_num_reqs, positions, tree_width)
        # [M * W] int32 tokens of every forward but the first: of chains what was drawn last
        token_ids = self.level.input_ids
        self.token_ids = torch.zeros(max_num_reqs, dtype=torch.int32, device=device) if token_ids is None else token_ids
        self.drafts = torch.zeros(max_num_reqs, max_drafts, dtype=torch.int64, device=device)  # [M, K] the proposal
        # [M * W, hidden_size] of the last forward, of the first one its roots'
        self.hidden_states = torch.zeros(num_places, model.hidden_size, dtype=model.dtype, device=device)
        # Made once each: a forward's layout by requests and width, a step's persistent rows and drafts by requests.
        self.layout = cache(lambda num_reqs, width: Layout.uniform(num_reqs, width, device))
        self.of = cache(lambda num_reqs: (self.step.rows[:num_reqs], self.drafts[:num_reqs]))
        self._fed, self._block_size = kv.fed, kv.block_size
        # Only drafts behind the end of the target's context reach it, and those are never committed.
        self._max_position = model.num_positions - 1

    def place(self, num_reqs: int, level: int | None = None, *tree: torch.Tensor) -> None:
        """Say where the next forward's tokens stand: of chains what was drawn last, whose level the device knows, of
        trees a level's nodes `[R, F]` int64, 0 for none, with tokens `[R, F]` and ancestors `[M, K + 1]` (`DraftTree`).
        """
        next_level(
            self.step,
            self.level,
            self._fed,
            *tree,
            size=num_reqs,
            level=self.step.level if level is None else level,
            block_size=self._block_size,
            max_position=self._max_position,
        )


class Forwards:
    """Runs the draft over what the buffers say, and leaves hidden states there."""

    def __init__(self, model: DraftModel, kv: DraftKV, buffers: DraftBuffers, attention: TreeAttention | None):
        self.model, self.buffers, self._kv, self._attention = model, buffers, kv, attention
        self._roots_in_tree = attention is not None and attention.outruns(2)
        self._in_order = torch.arange(buffers.max_num_reqs, device=model.device)
        # Of the first forward, a chain of two: the root alone attends to its own entry.
        self._pair_masks = torch.tensor([[0, 1]], device=model.device).repeat(buffers.max_num_reqs, 1)
        # Of each size once: making them anew takes the host as long as all else of a forward that is ours.
        self._inputs, self._tree = cache(self._cut), cache(self._see)
        self._first_inputs = buffers.step.input_ids[1::2]

    def roots(self, num_reqs: int) -> None:
        """Feed the committed text's last two tokens of each request, the second of which is the root: see `kv`.

        So the batch has one shape, whatever was accepted.
        """
        step = self.buffers.step
        if self._kv.caches is not None:
            assert step.path is not None
            moved = (step.last_root[:num_reqs], step.path[:num_reqs], step.num_accepted[:num_reqs])
            kv_compact(self._kv.caches, step.batch_table, self._in_order[:num_reqs], *moved)
        self._run(num_reqs, 2, is_first=True)

    def tokens(self, num_reqs: int) -> None:
        self._run(num_reqs, 1)

    def nodes(self, num_reqs: int, width: int) -> None:
        self._run(num_reqs, width, in_tree=True)

    def fed(self, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logical positions and tokens of the last forward's places: of its roots on level 0."""
        step, buffers = self.buffers.step, self.buffers
        return (buffers.level.logical_pos, buffers.token_ids) if level else (step.root_pos, self._first_inputs)

    def logits(self, places: slice) -> torch.Tensor:
        """Return `[n, vocab_size]` logits of `n` places of the last forward, of the first one its roots."""
        return self.model.compute_logits(self.buffers.hidden_states[places])

    def _run(self, num_reqs: int, width: int, is_first: bool = False, in_tree: bool = False) -> None:
        """Run `width` tokens of each request, in as few forwards as the draft's budget allows."""
        model = self.model
        per_forward = max(1, model.max_num_tokens // width)  # requests; usually all of them
        for low in range(0, num_reqs, per_forward):
            high = min(low + per_forward, num_reqs)
            input_ids, hidden_states, seq_lens, where = self._inputs(low, high, width, is_first)
            is_ours = self._roots_in_tree if is_first else in_tree
            with self._masked(self._tree(low, high, width, is_first)) if is_ours else contextlib.nullcontext():
                embeds = model.embed(input_ids, [], None)
                hidden = model.forward(embeds, seq_lens=seq_lens + width if in_tree else seq_lens, **where)
            hidden_states.copy_(hidden[1::2] if is_first else hidden)

    def _cut(
        self, low: int, high: int, width: int, is_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return of a forward over batch rows its input tokens, where its hidden states go, lengths, and the rest."""
        buffers, places = self.buffers, slice(low * width, high * width)
        at = buffers.step if is_first else buffers.level
        input_ids = (buffers.step.input_ids if is_first else buffers.token_ids)[places]
        hidden_states = buffers.hidden_states[slice(low, high) if is_first else places]
        where = dict(
            positions=at.positions[:, places],
            layout=buffers.layout(high - low, width),
            block_table=buffers.step.batch_table[low:high],
            slot_mapping=at.slot_mapping[places],
        )
        return input_ids, hidden_states, at.seq_lens[low:high], where

    def _see(self, low: int, high: int, width: int, is_first: bool) -> TreeStep:
        step, level, layout = self.buffers.step, self.buffers.level, self.buffers.layout(high - low, width)
        prefix_lens, masks = (step.root_slot, self._pair_masks) if is_first else (level.seq_lens, level.masks)
        assert masks is not None
        return TreeStep(
            rows=self._in_order[: high - low],
            query_start=layout.query_start_loc[:-1],
            num_queries=layout.num_queries,
            prefix_lens=prefix_lens[low:high],
            masks=masks[low:high],
            max_queries=layout.max_queries,
            is_whole_batch=True,
        )

    @contextlib.contextmanager
    def _masked(self, step: TreeStep) -> Iterator[None]:
        assert self._attention is not None
        self._attention.step = step
        try:
            yield
        finally:
            self._attention.step = None
