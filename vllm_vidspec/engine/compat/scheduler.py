"""Patches of the scheduler, in engines that use our method: what sits on it, and what it tells the workers."""

from collections.abc import Callable
from typing import Any

from vllm_vidspec.config import METHOD
from vllm_vidspec.engine.compat.contract import wrap

RETUNE = "vidspec_retune"  # the workers' method that changes knobs
_SALT = "_vidspec_cache_salt"


def hook_scheduler(attach: Callable) -> None:
    """Let something of ours sit on the scheduler of an engine that uses our method, and tell workers more.

    Why: the scheduler alone sees every step of every request on the host, exactly, and what it decides reaches all
    ranks with its output; vLLM's own way in, `--scheduler-cls`, is the user's. Of images and videos that the prefix
    cache covers it strips the pixels, as the target needs no encoder run for them: the draft has a cache of its own,
    which knows nothing of the target's, and needs to see them, in the second turn of every chat about a video. And it
    keeps the salt to itself that keeps tenants apart in the prefix cache; our listeners, in the workers, remember
    things of prompts too.

    Args:
        attach: `(scheduler, VllmConfig)` -> what has `add(request)`, called before a new request is queued,
            `hear(scheduler_output, output)` after each step, `close()`, and `retuned(knobs)`, entered around the
            workers' change of what it yields.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    ours = False  # whether this process's engine, of which there is one at a time, uses our method

    def noting(init, self, vllm_config, *args, **kwargs):
        nonlocal ours
        ours = METHOD in (vllm_config.additional_config or {})
        init(self, vllm_config, *args, **kwargs)
        self._vidspec_side = attach(self, vllm_config) if ours else None

    def unless_ours(strip, mm_features, num_computed_tokens, uses_mrope=False):
        return mm_features if ours else strip(mm_features, num_computed_tokens, uses_mrope=uses_mrope)

    def salted(make, request, *args, **kwargs):
        made = make(request, *args, **kwargs)
        if ours and request.cache_salt:
            setattr(made, _SALT, request.cache_salt)  # travels with the dataclass's own fields
        return made

    def added(original, self, request):
        if self._vidspec_side is not None and request.request_id not in self.requests:
            self._vidspec_side.add(request)
        original(self, request)

    def heard(original, self, scheduler_output, model_runner_output):
        if self._vidspec_side is not None:
            self._vidspec_side.hear(scheduler_output, model_runner_output)
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

    wrap(Scheduler, "__init__", noting, "self", "vllm_config")
    wrap(output, "strip_covered_mm_data", unless_ours, "mm_features", "num_computed_tokens", "uses_mrope")
    wrap(output.NewRequestData, "from_request", salted, "request", "block_ids")
    wrap(Scheduler, "add_request", added, "self", "request")
    wrap(Scheduler, "update_from_output", heard, "self", "scheduler_output", "model_runner_output")
    wrap(Scheduler, "shutdown", closed, "self")
    wrap(EngineCore, "collective_rpc", called, "self", "method", "timeout", "args", "kwargs")


def salt_of(request: Any) -> str:
    """Return the `cache_salt` of vLLM's `NewRequestData`, "" for none."""
    return getattr(request, _SALT, "")
