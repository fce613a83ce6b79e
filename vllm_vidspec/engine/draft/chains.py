"""Drafts chains: one token of every request per forward; and the first forward, which trees share."""

import numpy as np
import torch

from vllm_vidspec.engine.draft.kv import NULL_BLOCK, DraftKV
from vllm_vidspec.engine.draft.levels import LevelInputs
from vllm_vidspec.engine.draft.messages import DraftMessage, Drafts
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.draft.score_blocks import in_blocks


class RootFeeder:
    """Feeds the committed text's last two tokens, with which every step of drafting begins.

    Args:
        model: The draft.
        kv: Its KV memory.
        max_num_reqs: Persistent rows.
    """

    def __init__(self, model: DraftModel, kv: DraftKV, max_num_reqs: int):
        self.model = model
        self.kv = kv
        self.inputs = LevelInputs(model, kv, max_num_reqs, width=1)
        self.arange = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=model.device)
        self.arange_np = np.arange(max_num_reqs + 1, dtype=np.int32)
        self.pairs, self.pairs_np = self.arange * 2, self.arange_np * np.int32(2)

    def feed(
        self, message: DraftMessage, num_slots: torch.Tensor, slots_bound: np.ndarray, block_table: torch.Tensor
    ) -> torch.Tensor:
        """Run two tokens of each request, the second of which is the root, the target's own last token.

        The first is the token before it, whose KV is missing exactly when it is a draft that was proposed but not fed
        (the end of a chain, a leaf of a tree); otherwise its KV stands and this copy goes to the null block. So the
        batch has one shape whatever was accepted, and the host need not know.

        Returns:
            `[num_reqs, hidden_size]` hidden states of the roots; the buffers are left at the roots.
        """
        num_reqs, inputs = len(message.idx_mapping_np), self.inputs
        inputs.place(message.idx_mapping, 0, num_slots - 1, message.num_tokens - 1)
        previous_slots = torch.where(self.kv.is_missing(message), inputs.slot_mapping[:num_reqs], NULL_BLOCK)
        previous_positions = inputs.positions[:, :num_reqs].clone()
        inputs.place(message.idx_mapping, 0, num_slots, message.num_tokens)
        hidden = self.model.forward(
            self.model.embed(message.last_tokens.flatten().to(torch.int32), [], None),
            torch.stack((previous_positions, inputs.positions[:, :num_reqs]), dim=-1).flatten(1),
            query_start_loc=self.pairs[: num_reqs + 1],
            query_start_loc_np=self.pairs_np[: num_reqs + 1],
            seq_lens=inputs.seq_lens[:num_reqs],
            seq_lens_upper_bound=slots_bound,
            block_table=block_table,
            slot_mapping=torch.stack((previous_slots, inputs.slot_mapping[:num_reqs]), dim=-1).flatten(),
        )
        return hidden[1::2]


class ChainDrafter:
    """Proposes K tokens one after another.

    Args:
        roots: The first forward.
        sample: The draft's sampler.
    """

    def __init__(self, roots: RootFeeder, sample: CoupledSampler):
        self._roots = roots
        self._sample = sample

    def draft(self, message: DraftMessage) -> tuple[Drafts, int]:
        """Return the chains `[num_reqs, max_drafts]` and the number of forwards."""
        roots, inputs, model = self._roots, self._roots.inputs, self._roots.model
        rows, num_reqs, num_levels = message.idx_mapping, len(message.idx_mapping_np), message.max_drafts
        num_slots, slots_bound = roots.kv.num_slots(message), roots.kv.slots_bound(message)
        block_table = roots.kv.block_tables[rows]  # [num_reqs, max_blocks]
        hidden = roots.feed(message, num_slots, slots_bound, block_table)
        tokens, drafts = message.last_tokens[:, 1], []
        for level in range(num_levels):
            if level > 0:
                inputs.place(rows, level, num_slots, message.num_tokens)
                hidden = model.forward(
                    model.embed(tokens.to(torch.int32), [], None),
                    inputs.positions[:, :num_reqs],
                    query_start_loc=roots.arange[: num_reqs + 1],
                    query_start_loc_np=roots.arange_np[: num_reqs + 1],
                    seq_lens=inputs.seq_lens[:num_reqs],
                    seq_lens_upper_bound=slots_bound + level,
                    block_table=block_table,
                    slot_mapping=inputs.slot_mapping[:num_reqs],
                )
            tokens = self._choose(hidden, message, tokens)
            drafts.append(tokens)
        roots.kv.remember_fed(rows, max(num_levels - 1, 0))  # all but the last
        if not drafts:
            return Drafts(message.last_tokens.new_empty(num_reqs, 0)), 1
        return Drafts(torch.stack(drafts, dim=1)), num_levels

    def _choose(self, hidden: torch.Tensor, message: DraftMessage, tokens: torch.Tensor) -> torch.Tensor:
        """Return the `[num_reqs]` int64 tokens after `tokens`, whose hidden states are `[num_reqs, hidden_size]`."""
        model, logical_pos = self._roots.model, self._roots.inputs.logical_pos

        def draw(block: slice) -> torch.Tensor:
            rows, rows_np = message.idx_mapping[block], message.idx_mapping_np[block]
            return self._sample(
                model.compute_logits(hidden[block]), rows, rows_np, logical_pos[: len(hidden)][block], tokens[block]
            )

        return in_blocks(draw, len(hidden), model.vocab_size)
