"""SchedulerSide: what is decided beside vLLM's scheduler, once for all workers: how many tokens a step drafts, and who.

Every bound meets in `SchedulerSide.plan`: what is configured for the batch size, the operator's limit and shape, the
breaker's 0 after failures, and what pays (`policy.py`). vLLM's scheduler is given the number, workers the `Decision`
with its output, so that ranks agree without a collective; workers obey. And with `pruner: auto` each request is given
its pruner here.
"""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.config import AUTO, METHOD, Plan, VidSpecConfig
from vllm_vidspec.engine.auto_pruner import AutoPruner, set_prune_variant
from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.engine.knobs import LIMIT, SCHEDULER_KNOBS, SHAPE
from vllm_vidspec.engine.policy import NONE, Decision, Observed, Option, Policy, StepCosts, class_label
from vllm_vidspec.engine.step_times import Trial, measure
from vllm_vidspec.errors import VidSpecError, quoted
from vllm_vidspec.metrics.files import open_for
from vllm_vidspec.names import CLASS_LABELS
from vllm_vidspec.scoring.choices import prune_variant_of

logger = init_logger("vllm.vidspec")

_POLL_S = 0.2  # between two readings of the worker's counters
_TELL_S, _LOG_S = 1.0, 60.0  # between two publications of what is decided, and two lines about one class
_GREEDY = 1e-5  # a temperature below this is vLLM's argmax
# Within the first, `max_draft_failures` failures of the draft switch speculation off for the second.
FAILURE_WINDOW_S = COOLDOWN_S = 60.0


