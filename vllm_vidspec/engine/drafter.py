"""The drafter: prefills pruned prompts and proposes chains; it takes messages and never sees the model runner.

Its state per request is a block table and three integers, because a KV entry's place follows from the committed length:
logical token t of a request (t past the pruned prompt) is entry t - num_dropped. A message's committed length is
therefore also the rollback: entries past it are stale, and the next forward overwrites them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vidspec_kernels import chain_step
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.counters import Counters
from vllm_vidspec.engine.draft_model import DraftModel
from vllm_vidspec.engine.kv_pool import NULL_BLOCK, DraftKVPool
from vllm_vidspec.engine.prompt import PrunedPrompt, UnsupportedPrompt, prune_prompt
from vllm_vidspec.families import adapter_for
from vllm_vidspec.pruning import get_pruner


@dataclass(frozen=True)
class PrefillMessage:
    """A request whose target prefill is done.

    Attributes:
        req_id: vLLM's request id, for the log.
        row: Persistent row (`req_state_idx`).
        token_ids: Prompt, and after a preemption the output so far.
        features: vLLM's multimodal features in prompt order.
        scores: The target's guidance, one float32 `[m]` CPU tensor per feature; None where there is none.
    """

    req_id: str
    row: int
    token_ids: list[int]
    features: list[Any]
    scores: list[torch.Tensor] | None = None


@dataclass(frozen=True)
class DraftMessage:
    """A step of the running requests; its `num_tokens` commit what the target accepted.

    Attributes:
        rows: `[num_reqs]` int64 persistent rows; `rows_np` the same on the host.
        last_tokens: `[num_reqs, 2]` int64, the committed text's last two tokens.
        num_tokens: `[max_num_reqs]` int32 committed length by persistent row, the target's last token included.
        num_tokens_upper_bound: `[num_reqs]` host bound of `num_tokens`.
        num_levels: Draft tokens to propose.
    """

    rows: torch.Tensor
    rows_np: np.ndarray
    last_tokens: torch.Tensor
    num_tokens: torch.Tensor
    num_tokens_upper_bound: np.ndarray
    num_levels: int


def max_slots_per_request(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the most KV entries that one request can hold: its longest text, and a chain past it."""
    return max_model_len + 1 + num_speculative_tokens


# (logits [n, vocab_size], rows [n], rows_np [n], pos [n], input_ids [n]) -> token ids [n] int64
DraftSampler = Callable[[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor], torch.Tensor]


