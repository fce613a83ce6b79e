"""The drafter: prefills pruned prompts and proposes drafts; it takes messages and never sees the model runner.

Its state per request is a block table and three integers, because a KV entry's place follows from the committed length:
logical token t of a request (t past the pruned prompt) is entry t - num_dropped. A message's committed length is
therefore also the rollback: entries past it are stale, and the next forward overwrites them.
"""

import time
from collections.abc import Mapping

import numpy as np
import torch

from vidspec_kernels import CacheList, kv_compact
from vidspec_kernels.dispatch import as_array
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.drafting.factory import make_policy
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.chains import ChainDrafter, RootFeeder
from vllm_vidspec.engine.draft.draft_rows import DraftRows
from vllm_vidspec.engine.draft.kv import DraftKVPool
from vllm_vidspec.engine.draft.messages import DraftMessage, Drafts, Prefilled, PrefillMessage, PrefillStep
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.trees import TreeDrafter
from vllm_vidspec.engine.draft.vision_cache import VisionCache
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.tree_attention import TreeAttention


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
        max_model_len: The target's context length.
        cache: The draft's vision embeddings of what was shown lately.
        agreement: Of the tensor-parallel ranks, for prefills.
        shared: The target's own, by identifier, where it drafts for itself; else empty.
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
        cache: VisionCache,
        agreement: Agreement,
        shared: Mapping[str, torch.Tensor],
        fills_trees: bool = False,
    ):
        self.model = model
        self.counters = counters
        self._max_model_len = max_model_len
        self._num_speculative_tokens = config.num_speculative_tokens
        max_slots = max_slots_per_request(max_model_len, config.num_speculative_tokens)
        self.pool = DraftKVPool(num_blocks, model.block_size, max_num_reqs, max_slots, model.device)
        self.rows = DraftRows(max_num_reqs, model.device)
        self.prefills = DraftPrefill(model, config, counters, self.pool, self.rows, cache, shared, agreement)
        roots = RootFeeder(model, self.pool, self.rows, max_num_reqs)
        self._chains = ChainDrafter(roots, sample)
        self._trees: TreeDrafter | None = None
        if tree_shapes := config.shapes - {"chain"}:
            attention = TreeAttention(attention_layers(model.config).values())
            self._caches: CacheList = attention.caches()
            policy = make_policy(next(iter(tree_shapes)), config, max_num_reqs, model.device)
            self._trees = TreeDrafter(roots, sample, policy, attention, fills_trees)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def admit(self, message: PrefillMessage) -> bool:
        """Take a request in; return whether it will be drafted for (else it is counted by reason)."""
        return self.prefills.admit(message)

    def prefill(self, step: PrefillStep) -> Prefilled:
        """Show the draft what fits into this step of the prompts that it has not seen whole."""
        start = time.perf_counter()
        done = self.prefills.step(step)
        if self._trees is not None and done.ready:
            self._trees.policy.admit(np.array(done.ready))
        self.counters.add("draft_prefill_us", int(1e6 * (time.perf_counter() - start)))
        return done

    # ---- draft -----------------------------------------------------------------------------------------------------

    @property
    def context_detail(self) -> str:
        """What to say of a request that the draft's context does not hold."""
        tokens, positions = self.model.max_model_len, self.model.num_positions
        return f"it is longer than the draft's context of {tokens} tokens and {positions} positions"

    def holds(self, rows_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: the draft's context, which may be shorter than the target's, has room for the next step.

        What the target's context has no room for is never committed, so it is no reason.
        """
        longest = np.minimum(num_tokens_upper_bound + self._num_speculative_tokens, self._max_model_len)
        has_entries = longest - self.rows.num_dropped_np[rows_np] <= self.model.max_model_len
        return has_entries & (longest + self.rows.pos_delta_np[rows_np] <= self.model.num_positions)

    def grow(self, rows_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Make room for the next step, and send the step's tables; return `[n]` bool, False where the pool is full.

        Called once a step: what is staged travels through buffers that are as many as there are steps in flight.
        """
        num_slots = num_tokens_upper_bound - self.rows.num_dropped_np[rows_np] + self._num_speculative_tokens
        fits = self.pool.reserve(rows_np, num_slots)
        self.pool.apply()
        self.rows.apply()
        return fits

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
        self.prefills.release(row)
        self.pool.release(row)
        self.rows.forget(row)
        self.counters.set("draft_pool_blocks_used", self.pool.num_used_blocks)
