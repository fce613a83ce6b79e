"""The drafter: prefills pruned prompts and proposes drafts; it takes messages and never sees the model runner."""

import time
from collections.abc import Mapping

import numpy as np
import torch

from vllm_vidspec.drafting import make_policy
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.chains import ChainDrafter, RootFeeder
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.memory import max_slots_per_request
from vllm_vidspec.engine.draft.messages import DraftMessage, Drafts, Prefilled, PrefillMessage, PrefillStep
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.trees import TreeDrafter
from vllm_vidspec.engine.draft.vision_cache import VisionCache
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.tree_attention import TreeAttention


class Drafter:
    """Owns what the draft keeps of every persistent row: its KV, its place in the line of prefills, its policy.

    Args:
        model: The draft, loaded, its KV cache allocated.
        knobs: The configuration.
        sample: The draft's sampler.
        counters: Told what is drafted.
        num_blocks: Of the KV pool.
        max_num_reqs: Persistent rows.
        max_model_len: The target's context length.
        cache: The draft's vision embeddings of what was shown lately.
        agreement: Of the tensor-parallel ranks, for prefills.
        shared: The target's own, by identifier, where it drafts for itself; else empty.
        fills_trees: See `TreeDrafter`.
    """

    def __init__(
        self,
        model: DraftModel,
        knobs: Knobs,
        sample: CoupledSampler,
        counters: Counters,
        num_blocks: int,
        max_num_reqs: int,
        max_model_len: int,
        cache: VisionCache,
        agreement: Agreement,
        shared: Mapping[str, torch.Tensor],
        fills_trees: bool = False,
    ):
        config = knobs.now
        self.model = model
        self.counters = counters
        self._max_model_len = max_model_len
        self._num_speculative_tokens = config.num_speculative_tokens
        max_slots = max_slots_per_request(max_model_len, config.num_speculative_tokens)
        tree_shapes = config.shapes - {"chain"}
        attention = caches = None
        if tree_shapes:
            attention = TreeAttention(attention_layers(model.config).values(), model.device)
            caches = attention.caches()
        self.kv = DraftKV(num_blocks, model.block_size, max_num_reqs, max_slots, model.device, caches)
        self.prefills = DraftPrefill(model, knobs, counters, self.kv, cache, shared, agreement)
        self.roots = RootFeeder(model, self.kv, max_num_reqs)
        self.chains = ChainDrafter(self.roots, sample)
        self.trees: TreeDrafter | None = None
        if attention is not None:
            policy = make_policy(next(iter(tree_shapes)), config, max_num_reqs, model.device)
            self.trees = TreeDrafter(self.roots, sample, policy, attention, fills_trees)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def admit(self, message: PrefillMessage) -> bool:
        """Take a request in; return whether it will be drafted for (else it is counted by reason)."""
        is_in = self.prefills.admit(message)
        if is_in and self.trees is not None:
            self.trees.policy.admit(np.array([message.req_state_idx]))
        return is_in

    def rest(self, idx_mapping_np: np.ndarray, num_tokens: np.ndarray) -> None:
        """Put `[n]` rows that were drafted for back in line; the draft has read `[n]` tokens of their text at least."""
        self.prefills.rest(idx_mapping_np, num_tokens)

    def prefill(self, step: PrefillStep) -> Prefilled:
        """Show the draft what fits into this step of the prompts that it has not seen whole."""
        start = time.perf_counter()
        done = self.prefills.step(step)
        self.counters.add("draft_prefill_us", int(1e6 * (time.perf_counter() - start)))
        return done

    # ---- draft -----------------------------------------------------------------------------------------------------

    @property
    def context_detail(self) -> str:
        """What to say of a request that the draft's context does not hold."""
        tokens, positions = self.model.max_model_len, self.model.num_positions
        return f"it is longer than the draft's context of {tokens} tokens and {positions} positions"

    def holds(self, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: the draft's context, which may be shorter than the target's, has room for the next step.

        What the target's context has no room for is never committed, so it is no reason.
        """
        longest = np.minimum(num_tokens_upper_bound + self._num_speculative_tokens, self._max_model_len)
        has_entries = longest - self.kv.num_dropped_np[idx_mapping_np] <= self.model.max_model_len
        return has_entries & (longest + self.kv.pos_delta_np[idx_mapping_np] <= self.model.num_positions)

    def reserve(self, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Make room for the next step, and send the step's tables; return `[n]` bool, False where the pool is full.

        Called once a step: what is staged travels through buffers that are as many as there are steps in flight.
        """
        num_slots = num_tokens_upper_bound - self.kv.num_dropped_np[idx_mapping_np] + self._num_speculative_tokens
        fits = self.kv.reserve(idx_mapping_np, num_slots)
        self.kv.apply()
        return fits

    def draft(self, message: DraftMessage) -> Drafts:
        """Propose drafts in the shape that the message names, for all its requests at once."""
        start = time.perf_counter()
        self.kv.gather_accepted(message)
        if message.shape == "chain":
            drafts, num_forwards = self.chains.draft(message)
        else:
            assert self.trees is not None
            drafts, num_forwards = self.trees.draft(message)
        self.counters.add("draft_steps")
        self.counters.add("draft_forwards", num_forwards)
        self.counters.add("draft_decode_us", int(1e6 * (time.perf_counter() - start)))
        return drafts

    # ---- the end ---------------------------------------------------------------------------------------------------

    def forget(self, req_state_idx: int) -> None:
        """Forget a row: finished, aborted, preempted or given up. Its blocks go back to the pool."""
        self.prefills.forget(req_state_idx)
        self.kv.forget(req_state_idx)
        self.counters.set("draft_pool_blocks_used", self.kv.num_used_blocks)

    def forget_media(self) -> None:
        """Drop the draft's vision embeddings: weights have changed, or the memory that holds them has."""
        self.prefills.cache.clear()