class SchedulerSide:
    """Our part beside one scheduler of vLLM's.

    Attributes:
        options: What the policy may choose from, `NONE` last; empty where the number of tokens is fixed.
        trial: While the engine starts and measures them.
    """

    def __init__(self, scheduler: Any, vllm_config: Any):
        from vllm.platforms import current_platform

        config = VidSpecConfig(**vllm_config.additional_config[METHOD])
        self._scheduler, self._config = scheduler, config
        self._file = open_for(vllm_config)
        self._pruners = AutoPruner(config, self._file) if len(config.variants) > 1 else None
        # Data-parallel engines need one number of tokens in every step.
        self._is_alone = vllm_config.parallel_config.data_parallel_size == 1
        has_graphs = not current_platform.is_cpu()
        self._pads = has_graphs and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        self.options: tuple[Option, ...] = ()
        if config.adaptive_tokens and self._is_alone:
            plans = config.choices(has_graphs)[: 1 if config.is_parallel else None]  # a window is as long as it is
            self.options = (*map(self._option, plans), NONE)
        self._policy: Policy | None = None
        self._fixed = functools.cache(lambda plan: Decision(self._option(plan)))  # where there is none
        self.trial: Trial | None = None
        self._requests: dict[str, Any] = {}  # vLLM's, which tell how long their answers are
        self._last: tuple[float, Decision | None] = (0.0, None)  # when the last output came, and its decision
        self._told_at, self._told = 0.0, dict[int, tuple[bool, int, float]]()  # by class: paused, tokens, logged at
        self._limit: int | None = None  # what an operator has set
        self._shape = config.draft_shape  # what he has chosen
        self._breaker = _Breaker(config, self._file) if self._is_alone and self._file is not None else None
        self._publish()

    def _option(self, plan: Plan) -> Option:
        """Return a plan as the policy knows it; with a drafter process of its own no draft forward runs here."""
        is_parallel = self._config.is_parallel
        levels = 0 if is_parallel else plan.depth(self._config)
        return Option(*plan, levels, plan.shape == "chain" and not is_parallel)

    def measure(self, core: Any) -> None:
        """Measure what the options' steps take on vLLM's engine core, which serves nobody yet; decide by that then."""
        if not self.options:
            return
        begin, self.trial = time.monotonic(), Trial(self.options[0])
        core.model_executor.collective_rpc(compat.UNCOUNTED, args=(True,))
        try:
            measured = measure(core, self.trial, self.options, self._config.is_parallel)
        finally:
            core.model_executor.collective_rpc(compat.UNCOUNTED, args=(False,))
            self.trial = None
        if measured is None:
            logger.warning("vidspec: no room to measure step times: every step drafts, whether it pays or not")
            return
        costs = StepCosts(len(self.options), measured)
        if self._file is not None:
            self._file.set("measured_sizes", len(costs.sizes))
        # Requests that are preempted keep their slot.
        self._policy = Policy(self.options, costs, 2 * self._scheduler.scheduler_config.max_num_seqs, self._pads)
        seconds = time.monotonic() - begin
        logger.info("vidspec: step times, measured in %.1f s: %s", seconds, costs.summary(self.options))

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """Take in a request before it is queued; it may be given a pruner, and has none of its own choice."""
        set_prune_variant(request)
        if self._pruners is not None and self.trial is None:
            self._pruners.collect(self._scheduler.requests)
            self._pruners.add(request)

    def admits(self, request: Any) -> bool:
        """Return whether a request that is scheduled for the first time, or again, is admitted to the draft."""
        if self._policy is None:
            return True
        num_visual = {"video": 0, "image": 0}
        num_kept = 0.0
        for feature in request.mm_features:
            modality = "image" if feature.modality == "image" else "video"
            size = feature.mm_position.length
            num_visual[modality] += size
            num_kept += size * (1 - self._config.ratio_for(modality))
        params, num_tokens = request.sampling_params, request.num_tokens
        label = class_label(num_visual["video"], num_visual["image"])
        is_sampled = params is not None and params.temperature > _GREEDY
        # A video that the target knows the draft most likely knows, too: then it costs little to read.
        is_cached = 2 * request.num_computed_tokens >= num_tokens
        kind = is_sampled, prune_variant_of(params), is_cached
        num_draft_tokens = num_tokens - sum(num_visual.values()) + int(num_kept)
        self._requests[request.request_id] = request
        admitted = self._policy.add(request.request_id, label, kind, num_tokens, num_draft_tokens, request.max_tokens)
        if self._file is not None:
            self._file.add(f"{'admitted' if admitted else 'unadmitted'}_{CLASS_LABELS[label]}")
        return admitted

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self, scheduler_output: Any) -> Decision:
        """Return what a step drafts: the least of all bounds, and whether that pays."""
        req_ids = scheduler_output.num_scheduled_tokens.keys()
        if self.trial is not None:
            return self.trial.decision
        plan = self._config.plan_for(len(req_ids))
        most = plan.num_tokens if self._most is None else min(plan.num_tokens, self._most)
        if self._policy is None:
            return self._fixed(Plan(plan.shape, most)) if most else Decision(NONE)
        for req_id in scheduler_output.finished_req_ids:
            request = self._requests.pop(req_id, None)
            ended = self._policy.remove(req_id, 0 if request is None else request.num_output_tokens)
            if ended is not None and self._file is not None:
                self._file.add(f"steps_{CLASS_LABELS[ended.label]}", ended.verify_steps)
                self._file.add(f"tokens_{CLASS_LABELS[ended.label]}", ended.verify_tokens)
        if not req_ids:
            return Decision(NONE)
        shapes = None if self._shape == self._config.draft_shape else frozenset({self._shape})
        return self._policy.decide(list(req_ids), most, shapes)

    def observe(self, scheduler_output: Any, output: Any) -> None:
        """Take in the output of a step."""
        now = time.monotonic()
        if self.trial is not None:
            self.trial.observe(output)
            return
        if self._file is not None and (carried := compat.attached_to(output).carried):
            self._file.take_in(carried)
        if self._pruners is not None:
            self._pruners.observe(scheduler_output, output)
        if self._policy is not None and output.req_ids:
            self._learn(now, scheduler_output, output)
            if now > self._told_at + _TELL_S:
                self._told_at = now
                self._tell(now)
        if self._breaker is not None and self._breaker.poll(now):
            self._publish()

    def _learn(self, now: float, scheduler_output: Any, output: Any) -> None:
        before, verified = self._last
        decision, req_ids = compat.decision_of(scheduler_output), output.req_ids
        assert decision is not None and self._policy is not None
        self._last = now, decision
        report, num_reqs = compat.report_of(output), len(req_ids)
        num_tokens = np.fromiter(map(len, output.sampled_token_ids), np.int64, num_reqs)
        is_drafted = np.fromiter(map(report.drafted.__contains__, req_ids), bool, num_reqs)
        num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        # A step of decoding alone schedules a token of each request, and the draft tokens.
        is_decode = scheduler_output.total_num_scheduled_tokens == num_reqs + num_drafts
        is_timed = verified is not None and is_decode and not scheduler_output.scheduled_new_reqs
        seconds = now - before if is_timed else None
        self._policy.observe(
            Observed(decision, verified, req_ids, num_tokens, is_drafted, seconds, report.reading, report.reading_s)
        )
        self._policy.cannot_draft(report.skipped)

    def _tell(self, now: float) -> None:
        """Publish what is decided by class; log a class whose decision has changed, each once a minute at most."""
        assert self._policy is not None
        if self._file is not None:
            self._file.set("tokens_in_use", self._policy.decision.option.num_tokens)
        for index, known in enumerate(self._policy.classes):
            name, best = CLASS_LABELS[known.label], known.best
            if best is None:
                continue
            num_tokens = 0 if known.is_paused else best.option.num_tokens
            was_paused, last_tokens, logged_at = self._told.get(index, (False, -1, -_LOG_S))
            if self._file is not None:
                if was_paused != known.is_paused:
                    self._file.add(f"{'pauses' if known.is_paused else 'resumes'}_{name}")
                for what, value in (
                    ("best_tokens", best.option.num_tokens),
                    ("best_length", round(1e3 * best.tokens)),
                    ("best_us", round(1e6 * best.seconds)),
                    ("none_us", round(1e6 * best.none_s)),
                ):
                    self._file.set(f"{what}_{name}", value)
            if (was_paused, last_tokens) != (known.is_paused, num_tokens) and now >= logged_at + _LOG_S:
                logger.info("vidspec: class %s is %s: %s", name, "paused" if known.is_paused else "drafted for", best)
                logged_at, last_tokens = now, num_tokens
            self._told[index] = known.is_paused, last_tokens, logged_at

    # ---- knobs -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def retuned(self, knobs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Apply the knobs that are changed here, from the next step on: `num_speculative_tokens`, the most draft tokens
        of a step, 0 for none, null for as many as was configured; and `draft_shape`, one that the engine can draft.

        Yields:
            The other knobs, for the workers; if they fail, nothing changes here.

        Raises:
            VidSpecError: The number is not in 0 to K, or this engine cannot change it or the shape.
        """
        left = {name: value for name, value in knobs.items() if name not in SCHEDULER_KNOBS}
        if LIMIT in knobs:
            self._check(knobs[LIMIT])
        if not self._is_alone and (fixed := [name for name in SCHEDULER_KNOBS if name in knobs]):
            raise VidSpecError(f"{fixed[0]} cannot change while data-parallel engines run")
        if SHAPE in knobs:
            self._config.of_shape(knobs[SHAPE])
        yield left
        self._shape = knobs.get(SHAPE, self._shape)
        if LIMIT in knobs:
            self._limit = knobs[LIMIT]
            self._publish()
        if self._pruners is not None and "pruner" in left:
            # With one fixed pruner nothing is chosen here, and nothing learned.
            self._pruners.is_on = left["pruner"] == AUTO

    def _check(self, most: Any) -> None:
        all_tokens = self._config.num_speculative_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= all_tokens):
            raise VidSpecError(
                f"num_speculative_tokens: between 0 and {all_tokens} while the engine runs, got {quoted(most)}"
            )

    @property
    def _most(self) -> int | None:
        """The most drafts of a step, by the operator or after failures; None for as many as was configured."""
        return 0 if self._breaker is not None and self._breaker.is_open else self._limit

    @property
    def in_force(self) -> dict[str, Any]:
        """`SCHEDULER_KNOBS` as they hold, and as configured; and whether drafts are asked for, or who forbids it."""
        is_cooling, all_tokens = self._most == 0 != self._limit, self._config.num_speculative_tokens
        return {
            "speculation": "cool-down" if is_cooling else "operator" if self._limit == 0 else "on",
            LIMIT: all_tokens if self._limit is None else self._limit,
            SHAPE: self._shape,
            "configured": {LIMIT: all_tokens, SHAPE: self._config.draft_shape},
        }

    def _publish(self) -> None:
        if self._file is not None:
            self._file.set("speculation_on", int(self._most != 0))
            self._file.set("cooling_down", int(self._most == 0 != self._limit))

    def close(self) -> None:
        """Save what was learned."""
        if self._pruners is not None:
            self._pruners.collect({})


class _Breaker:
    """Switches speculation off for a while after `max_draft_failures` failures of the draft within a window."""

    def __init__(self, config: VidSpecConfig, file: metrics.MetricsFile):
        self._file = file  # which counts the worker's failures
        self._most = config.max_draft_failures
        self.is_open = False  # whether speculation is off
        self._failures: deque[float] = deque()
        self._num_known = 0
        self._until = self._next_poll = 0.0

    def poll(self, now: float) -> bool:
        """Read the worker's count of failures; return whether `is_open` has changed."""
        if now < self._next_poll:
            return False
        self._next_poll = now + _POLL_S
        if self.is_open:
            if now < self._until:
                return False
            self.is_open, self._num_known = False, self._file.value("draft_failures")
            self._failures.clear()
            logger.info("vidspec: speculation is on again")
            return True
        count = self._file.value("draft_failures")
        self._failures.extend([now] * (count - self._num_known))
        self._num_known = count
        while self._failures and self._failures[0] < now - FAILURE_WINDOW_S:
            self._failures.popleft()
        if len(self._failures) < self._most:
            return False
        self.is_open, self._until = True, now + COOLDOWN_S
        self._file.add("cooldowns")
        logger.error(
            "vidspec: the draft has failed %d times within %g s: speculation is off for %g s",
            len(self._failures),
            FAILURE_WINDOW_S,
            COOLDOWN_S,
        )
        return True
