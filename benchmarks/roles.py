"""One engine in the roles of several, so that what they differ by is no engine's luck: two that do the same differ by
some per cent.

Vanilla is the engine without what of ours runs in a step: hooks of the scheduler and of the model runner; a fixed
chain is the engine without its policy. Of a request's begin and end ours runs in every role.
"""

from typing import Any

from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.tools.bench.speed import VANILLA

# What runs in every step.
OF_VLLM = ("_update_after_schedule", "update_from_output")
OF_RUNNER = ("prepare_inputs", "execute_model", "sample", "sample_tokens", "take_draft_token_ids")


class Roles:
    """The roles of an engine in this process that has a policy, which it plays first.

    Args:
        llm: vLLM's.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        from vllm_vidspec.engine.runner import VidSpecModelRunner

        self._engine, self._core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._scheduler = self._core.scheduler
        self._side = self._scheduler._vidspec_side
        self._policy = self._side._policy
        self._spec = self._runner.speculator, self._runner.num_speculative_steps
        # How many places for drafts an asynchronous scheduler gives every request, by batch size where it has a table.
        scheduler = self._scheduler
        self._places = scheduler.num_spec_tokens, scheduler.num_lookahead_tokens, scheduler.dynamic_sd_lookup
        patched = [(owner, name) for owner in (Scheduler, AsyncScheduler) for name in OF_VLLM]
        patched = [(owner, name) for owner, name in patched if hasattr(vars(owner).get(name), MARK)]
        # Whose each is, what it is called, ours and vLLM's.
        self.methods = [(owner, name, vars(owner)[name], getattr(vars(owner)[name], MARK)) for owner, name in patched]
        for name in OF_RUNNER:
            ours, its = vars(VidSpecModelRunner)[name], getattr(GPUModelRunner, name)
            self.methods.append((VidSpecModelRunner, name, ours, its))

    def play(self, role: str | int) -> None:
        """Be vanilla, the policy, or a fixed chain of so many draft tokens; no request may run that has drafts."""
        # Who has answered is told of the requests' ends, and an asynchronous scheduler's last step is over.
        while self._scheduler.has_finished_requests() or self._core.batch_queue:
            self._engine.step()
        is_vanilla = role == VANILLA
        for owner, name, ours, its in self.methods:
            setattr(owner, name, its if is_vanilla else ours)
        self._runner.speculator, self._runner.num_speculative_steps = (None, 0) if is_vanilla else self._spec
        scheduler, places = self._scheduler, (0, 0, None) if is_vanilla else self._places
        scheduler.num_spec_tokens, scheduler.num_lookahead_tokens, scheduler.dynamic_sd_lookup = places
        self._core.check_for_draft_tokens = not is_vanilla
        self._side._limit = role if isinstance(role, int) else None  # of an engine without a policy, what it drafts
        self._side._policy = self._policy if role not in (VANILLA, self._side._limit) else None