class Drafter:
    """Owns the draft model's KV pool and the drafting state of every persistent row."""

    def __init__(
        self,
        model: DraftModel,
        config: VidSpecConfig,
        sample: DraftSampler,
        counters: Counters,
        num_blocks: int,
        max_num_reqs: int,
        max_model_len: int,
    ):
        self.model = model
        self.config = config
        self.counters = counters
        self.max_model_len = max_model_len
        self._sample = sample
        self._adapter = adapter_for(model.hf_config)
        self._prunes_by_looks = "features" in get_pruner(config.pruner).needs
        device = model.device
        max_slots = max_slots_per_request(max_model_len, config.num_speculative_tokens)
        self.pool = DraftKVPool(num_blocks, model.block_size, max_num_reqs, max_slots, device)
        # [max_num_reqs]; rows that do not draft keep whatever they had
        self._num_dropped = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)
        self._pos_delta = StagedWriteTensor(max_num_reqs, dtype=torch.int64, device=device)
        # Logical tokens whose KV the draft has, if the target accepted all that was drafted.
        self._num_fed = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)
        self._tables = (self._num_dropped, self._pos_delta, self._num_fed)
        self._num_dropped_np = np.zeros(max_num_reqs, dtype=np.int64)
        # What was chosen and why, for tools that look at pruning; None while nobody looks.
        self.watched: list[dict[str, Any]] | None = None
        self._buffers = _StepBuffers(max_num_reqs, model.num_axes, device)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def prefill(self, messages: list[PrefillMessage]) -> list[bool]:
        """Show the draft its pruned prompts, in chunks of at most the token budget, several requests to a chunk.

        Returns:
            Per message, whether the request will be drafted for; a refused one is counted by reason.
        """
        start = time.perf_counter()
        for table in self._tables:
            table.clear_staged_writes()  # of a prefill that failed half-way
        rows, prompts, embeds, accepted = [], [], [], []
        for message in messages:
            encoded = self._encode_all(message) if self._prunes_by_looks else None
            prompt = self._admit(message, encoded)
            accepted.append(prompt is not None)
            if prompt is not None:
                rows.append(message.row)
                prompts.append(prompt)
                embeds.append(self._embed(message, prompt, encoded))
        if prompts:
            self._run_chunks(rows, prompts, embeds)
            for table in self._tables:
                table.apply_write()
        self.counters.add("draft_prefill_us", int(1e6 * (time.perf_counter() - start)))
        return accepted

    def _encode_all(self, message: PrefillMessage) -> list[torch.Tensor] | None:
        """Return every item's vision embeddings `[m_i, hidden_size]`, for a pruner that compares them."""
        if not message.features or any(feature.data is None for feature in message.features):
            return None
        return self.model.encode(message.features)

    def _admit(self, message: PrefillMessage, encoded: list[torch.Tensor] | None) -> PrunedPrompt | None:
        """Prune a prompt and reserve its blocks, or count why not."""
        try:
            prompt = prune_prompt(
                message.token_ids,
                message.features,
                self.config,
                self._adapter,
                self.model.hf_config,
                self.model.full_positions,
                message.scores,
                encoded,
            )
        except UnsupportedPrompt as reason:
            self.counters.skip("unsupported", message.req_id, str(reason))
            return None
        if self.watched is not None:
            self.watched.append(
                {
                    "req_id": message.req_id,
                    "grids": prompt.grids,
                    "kept_indices": prompt.kept_indices,
                    "scores": message.scores,
                    "embeddings": None if encoded is None else [item.float().cpu() for item in encoded],
                }
            )
        limit = self.config.max_draft_len
        if limit is not None and prompt.num_kept > limit:
            detail = f"its pruned prompt has {prompt.num_kept} tokens, max_draft_len is {limit}"
            self.counters.skip("too_long", message.req_id, detail)
            return None
        row = message.row
        num_slots = prompt.num_kept + 1 + self.config.num_speculative_tokens
        if not self.pool.reserve(np.array([row]), np.array([num_slots]))[0]:
            detail = f"the draft's KV pool has no room for {num_slots} tokens"
            self.counters.skip("pool_full", message.req_id, detail)
            return None
        self._num_dropped_np[row] = prompt.num_dropped
        self._num_dropped.stage_write_elem(row, prompt.num_dropped)
        self._pos_delta.stage_write_elem(row, prompt.pos_delta)
        self._num_fed.stage_write_elem(row, len(message.token_ids))
        num_visual_kept = prompt.num_visual - prompt.num_dropped
        self.counters.add("prompts")
        self.counters.add("text_tokens", prompt.num_kept - num_visual_kept)
        self.counters.add("visual_tokens_full", prompt.num_visual)
        self.counters.add("visual_tokens_kept", num_visual_kept)
        self.counters.set("draft_pool_blocks_used", self.pool.num_used_blocks)
        return prompt

    def _embed(self, message: PrefillMessage, prompt: PrunedPrompt, encoded: list[torch.Tensor] | None) -> torch.Tensor:
        """Return the kept tokens' embeddings `[num_kept, hidden_size]`; an item that keeps nothing is not encoded."""
        device = self.model.device
        kept_indices = prompt.kept_indices
        if encoded is None:
            shown = [i for i, kept in enumerate(kept_indices) if len(kept)]
            encoded = self.model.encode([message.features[i] for i in shown]) if shown else []
            kept_indices = tuple(kept_indices[i] for i in shown)
        media = [full[kept.to(full.device)] for full, kept in zip(encoded, kept_indices, strict=True) if len(kept)]
        return self.model.embed(prompt.token_ids.to(device), media, prompt.is_media.to(device))

    def _run_chunks(self, rows: list[int], prompts: list[PrunedPrompt], embeds: list[torch.Tensor]) -> None:
        """Prefill all prompts; a chunk takes what fits of the first unfinished one, then of the next."""
        lengths = [prompt.num_kept for prompt in prompts]
        flat_embeds = torch.cat(embeds)  # [sum(lengths), hidden_size]
        flat_positions = torch.cat([prompt.positions for prompt in prompts], dim=1).to(self.model.device)
        bounds = np.cumsum([0, *lengths])
        for low in range(0, int(bounds[-1]), self.model.max_num_tokens):
            high = min(low + self.model.max_num_tokens, int(bounds[-1]))
            first, last = np.searchsorted(bounds, low, side="right") - 1, np.searchsorted(bounds, high, side="left")
            part = range(int(first), int(last))
            starts = [max(low - int(bounds[i]), 0) for i in part]
            ends = [min(high - int(bounds[i]), lengths[i]) for i in part]
            self._run_chunk([rows[i] for i in part], starts, ends, flat_embeds[low:high], flat_positions[:, low:high])

    def _run_chunk(
        self, rows: list[int], starts: list[int], ends: list[int], embeds: torch.Tensor, positions: torch.Tensor
    ) -> None:
        device = self.model.device
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        query_start_loc_np = np.cumsum([0, *counts], dtype=np.int32)
        self.model.forward(
            embeds,
            positions,
            query_start_loc=async_tensor_h2d(query_start_loc_np, device=device),
            query_start_loc_np=query_start_loc_np,
            seq_lens=async_tensor_h2d(ends, device=device, dtype=torch.int32),
            seq_lens_upper_bound=np.array(ends),
            block_table=self.pool.table[async_tensor_h2d(rows, device=device)],
            slot_mapping=self.pool.slots(rows, starts, counts),
        )

    # ---- draft -----------------------------------------------------------------------------------------------------

    def grow(self, rows_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Make room for the next step; return `[n]` bool, False where the pool is full."""
        num_slots = num_tokens_upper_bound - self._num_dropped_np[rows_np] + self.config.num_speculative_tokens
        return self.pool.reserve(rows_np, num_slots)

    def draft(self, message: DraftMessage) -> torch.Tensor:
        """Propose a chain for every row: one forward per level over all of them.

        Returns:
            `[num_reqs, num_levels]` int64 draft tokens.
        """
        start = time.perf_counter()
        rows, num_reqs, step = message.rows, len(message.rows_np), self._buffers
        num_slots = message.num_tokens - 1 - self._num_dropped.gpu  # [max_num_reqs] KV entries before the root
        slots_bound = message.num_tokens_upper_bound - self._num_dropped_np[message.rows_np]  # [num_reqs]
        block_table = self.pool.table[rows]  # [num_reqs, max_blocks]
        hidden = self._feed_roots(message, num_slots, slots_bound, block_table)
        tokens, drafts = message.last_tokens[:, 1], []
        for level in range(message.num_levels):
            if level > 0:
                self._place(rows, level, num_slots, message.num_tokens)
                hidden = self.model.forward(
                    self.model.embed(tokens.to(torch.int32), [], None),
                    step.positions[:, :num_reqs],
                    query_start_loc=step.arange[: num_reqs + 1],
                    query_start_loc_np=step.arange_np[: num_reqs + 1],
                    seq_lens=step.seq_lens[:num_reqs],
                    seq_lens_upper_bound=slots_bound + level,
                    block_table=block_table,
                    slot_mapping=step.slot_mapping[:num_reqs],
                )
            logits = self.model.compute_logits(hidden)
            tokens = self._sample(logits, rows, message.rows_np, step.logical_pos[:num_reqs], tokens)
            drafts.append(tokens)
        # Fed: the committed text up to the root, and every draft token but the last.
        self._num_fed.gpu[rows] = message.num_tokens[rows] + max(message.num_levels - 1, 0)
        self.counters.add("draft_decode_us", int(1e6 * (time.perf_counter() - start)))
        if not drafts:
            return message.last_tokens.new_empty(num_reqs, 0)
        return torch.stack(drafts, dim=1)

    def _feed_roots(
        self, message: DraftMessage, num_slots: torch.Tensor, slots_bound: np.ndarray, block_table: torch.Tensor
    ) -> torch.Tensor:
        """Run the first level: two tokens of each request, the second of which is the root, the target's own last
        token.

        The first is the token before it, whose KV is missing exactly when the target accepted the whole previous chain
        (the last draft token is proposed but never fed); otherwise its KV stands and this copy goes to the null block.
        So the batch has one shape whatever was accepted, and the host need not know.

        Returns:
            `[num_reqs, hidden_size]` hidden states of the roots; the step buffers are left at level 0.
        """
        rows, num_reqs, step = message.rows, len(message.rows_np), self._buffers
        self._place(rows, 0, num_slots - 1, message.num_tokens - 1)
        is_missing = self._num_fed.gpu[rows] < message.num_tokens[rows] - 1
        previous_slots = torch.where(is_missing, step.slot_mapping[:num_reqs], NULL_BLOCK)
        previous_positions = step.positions[:, :num_reqs].clone()
        self._place(rows, 0, num_slots, message.num_tokens)
        hidden = self.model.forward(
            self.model.embed(message.last_tokens.flatten().to(torch.int32), [], None),
            torch.stack((previous_positions, step.positions[:, :num_reqs]), dim=-1).flatten(1),
            query_start_loc=step.arange[: num_reqs + 1] * 2,
            query_start_loc_np=step.arange_np[: num_reqs + 1] * 2,
            seq_lens=step.seq_lens[:num_reqs],
            seq_lens_upper_bound=slots_bound,
            block_table=block_table,
            slot_mapping=torch.stack((previous_slots, step.slot_mapping[:num_reqs]), dim=-1).flatten(),
        )
        return hidden[1::2]

    def _place(self, rows: torch.Tensor, level: int, num_slots: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Write one level's positions, lengths and slots into the step buffers."""
        step = self._buffers
        chain_step(
            rows,
            num_slots,
            num_tokens,
            self._pos_delta.gpu,
            self.pool.table,
            block_size=self.pool.block_size,
            level=level,
            positions=step.positions,
            logical_pos=step.logical_pos,
            seq_lens=step.seq_lens,
            slot_mapping=step.slot_mapping,
        )
        # Beyond the context length nothing is ever committed; the clamp keeps the rope table in bounds.
        step.positions.clamp_(max=self.max_model_len - 1)

    # ---- release ---------------------------------------------------------------------------------------------------

    def release(self, row: int) -> None:
        """Forget a row: finished, aborted, preempted or given up."""
        self.pool.release(row)
        self.counters.set("draft_pool_blocks_used", self.pool.num_used_blocks)


class _StepBuffers:
    """Persistent inputs of one draft level."""

    def __init__(self, max_num_reqs: int, num_axes: int, device: torch.device):
        self.positions = torch.zeros(num_axes, max_num_reqs, dtype=torch.int64, device=device)
        self.logical_pos = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.arange = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.arange_np = np.arange(max_num_reqs + 1, dtype=np.int32)
