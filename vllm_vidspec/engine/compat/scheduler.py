"""Patches of vLLM's scheduler in engines that use our method: a part of ours beside it, and what workers receive."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_vidspec.config import METHOD, REQUEST_RECORD
from vllm_vidspec.engine.compat.contract import wrap
from vllm_vidspec.engine.policy import Decision
from vllm_vidspec.metrics.counts import Changes

# The workers' methods that return and change knobs, and that start and end what is not counted.
KNOBS, RETUNE, UNCOUNTED = "vidspec_knobs", "vidspec_retune", "vidspec_uncounted"
# A new request carries its salt and whether the draft reads it, a step its `Decision`, a step's output `Attached`.
_SALT, _ADMITTED, _DECISION, _ATTACHED = (f"_vidspec_{it}" for it in ("cache_salt", "admitted", "decision", "attached"))


class StepReport(NamedTuple):
    """What the worker reports of a step to the scheduler."""

    drafted: frozenset[str] = frozenset()  # Requests whose drafts were verified in it; no vLLM's placeholders
    reading: frozenset[str] = frozenset()  # Those of which the draft has prefilled a part in it, after a pause, too
    reading_s: float = 0.0  # Host time of that
    skipped: tuple[str, ...] = ()  # Requests that run without speculation for good, reported once


class Attached(NamedTuple):
    """What a step's output brings along."""

    report: StepReport = StepReport()
    carried: Changes | None = None  # what was counted on another host
    records: dict[str, dict[str, Any]] | None = None  # by request id, of requests whose responses say something


_NOTHING = Attached()


def hook_scheduler(attach: Callable) -> None:
    """Attach a part of ours to the scheduler of an engine that uses our method, and send workers more.

    Why: only the scheduler sees every step of every request on the host, and what it decides reaches all ranks with
    its output; vLLM's own extension point, `--scheduler-cls`, is left to the user. The scheduler strips the pixels of
    media that the prefix cache covers; the draft has a cache of its own and needs them, as in the second turn of a chat
    about a video. And workers do not get the cache salt, by which our hooks keep tenants' prompts apart.
    Until: vLLM lets plugins stand beside its scheduler, and send data of their own with its output.

    `attach`, of the scheduler and the VllmConfig, returns what has `add(request)`, called before a new request is
    queued, `admits(request)` when it is first scheduled, `plan(scheduler_output)` before the scheduler goes on from a
    step's plan, which returns the `Decision` of what is drafted, `observe(scheduler_output, output)` after each step,
    `close()`, `retuned(knobs)`, entered around the workers' change of what it yields, `in_force`, its own knobs, and
    `measure(core)`, called once the engine core stands.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    patches = _Patches(attach)
    wrap(Scheduler, "__init__", patches.init, "self", "vllm_config")
    wrap(output, "strip_covered_mm_data", patches.strip, "mm_features", "num_computed_tokens", "uses_mrope")
    wrap(output.NewRequestData, "from_request", patches.from_request, "request", "block_ids")
    wrap(Scheduler, "_update_after_schedule", patches.update_after_schedule, "self", "scheduler_output")
    wrap(AsyncScheduler, "_update_after_schedule", patches.take_placeholders, "self", "scheduler_output")
    wrap(Scheduler, "add_request", patches.add_request, "self", "request")
    wrap(Scheduler, "update_from_output", patches.update, "self", "scheduler_output", "model_runner_output")
    wrap(Scheduler, "shutdown", patches.shutdown, "self")
    wrap(EngineCore, "__init__", patches.init_core, "self", "vllm_config", "executor_class", "log_stats")
    wrap(EngineCore, "collective_rpc", patches.collective_rpc, "self", "method", "timeout", "args", "kwargs")


class _Patches:
    """What runs around vLLM's functions, each of which comes first among the arguments."""

    def __init__(self, attach: Callable):
        self._attach, self.side = attach, None  # what is attached to the scheduler
        self.ours = False  # whether this process's engine, of which there is one at a time, uses our method

    def init(self, original, scheduler, vllm_config, *args, **kwargs):
        self.ours = METHOD in (vllm_config.additional_config or {})
        original(scheduler, vllm_config, *args, **kwargs)
        self.side = scheduler._vidspec_side = self._attach(scheduler, vllm_config) if self.ours else None

    def strip(self, original, mm_features, num_computed_tokens, uses_mrope=False):
        return mm_features if self.ours else original(mm_features, num_computed_tokens, uses_mrope=uses_mrope)

    def from_request(self, original, request, *args, **kwargs):
        made = original(request, *args, **kwargs)
        if self.ours and request.cache_salt:
            setattr(made, _SALT, request.cache_salt)
        if self.side is not None and not self.side.admits(request):
            setattr(made, _ADMITTED, False)
        return made

    @staticmethod
    def update_after_schedule(original, scheduler, scheduler_output):
        if scheduler._vidspec_side is not None:
            decision = scheduler._vidspec_side.plan(scheduler_output)
            scheduler_output.num_spec_tokens_to_schedule = decision.option.num_tokens
            setattr(scheduler_output, _DECISION, decision)
        original(scheduler, scheduler_output)

    @staticmethod
    def take_placeholders(original, scheduler, scheduler_output):
        original(scheduler, scheduler_output)  # gives every request as many placeholders as the step's number
        decision = decision_of(scheduler_output)
        if decision is not None and not decision.pads:
            for req_id in decision.paused:
                scheduler.requests[req_id].spec_token_ids = []

    @staticmethod
    def add_request(original, scheduler, request):
        if scheduler._vidspec_side is not None and request.request_id not in scheduler.requests:
            scheduler._vidspec_side.add(request)
        original(scheduler, request)

    @staticmethod
    def update(original, scheduler, scheduler_output, model_runner_output):
        if scheduler._vidspec_side is not None:
            scheduler._vidspec_side.observe(scheduler_output, model_runner_output)
        outputs = original(scheduler, scheduler_output, model_runner_output)
        if records := attached_to(model_runner_output).records:
            _hand_over(records, outputs)
        return outputs

    def init_core(self, original, core, *args, **kwargs):
        original(core, *args, **kwargs)
        if self.side is not None:
            self.side.measure(core)

    @staticmethod
    def shutdown(original, scheduler):
        if scheduler._vidspec_side is not None:
            scheduler._vidspec_side.close()
        original(scheduler)

    @staticmethod
    def collective_rpc(original, core, method, timeout=None, args=(), kwargs=None):
        # While an engine core starts it has no scheduler yet.
        side = getattr(getattr(core, "scheduler", None), "_vidspec_side", None)
        if method == KNOBS and side is not None:
            return [{**knobs, **side.in_force} for knobs in original(core, method, timeout, args, kwargs)]
        if method != RETUNE or side is None or not args:
            return original(core, method, timeout, args, kwargs)
        with side.retuned(args[0]) as left:
            return original(core, method, timeout, (left, *args[1:]), kwargs)


