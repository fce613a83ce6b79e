"""The drafter: prefills pruned prompts and proposes drafts; it takes messages and never sees the model runner.

Its state per request is a block table and three integers, because a KV entry's place follows from the committed length:
logical token t of a request (t past the pruned prompt) is entry t - num_dropped. A message's committed length is
therefore also the rollback: entries past it are stale, and the next forward overwrites them.
"""

import time
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import CacheList, kv_compact
from vidspec_kernels.dispatch import as_array
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.drafting.factory import make_policy
from vllm_vidspec.engine.chain_drafter import ChainDrafter, RootFeeder
from vllm_vidspec.engine.counters import Counters
from vllm_vidspec.engine.draft_model import DraftModel
from vllm_vidspec.engine.draft_rows import DraftRows
from vllm_vidspec.engine.kv_pool import DraftKVPool
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.messages import DraftMessage, Drafts, PrefillMessage
from vllm_vidspec.engine.noise import CoupledSampler
from vllm_vidspec.engine.prompt import PrunedPrompt, UnsupportedPrompt, prune_prompt
from vllm_vidspec.engine.tree_attention import TreeAttention
from vllm_vidspec.engine.tree_drafter import TreeDrafter
from vllm_vidspec.families import adapter_for
from vllm_vidspec.pruning import get_pruner


def max_slots_per_request(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the most KV entries that one request can hold: its longest text, and K drafts past it."""
    return max_model_len + 1 + num_speculative_tokens


class Drafter:
    """Owns the draft model's KV pool and the drafting state of every persistent row.

    Args:
        model: The draft, loaded, its KV cache allocated.
        config: The knobs.
        sample: The draft's sampler.
        counters: Told what is drafted.
        num_blocks: Of the pool.
        max_num_reqs: Persistent rows.
        max_model_len: Context length.
        fills_trees: See `TreeDrafter`.
    """

    def __init__(
        self,
        model: DraftModel,
        config: VidSpecConfig,
        sample: CoupledSampler,
        counters: Counters,
        num_blocks: int,
        max_num_reqs: int,
        max_model_len: int,
        fills_trees: bool = False,
    ):
        self.model = model
        self.config = config
        self.counters = counters
        self._adapter = adapter_for(model.hf_config)
        self._prunes_by_looks = "features" in get_pruner(config.pruner).needs
        max_slots = max_slots_per_request(max_model_len, config.num_speculative_tokens)
        self.pool = DraftKVPool(num_blocks, model.block_size, max_num_reqs, max_slots, model.device)
        self.rows = DraftRows(max_num_reqs, model.device)
        # What was chosen and why, for tools that look at pruning; None while nobody looks.
        self.watched: list[dict[str, Any]] | None = None
        roots = RootFeeder(model, self.pool, self.rows, max_num_reqs, max_model_len)
        self._chains = ChainDrafter(roots, sample)
        self._trees: TreeDrafter | None = None
        if tree_shapes := config.shapes - {"chain"}:
            attention = TreeAttention(attention_layers(model.config).values())
            self._caches: CacheList = attention.caches()
            policy = make_policy(next(iter(tree_shapes)), config, max_num_reqs, model.device)
            self._trees = TreeDrafter(roots, sample, policy, attention, fills_trees)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def prefill(self, messages: list[PrefillMessage]) -> list[bool]:
        """Show the draft its pruned prompts, in chunks of at most the token budget, several requests to a chunk.

        Returns:
            Per message, whether the request will be drafted for; a refused one is counted by reason.
        """
        start = time.perf_counter()
        self.rows.clear()
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
            self.rows.apply()
            if self._trees is not None:
                self._trees.policy.admit(np.array(rows))
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
        self.rows.stage(row, prompt.num_dropped, prompt.pos_delta)
        num_visual_kept = prompt.num_visual - prompt.num_dropped
        for name in ("prompts", *message.outcome):
            self.counters.add(name)
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
        num_slots = num_tokens_upper_bound - self.rows.num_dropped_np[rows_np] + self.config.num_speculative_tokens
        return self.pool.reserve(rows_np, num_slots)

    def draft(self, message: DraftMessage) -> Drafts:
        """Propose drafts in the shape that the message names, for all its requests at once."""
        start = time.perf_counter()
        if message.path is not None:
            self._gather_accepted(message)
        if message.shape == "chain":
            drafts, num_forwards = self._chains.draft(message)
        else:
            assert self._trees is not None
            drafts, num_forwards = self._trees.draft(message)
        self.counters.add("draft_steps")
        self.counters.add("draft_forwards", num_forwards)
        self.counters.add("draft_decode_us", int(1e6 * (time.perf_counter() - start)))
        return drafts

    def _gather_accepted(self, message: DraftMessage) -> None:
        """Move the accepted nodes' KV together behind the last step's root; nodes that were not fed move garbage, which
        the first forward of this step replaces.
        """
        assert message.path is not None
        rows, num_accepted = as_array(message.rows), as_array(message.num_accepted)
        last_roots = as_array(message.num_tokens)[rows] - num_accepted - 2 - as_array(self.rows.num_dropped)[rows]
        last_roots = torch.as_tensor(last_roots)
        kv_compact(self._caches, self.pool.table, message.rows, last_roots, message.path, message.num_accepted)

    # ---- release ---------------------------------------------------------------------------------------------------

    def release(self, row: int) -> None:
        """Forget a row: finished, aborted, preempted or given up."""
        self.pool.release(row)
        self.counters.set("draft_pool_blocks_used", self.pool.num_used_blocks)
