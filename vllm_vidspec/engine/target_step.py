"""Step: what the draft's side is told of a step of the target's."""

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_vidspec.adapt import Decision
from vllm_vidspec.config import Plan


class Step(NamedTuple):
    """A step that the target has committed, as the draft's side sees it."""

    batch: Any  # vLLM's `InputBatch`
    is_done: np.ndarray  # [num_reqs] bool: the target's prefill is complete, so that this step sampled a token
    bound: np.ndarray  # [num_reqs] int64 host bound of the committed lengths, the target's last token included
    num_sampled: torch.Tensor  # [num_reqs] int32 accepted drafts and the target's own token
    plan: Plan  # what to draft
    # [num_reqs] bool: requests that get no drafts in this step, though others may; None: there are none
    rests: np.ndarray | None = None
    is_undrafted: bool = False  # whether somebody has decided that drafts do not pay in this step

    def active(self, found: np.ndarray) -> np.ndarray:
        """Return `[num_reqs]` bool: those of `[num_reqs]` bool that do not rest."""
        return found if self.rests is None else found & ~self.rests

    @classmethod
    def of(
        cls,
        batch: Any,
        num_sampled: torch.Tensor,
        plan: Plan,
        decision: Decision | None = None,
        most: int | None = None,
    ) -> "Step":
        """Read a step from vLLM's batch, a decision made beside the scheduler, and the `most` drafts that vLLM has room
        for; nothing here waits for the device.
        """
        rests, is_undrafted = None, not plan.num_tokens
        if decision is not None:
            is_undrafted |= not decision.option.num_tokens
            plan = Plan(decision.option.shape, decision.option.num_tokens)
            if decision.resting:
                found = map(decision.resting.__contains__, batch.req_ids)
                rests = np.fromiter(found, dtype=bool, count=batch.num_reqs)
        # The same number, from the same plans, but for vLLM's warm-up, and 0 where it knows that no request of the step
        # can use drafts (from 0.33 on).
        if most is not None:
            plan = plan._replace(num_tokens=min(plan.num_tokens, most))
        computed = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        if batch.num_draft_tokens_per_req is not None:
            computed = computed - batch.num_draft_tokens_per_req
        # The last draft of this step may commit K more tokens and the target one.
        bound = np.add(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs], 1, dtype=np.int64)
        return cls(batch, computed >= batch.prefill_len_np, bound, num_sampled, plan, rests, is_undrafted)
