"""Drafts chains: one token of every request per forward; and the first forward, which trees share."""

import numpy as np
import torch

from vidspec_kernels import step
from vidspec_kernels.dispatch import as_array, at_least
from vllm_vidspec.engine.draft_model import DraftModel
from vllm_vidspec.engine.draft_rows import DraftRows
from vllm_vidspec.engine.kv_pool import NULL_BLOCK, DraftKVPool
from vllm_vidspec.engine.messages import DraftMessage, Drafts
from vllm_vidspec.engine.noise import CoupledSampler
from vllm_vidspec.engine.score_blocks import in_blocks


class RootFeeder:
    """Feeds the committed text's last two tokens, with which every step of drafting begins.

    Args:
        model: The draft.
        pool: Its KV pool.
        rows: The per-row integers.
        max_num_reqs: Persistent rows.
    """

    def __init__(self, model: DraftModel, pool: DraftKVPool, rows: DraftRows, max_num_reqs: int):
        self.model = model
        self.pool = pool
        self.rows = rows
        device = model.device
        # Persistent inputs of one token a request.
        self.positions = torch.zeros(model.num_axes, max_num_reqs, dtype=torch.int64, device=device)
        self.logical_pos = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.arange = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.arange_np = np.arange(max_num_reqs + 1, dtype=np.int32)
        self.pairs, self.pairs_np = self.arange * 2, self.arange_np * np.int32(2)

    def num_slots(self, message: DraftMessage) -> torch.Tensor:
        """Return `[max_num_reqs]` int32 KV entries before the root."""
        return message.num_tokens - 1 - self.rows.num_dropped

    def slots_bound(self, message: DraftMessage) -> np.ndarray:
        """Return `[num_reqs]` host bound of the KV entries up to the root."""
        return message.num_tokens_upper_bound - self.rows.num_dropped_np[message.rows_np]

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
        num_reqs = len(message.rows_np)
        self.place(message.rows, 0, num_slots - 1, message.num_tokens - 1)
        previous_slots = torch.where(self._is_missing(message), self.slot_mapping[:num_reqs], NULL_BLOCK)
        previous_positions = self.positions[:, :num_reqs].clone()
        self.place(message.rows, 0, num_slots, message.num_tokens)
        hidden = self.model.forward(
            self.model.embed(message.last_tokens.flatten().to(torch.int32), [], None),
            torch.stack((previous_positions, self.positions[:, :num_reqs]), dim=-1).flatten(1),
            query_start_loc=self.pairs[: num_reqs + 1],
            query_start_loc_np=self.pairs_np[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_upper_bound=slots_bound,
            block_table=block_table,
            slot_mapping=torch.stack((previous_slots, self.slot_mapping[:num_reqs]), dim=-1).flatten(),
        )
        return hidden[1::2]

    def _is_missing(self, message: DraftMessage) -> torch.Tensor:
        """Return `[num_reqs]` bool: the last accepted draft was not fed."""
        num_accepted, fed = as_array(message.num_accepted), as_array(self.rows.fed)[as_array(message.rows)]
        last = num_accepted
        if message.path is not None:
            last = as_array(message.path)[as_array(self.arange)[: len(fed)], num_accepted]
        return torch.as_tensor((num_accepted > 0) & ((fed >> at_least(last - 1, 0)) & 1 == 0))

    def place(self, rows: torch.Tensor, level: int, num_slots: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Write one level's positions, lengths and slots into the buffers."""
        step(
            rows,
            num_slots,
            num_tokens,
            self.rows.pos_delta,
            self.pool.table,
            block_size=self.pool.block_size,
            level=level,
            # Only drafts behind the end of the target's context reach it, and those are never committed.
            max_position=self.model.num_positions - 1,
            positions=self.positions,
            logical_pos=self.logical_pos,
            seq_lens=self.seq_lens,
            slot_mapping=self.slot_mapping,
        )


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
        roots, model = self._roots, self._roots.model
        rows, num_reqs, num_levels = message.rows, len(message.rows_np), message.max_drafts
        num_slots, slots_bound = roots.num_slots(message), roots.slots_bound(message)
        block_table = roots.pool.table[rows]  # [num_reqs, max_blocks]
        hidden = roots.feed(message, num_slots, slots_bound, block_table)
        tokens, drafts = message.last_tokens[:, 1], []
        for level in range(num_levels):
            if level > 0:
                roots.place(rows, level, num_slots, message.num_tokens)
                hidden = model.forward(
                    model.embed(tokens.to(torch.int32), [], None),
                    roots.positions[:, :num_reqs],
                    query_start_loc=roots.arange[: num_reqs + 1],
                    query_start_loc_np=roots.arange_np[: num_reqs + 1],
                    seq_lens=roots.seq_lens[:num_reqs],
                    seq_lens_upper_bound=slots_bound + level,
                    block_table=block_table,
                    slot_mapping=roots.slot_mapping[:num_reqs],
                )
            tokens = self._choose(hidden, message, tokens)
            drafts.append(tokens)
        # Every draft but the last was fed. (K is at most 64, so the word is never full.)
        # (`fed[rows] = number` would copy the number from the host and wait for it.)
        roots.rows.fed.index_fill_(0, rows, (1 << max(num_levels - 1, 0)) - 1)
        if not drafts:
            return Drafts(message.last_tokens.new_empty(num_reqs, 0)), 1
        return Drafts(torch.stack(drafts, dim=1)), num_levels

    def _choose(self, hidden: torch.Tensor, message: DraftMessage, tokens: torch.Tensor) -> torch.Tensor:
        """Return the `[num_reqs]` int64 tokens after `tokens`, whose hidden states are `[num_reqs, hidden_size]`."""
        model, logical_pos = self._roots.model, self._roots.logical_pos

        def draw(block: slice) -> torch.Tensor:
            rows, rows_np = message.rows[block], message.rows_np[block]
            return self._sample(
                model.compute_logits(hidden[block]), rows, rows_np, logical_pos[: len(hidden)][block], tokens[block]
            )

        return in_blocks(draw, len(hidden), model.vocab_size)
