"""Patches of vLLM's scheduler in engines that use our method: a part of ours beside it, and what workers receive."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_vidspec.adapt import Decision
from vllm_vidspec.config import METHOD
from vllm_vidspec.engine.compat.contract import wrap

RETUNE = "vidspec_retune"  # the workers' method that changes knobs
# What travels with vLLM's own dataclasses: with a new request its salt and whether it is drafted for, with a step what
# is drafted (`Decision`), and with its output what was (`StepReport`).
_SALT, _IS_SHOWN, _DECISION, _REPORT = (
    "_vidspec_cache_salt",
    "_vidspec_is_shown",
    "_vidspec_decision",
    "_vidspec_report",
)


def hook_scheduler(attach: Callable) -> None:
    """Attach a part of ours to the scheduler of an engine that uses our method, and send workers more.

    Why: only the scheduler sees every step of every request on the host, and what it decides reaches all ranks with
    its output; vLLM's own extension point, `--scheduler-cls`, is left to the user. The scheduler strips the pixels of
    images and videos that the prefix cache covers, as the target needs no encoder run for them; the draft has a cache
    of its own and needs them, as in the second turn of a chat about a video. And the scheduler does not send workers
    the cache salt that separates tenants, by which our hooks separate what they keep of prompts.

    Args:
        attach: `(scheduler, VllmConfig)` -> what has `add(request)`, called before a new request is queued,
            `is_shown(request)` when it is first scheduled, `plan(scheduler_output)` before the scheduler goes on from
            a step's plan, which returns the `Decision` of what is drafted, `observe(scheduler_output, output)` after
            each step, `close()`, and `retuned(knobs)`, entered around the workers' change of what it yields.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    ours = False  # whether this process's engine, of which there is one at a time, uses our method
    side: Any = None  # what is attached to its scheduler

    def initialized(init, self, vllm_config, *args, **kwargs):
        nonlocal ours, side
        ours = METHOD in (vllm_config.additional_config or {})
        init(self, vllm_config, *args, **kwargs)
        side = self._vidspec_side = attach(self, vllm_config) if ours else None

    def keep_pixels(strip, mm_features, num_computed_tokens, uses_mrope=False):
        return mm_features if ours else strip(mm_features, num_computed_tokens, uses_mrope=uses_mrope)

    def made_request(make, request, *args, **kwargs):
        made = make(request, *args, **kwargs)
        if ours and request.cache_salt:
            setattr(made, _SALT, request.cache_salt)
        if side is not None and not side.is_shown(request):
            setattr(made, _IS_SHOWN, False)
        return made

    def planned(original, self, scheduler_output):
        decision = None if self._vidspec_side is None else self._vidspec_side.plan(scheduler_output)
        if decision is not None:
            scheduler_output.num_spec_tokens_to_schedule = decision.option.num_tokens
            setattr(scheduler_output, _DECISION, decision)
        original(self, scheduler_output)

    def trimmed(original, self, scheduler_output):
        original(self, scheduler_output)  # gives every request as many placeholders as the step's number
        decision = decision_of(scheduler_output)
        if decision is not None and not decision.pads:
            for req_id in decision.resting:
                self.requests[req_id].spec_token_ids = []

    def added(original, self, request):
        if self._vidspec_side is not None and request.request_id not in self.requests:
            self._vidspec_side.add(request)
        original(self, request)

    def updated(original, self, scheduler_output, model_runner_output):
        if self._vidspec_side is not None:
            self._vidspec_side.observe(scheduler_output, model_runner_output)
        return original(self, scheduler_output, model_runner_output)

    def closed(original, self):
        if self._vidspec_side is not None:
            self._vidspec_side.close()
        original(self)

    def called(original, self, method, timeout=None, args=(), kwargs=None):
        # While an engine core starts it has no scheduler yet.
        side = getattr(getattr(self, "scheduler", None), "_vidspec_side", None)
        if method != RETUNE or side is None or not args:
            return original(self, method, timeout, args, kwargs)
        with side.retuned(args[0]) as left:
            return original(self, method, timeout, (left, *args[1:]), kwargs)

    wrap(Scheduler, "__init__", initialized, "self", "vllm_config")
    wrap(output, "strip_covered_mm_data", keep_pixels, "mm_features", "num_computed_tokens", "uses_mrope")
    wrap(output.NewRequestData, "from_request", made_request, "request", "block_ids")
    wrap(Scheduler, "_update_after_schedule", planned, "self", "scheduler_output")
    wrap(AsyncScheduler, "_update_after_schedule", trimmed, "self", "scheduler_output")
    wrap(Scheduler, "add_request", added, "self", "request")
    wrap(Scheduler, "update_from_output", updated, "self", "scheduler_output", "model_runner_output")
    wrap(Scheduler, "shutdown", closed, "self")
    wrap(EngineCore, "collective_rpc", called, "self", "method", "timeout", "args", "kwargs")


def salt_of(request: Any) -> str:
    """Return the `cache_salt` of vLLM's `NewRequestData`, "" for none."""
    return getattr(request, _SALT, "")


def is_shown(request: Any) -> bool:
    """Return whether the request of vLLM's `NewRequestData` is to be shown to the draft."""
    return getattr(request, _IS_SHOWN, True)


def decision_of(scheduler_output: Any) -> Decision | None:
    """Return what a step of vLLM's `SchedulerOutput` drafts; None where that is a matter of its batch size."""
    return getattr(scheduler_output, _DECISION, None)


def attach_report(output: Any, report: "StepReport") -> None:
    """Attach a report to vLLM's `ModelRunnerOutput`."""
    setattr(output, _REPORT, report)


def report_of(output: Any) -> "StepReport":
    """Return the report of vLLM's `ModelRunnerOutput`; an empty one where it has none."""
    return getattr(output, _REPORT, _NO_REPORT)


class StepReport(NamedTuple):
    """What the worker reports of a step to the scheduler.

    Attributes:
        drafted: Requests whose drafts were verified in it; vLLM's placeholders do not count.
        reading: Requests of whose prompts the draft has prefilled a part in it.
        reading_s: Host time of that.
        skipped: Requests that run without speculation for good, reported once.
    """

    drafted: frozenset[str]
    reading: frozenset[str]
    reading_s: float
    skipped: tuple[str, ...]


_NO_REPORT = StepReport(frozenset(), frozenset(), 0.0, ())