def salt_of(request: Any) -> str:
    """Return the `cache_salt` of vLLM's `NewRequestData`, "" for none."""
    return getattr(request, _SALT, "")


def is_admitted(request: Any) -> bool:
    """Return whether the draft is to read the request of vLLM's `NewRequestData`."""
    return getattr(request, _ADMITTED, True)


def decision_of(scheduler_output: Any) -> Decision | None:
    """Return what a step of vLLM's `SchedulerOutput` drafts; None while vLLM warms up."""
    return getattr(scheduler_output, _DECISION, None)


def attach(output: Any, what: Attached) -> None:
    """Attach to vLLM's `ModelRunnerOutput` what a worker has to say of a step."""
    setattr(output, _ATTACHED, what)


def attached_to(output: Any) -> Attached:
    """Return what came with vLLM's `ModelRunnerOutput`."""
    return getattr(output, _ATTACHED, _NOTHING)


def report_of(output: Any) -> StepReport:
    """Return the report of vLLM's `ModelRunnerOutput`; an empty one where it has none."""
    return attached_to(output).report


def _hand_over(records: dict[str, dict[str, Any]], outputs: Any) -> None:
    """Put each request's record beside its own new tokens, where `api._hear_steps` takes it out."""
    for client in outputs.values():
        for output in client.outputs:
            if (record := records.get(output.request_id)) is not None and output.new_token_ids:
                record["tokens"] = list(output.new_token_ids)
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), REQUEST_RECORD: record}


def step(core: Any) -> None:
    """Let an engine core do a step, as its own loop does, and drop what it puts out."""
    _, is_executed = core.step_fn()
    core.post_step(is_executed)


def add_own_requests(core: Any, num_reqs: int, num_tokens: int) -> list[str]:
    """Add requests of one token, repeated, to an engine core that serves no client yet; return their ids."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    model = core.vllm_config.model_config
    reserved = _token_ids(model.hf_config.to_dict())
    token = next(token for token in range(model.get_vocab_size() // 2, model.get_vocab_size()) if token not in reserved)
    params = SamplingParams(temperature=0.0, max_tokens=model.max_model_len - num_tokens, ignore_eos=True)
    ids = [f"vidspec-step-times-{number}" for number in range(num_reqs)]
    for req_id in ids:
        hasher = core.request_block_hasher
        core.add_request(Request(req_id, [token] * num_tokens, params, None, block_hasher=hasher))
    return ids


def end_own_requests(core: Any, req_ids: list[str]) -> None:
    """End these requests, and leave nothing of them behind."""
    core.abort_requests([req_id for req_id in req_ids if req_id in core.scheduler.requests])
    while core.scheduler.has_requests() or core.batch_queue:
        step(core)
    core.scheduler.reset_prefix_cache()


def _token_ids(config: Any) -> set[int]:
    """Return every number in a model's configuration that is one of a token."""
    if not isinstance(config, dict):
        return set()
    found = {value for name, value in config.items() if "token" in str(name) and isinstance(value, int)}
    return found.union(*map(_token_ids, config.values()))
