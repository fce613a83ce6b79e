"""DraftBackend: where the draft runs, in the target's process or in one of its own; and the Step that it gets."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_vidspec.config import Plan
from vllm_vidspec.engine.policy import Decision
from vllm_vidspec.engine.requests import DraftBatch, Request, RowTable


class Step(NamedTuple):
    """A step that the target has committed, as the draft's side sees it."""

    batch: Any  # vLLM's `InputBatch`
    is_done: np.ndarray  # [num_reqs] bool: the target's prefill is complete, so that this step sampled a token
    bound: np.ndarray  # [num_reqs] int64 host bound of the committed lengths, the target's last token included
    num_sampled: torch.Tensor  # [num_reqs] int32 accepted drafts and the target's own token
    plan: Plan  # what to draft
    paused: np.ndarray | None = None  # [num_reqs] bool: requests without drafts in this step; None: there are none
    is_undrafted: bool = False  # whether it was decided that this step drafts nothing

    def active(self, found: np.ndarray) -> np.ndarray:
        """Return `[num_reqs]` bool: those of `[num_reqs]` bool that are not paused."""
        return found if self.paused is None else found & ~self.paused

    @classmethod
    def of(
        cls,
        batch: Any,
        num_sampled: torch.Tensor,
        plan: Plan,
        decision: Decision | None = None,
        most: int | None = None,
    ) -> "Step":
        """Read a step from vLLM's batch, without a wait for the device; vLLM has room for `most` drafts."""
        paused, is_undrafted = None, not plan.num_tokens
        if decision is not None:
            is_undrafted |= not decision.option.num_tokens
            plan = Plan(decision.option.shape, decision.option.num_tokens)
            if decision.paused:
                found = map(decision.paused.__contains__, batch.req_ids)
                paused = np.fromiter(found, dtype=bool, count=batch.num_reqs)
        # From the same plans, but for vLLM's warm-up, and 0 where no request of the step can use drafts (from 0.33 on).
        if most is not None:
            plan = plan._replace(num_tokens=min(plan.num_tokens, most))
        computed = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        if batch.num_draft_tokens_per_req is not None:
            computed = computed - batch.num_draft_tokens_per_req
        # The last draft of this step may commit K more tokens and the target one.
        bound = np.add(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs], 1, dtype=np.int64)
        return cls(batch, computed >= batch.prefill_len_np, bound, num_sampled, plan, paused, is_undrafted)


class Reading(NamedTuple):
    """The prompts that the draft has read on in a step."""

    req_ids: frozenset[str] = frozenset()
    seconds: float = 0.0  # of the host


class DraftBackend(RowTable):
    """What a step asks for; `add` and `remove` begin and end what it keeps of a row's request."""

    reads_while_paused = False  # whether prompts are read while nothing is drafted, as it costs the target nothing

    @property
    def model(self) -> torch.nn.Module | None:
        """The draft network of this process, for vLLM's shutdown and weight updates; None if there is none."""
        return None

    # ---- set-up, in vLLM's order -----------------------------------------------------------------------------------

    def reserve(self, available_bytes: int) -> int:
        """Return how many bytes of a rank's KV memory the draft takes; a VidSpecError for too many, or too few."""
        return 0

    def make_graphs(self, cudagraph_mode: Any) -> Any:
        """Return the manager of the draft's CUDA graphs in the mode that vLLM has resolved; None if there is none."""
        return None

    def widen_kv(self, kv_cache_config: Any) -> Any:
        """Return vLLM's `KVCacheConfig` of the target's cache with the blocks of it that are the draft's."""
        return kv_cache_config

    def init_kv(
        self, block_tables: Any, allocation: Callable[[], AbstractContextManager], is_profiling: bool = False
    ) -> None:
        """Allocate what was reserved, inside `allocation()`, and be ready; a VidSpecError if it cannot draft. While it
        is profiling, nothing is reserved yet: allocate the least with which graphs can be captured. `block_tables` are
        those of the target's cache.
        """

    def capture(self) -> None:
        """Capture the parts of a draft step."""

    def dummy_run(self, num_reqs: int, is_profile: bool) -> torch.Tensor:
        """Return `[num_reqs, K]` zeros for a step of vLLM's warm-up; where it profiles memory, run at the largest."""
        raise NotImplementedError

    # ---- requests --------------------------------------------------------------------------------------------------

    def give_up_all(self) -> None:
        """Give up every running request, because the memory of the draft's KV is about to be lost."""

    def forget_media(self) -> None:
        """Drop the draft's vision embeddings: weights have changed, or the memory that holds them has."""

    # ---- a step, in order ------------------------------------------------------------------------------------------

    def roll_back(self, step: Step) -> None:
        """Take the drafts of rows that get none in this step back to the committed text."""

    def refusal(self, request: Request) -> tuple[str, str] | None:
        """Return why a request is not drafted for, and a line for the log ("" for none); None if it is."""
        return None

    def start(self, step: Step, rows: np.ndarray, requests: list[Request]) -> None:
        """Queue requests for their draft prefill, and of the `[n]` rows that may start those that wait for blocks."""

    def prefill(self, step: Step) -> Reading:
        """Reserve what the step needs, and read a bounded piece of the prompts in the queue; return whose."""
        raise NotImplementedError

    def propose(self, step: Step, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `[num_reqs, K]` int64 drafts, else zeros, and `[num_drafted]` how many of each count; None: all."""
        raise NotImplementedError
