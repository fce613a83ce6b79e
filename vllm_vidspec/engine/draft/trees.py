"""Drafts trees: one forward per level over the frontiers of all requests, under a tree mask on the draft's paged KV."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_vidspec.drafting import TreePolicy, candidates
from vllm_vidspec.engine.draft.chains import RootFeeder
from vllm_vidspec.engine.draft.levels import LevelInputs
from vllm_vidspec.engine.draft.messages import DraftMessage, Drafts
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.draft.score_blocks import in_blocks
from vllm_vidspec.engine.tree_attention import TreeAttention, TreeStep


class TreeDrafter:
    """Grows trees as a policy says.

    Node i of a tree has KV entry root + i, whatever its depth: the same layout as on the target's side.

    Args:
        roots: The first forward.
        sample: The draft's sampler.
        policy: What shapes the trees.
        attention: Of the draft's layers.
        fills: Whether every tree is filled up to the budget, because vLLM will verify that many tokens anyway (async
            scheduling).
    """

    def __init__(
        self, roots: RootFeeder, sample: CoupledSampler, policy: TreePolicy, attention: TreeAttention, fills: bool
    ):
        self._roots = roots
        self._sample = sample
        self.policy = policy
        self.attention = attention
        self._fills = fills
        self.inputs = LevelInputs(roots.model, roots.kv, len(roots.inputs.seq_lens), policy.max_frontier)
        self._layouts: dict[tuple[int, int], _Layout] = {}  # by (requests, nodes of each), both bounded

    def draft(self, message: DraftMessage) -> tuple[Drafts, int]:
        """Return the trees `[num_reqs, K]` and the number of forwards."""
        roots, policy = self._roots, self.policy
        rows, num_reqs = message.idx_mapping, len(message.idx_mapping_np)
        told = message.was_verified
        policy.observe(rows, message.num_accepted if told is None else message.num_accepted.where(told, -1))
        num_levels = policy.begin(rows, message.idx_mapping_np, message.max_drafts)
        num_slots, slots_bound = roots.kv.num_slots(message), roots.kv.slots_bound(message)
        block_table = roots.kv.block_tables[rows]  # [num_reqs, max_blocks]
        hidden = roots.feed(message, num_slots, slots_bound, block_table)
        logical_pos, tokens = roots.inputs.logical_pos[:num_reqs], message.last_tokens[:, 1]
        fed, is_plain = [], self._sample.is_plain(message.idx_mapping_np)
        for level in range(num_levels):
            found = self._candidates(hidden, message, logical_pos, tokens, is_plain)
            frontier = policy.extend(level, *found)
            if frontier is None:
                break
            nodes, node_tokens = frontier  # [num_reqs, F]
            width = nodes.shape[1]
            fed.append(nodes)
            tokens = node_tokens.flatten()
            self.inputs.place(rows, level + 1, num_slots, message.num_tokens, nodes)
            logical_pos = self.inputs.logical_pos[: num_reqs * width]
            hidden = self._feed(nodes, tokens, slots_bound, block_table)
        policy.finish(self._fills)
        roots.kv.remember_fed_nodes(rows, fed)
        tree = policy.tree
        # Unused columns hold -1; they are never scheduled, or verified as a leaf that is as good as any.
        return Drafts(tree.tokens[:num_reqs, 1:].clamp(min=0), tree), 1 + len(fed)

    def _candidates(
        self,
        hidden: torch.Tensor,
        message: DraftMessage,
        logical_pos: torch.Tensor,
        tokens: torch.Tensor,
        is_plain: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `candidates` after each of a frontier's `[num_reqs * width]` tokens.

        Args:
            hidden: `[num_reqs * width, hidden_size]` their hidden states.
            message: The step.
            logical_pos: `[num_reqs * width]` int64 their logical positions.
            tokens: `[num_reqs * width]` int64.
            is_plain: Whether logits are scores.
        """
        model, policy = self._roots.model, self.policy
        width = len(hidden) // len(message.idx_mapping_np)
        if not is_plain:
            by_node, by_node_np = message.idx_mapping.repeat_interleave(width), np.repeat(message.idx_mapping_np, width)

        def find(block: slice) -> tuple[torch.Tensor, torch.Tensor]:
            scores = model.compute_logits(hidden[block])
            if not is_plain:
                scores = self._sample.scores(
                    scores, by_node[block], by_node_np[block], logical_pos[block], tokens[block]
                )
            return candidates(scores, policy.num_candidates, policy.needs_log_probs)

        return in_blocks(find, len(hidden), model.vocab_size)

    def _feed(
        self, nodes: torch.Tensor, tokens: torch.Tensor, slots_bound: np.ndarray, block_table: torch.Tensor
    ) -> torch.Tensor:
        """Run one level: `[num_reqs, F]` nodes -> `[num_reqs * F, hidden_size]` hidden states."""
        model = self._roots.model
        num_reqs, width = nodes.shape
        masks = self.policy.tree.ancestors[:num_reqs].gather(1, nodes)
        embeds = model.embed(tokens.to(torch.int32), [], None)
        per_forward = max(1, model.max_num_tokens // width)  # requests; usually all of them
        parts = []
        for low in range(0, num_reqs, per_forward):
            high = min(low + per_forward, num_reqs)
            places, layout = slice(low * width, high * width), self._layout(high - low, width)
            prefix_lens = self.inputs.seq_lens[low:high]
            self.attention.step = TreeStep(
                rows=layout.rows,
                query_start=layout.query_start_loc[:-1],
                num_queries=layout.num_queries,
                prefix_lens=prefix_lens,
                masks=masks[low:high],
                max_queries=width,
                is_whole_batch=True,
            )
            try:
                hidden = model.forward(
                    embeds[places],
                    self.inputs.positions[:, places],
                    query_start_loc=layout.query_start_loc,
                    query_start_loc_np=layout.query_start_loc_np,
                    seq_lens=prefix_lens + width,
                    seq_lens_upper_bound=slots_bound[low:high] + width,
                    block_table=block_table[low:high],
                    slot_mapping=self.inputs.slot_mapping[places],
                )
            finally:
                self.attention.step = None
            parts.append(hidden)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _layout(self, num_reqs: int, width: int) -> "_Layout":
        """Return the constants of a forward with so many nodes of so many requests."""
        if (num_reqs, width) not in self._layouts:
            starts = self._roots.arange[: num_reqs + 1] * width
            self._layouts[num_reqs, width] = _Layout(
                rows=self._roots.arange[:num_reqs].long(),
                query_start_loc=starts,
                query_start_loc_np=self._roots.arange_np[: num_reqs + 1] * np.int32(width),
                num_queries=torch.full_like(starts[1:], width),
            )
        return self._layouts[num_reqs, width]


@dataclass(frozen=True)
class _Layout:
    """Constants of one level's forward.

    Attributes:
        rows: `[num_reqs]` int64, 0 to num_reqs - 1.
        query_start_loc: `[num_reqs + 1]` int32; `query_start_loc_np` the same on the host.
        num_queries: `[num_reqs]` int32, the width everywhere.
    """

    rows: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_np: np.ndarray
    num_queries: torch.Tensor
