"""SchedulerControl: the controller (`adapt/control.py`) on vLLM's scheduler: how many tokens each step drafts."""

import time
from itertools import repeat
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.adapt import REST, Controller, Decision, Option, StepKind, class_label
from vllm_vidspec.config import Plan, VidSpecConfig
from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.names import CLASS_LABELS

logger = init_logger("vllm.vidspec")

_LOG_EVERY_S = 60.0  # between two lines about a class: one that gains next to nothing comes and goes
_SHORT = 16  # tokens: answers that may not have more, as about a choice of several, are of a class of their own
_GREEDY = 1e-5  # a temperature below this is vLLM's argmax


class SchedulerControl:
    """Decides what every step of one scheduler drafts.

    Args:
        config: Ours.
        scheduler: vLLM's.
        vllm_config: vLLM's.
        file: The engine's counters, or None.
    """

    def __init__(self, config: VidSpecConfig, scheduler: Any, vllm_config: Any, file: metrics.MetricsFile | None):
        from vllm.platforms import current_platform

        self._config, self._scheduler, self._file = config, scheduler, file
        has_graphs = not current_platform.is_cpu()
        plans = config.choices(has_graphs)
        if config.is_parallel:  # a window is as long as it is
            plans = plans[:1]
        options = (*(self._option(plan) for plan in plans), REST)
        pads = has_graphs and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        # Requests that are preempted keep their slot.
        self._controller = Controller(options, 2 * scheduler.scheduler_config.max_num_seqs, pads)
        self._requests: dict[str, Any] = {}  # vLLM's, which tell how long their answers are
        # By place in `Controller.classes`: what was counted last, and what was logged, and when.
        self._is_resting: dict[int, bool] = {}
        self._logged: dict[int, tuple[bool, float]] = {}
        self._decision: Decision | None = None  # the last
        self._num_reqs = 0  # for how many
        # When the last step's output came, or was looked at where nothing is drafted; and by what decision it came.
        self._last: tuple[float, Decision | None] = (0.0, None)
        # Of the last step: by what steps alike are known, what the controller is told of them, whether they are timed.
        self._alike: tuple[tuple, Any, bool] = ((), None, False)
        self._num_unseen = self._may_pass = 0  # steps since one was looked at, and that may yet pass so
        self._passed_at = 0.0  # when the last of those came

    def _option(self, plan: Plan) -> Option:
        """Return a plan as the controller knows it; with a drafter process of its own no draft forward runs here."""
        is_parallel = self._config.is_parallel
        return Option(
            *plan, 0 if is_parallel else self._config.depth_of(plan), plan.shape == "chain" and not is_parallel
        )

    # ---- requests --------------------------------------------------------------------------------------------------

    def is_shown(self, request: Any, way: int) -> bool:
        """Return whether a request that is scheduled for the first time, or again, is shown to the draft.

        Args:
            request: vLLM's.
            way: By which of `PruneKnobs.variants` it is pruned.
        """
        num_visual = {"video": 0, "image": 0}
        num_kept = 0.0
        for feature in request.mm_features:
            modality = "image" if feature.modality == "image" else "video"
            size = feature.mm_position.length
            num_visual[modality] += size
            num_kept += size * (1 - self._config.ratio_for(modality))
        total, params = sum(num_visual.values()), request.sampling_params
        label, num_tokens = class_label(num_visual["video"], num_visual["image"]), request.num_tokens
        is_sampled = params is not None and params.temperature > _GREEDY
        # A video that the target knows the draft most likely knows, too: then showing it costs little.
        is_cached = 2 * request.num_computed_tokens >= num_tokens
        kind = is_sampled, way, is_cached, request.max_tokens <= _SHORT
        self._requests[request.request_id] = request
        running = (one.request_id for one in self._scheduler.running)
        num_draft_tokens = num_tokens - total + int(num_kept)
        shown = self._controller.add(
            request.request_id, label, kind, num_tokens, num_draft_tokens, request.max_tokens, running
        )
        self._log_classes()
        if self._file is not None:
            self._file.add(f"{'shown' if shown else 'unshown'}_{CLASS_LABELS[label]}")
        return shown

    def _log_classes(self) -> None:
        """Count the classes that have come to rest, or resumed; log them, each once a minute at most."""
        for index, known in enumerate(self._controller.classes):
            name = CLASS_LABELS[known.label]
            if self._is_resting.get(index, False) != known.rests:
                self._is_resting[index] = known.rests
                if self._file is not None:
                    self._file.add(f"{'rests' if known.rests else 'resumes'}_{name}")
            was_resting, logged_at = self._logged.get(index, (False, -_LOG_EVERY_S))
            if was_resting == known.rests or (now := time.monotonic()) < logged_at + _LOG_EVERY_S:
                continue
            self._logged[index] = known.rests, now
            length = self._controller.forecast.longest_of_class(index)
            if known.rests:
                logger.info(
                    "vidspec: requests of class %s are no longer drafted for: %.2f tokens per verify step do not pay "
                    "for their drafts; they are probed now and then",
                    name,
                    length,
                )
            else:
                logger.info(
                    "vidspec: requests of class %s are drafted for again: %.2f tokens per verify step", name, length
                )

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self, scheduler_output: Any, most: int | None) -> Decision | None:
        """Return what a step drafts.

        Args:
            scheduler_output: vLLM's, complete.
            most: Draft tokens that no request may exceed; None for as many as was configured.
        """
        if scheduler_output.finished_req_ids or scheduler_output.scheduled_new_reqs:
            self._look()
        # In a step of few milliseconds our code is not in the caches: each line of it takes its time.
        if self._may_pass and len(scheduler_output.num_scheduled_tokens) == self._num_reqs:
            return self._decision
        req_ids = list(scheduler_output.num_scheduled_tokens)
        if scheduler_output.finished_req_ids:
            ended = [self._requests.pop(req_id, None) for req_id in scheduler_output.finished_req_ids]
            self._controller.remove({one.request_id: one.num_output_tokens for one in ended if one is not None})
        if not req_ids:
            self._controller.learn()
        if self._controller.ended:
            self._count_ended()
        if self._config.has_schedule and req_ids:
            allowed = self._config.plan_for(len(req_ids)).num_tokens
            most = allowed if most is None else min(most, allowed)
        decision = self._controller.decide(req_ids, most)
        if decision is not self._decision and self._file is not None:
            self._file.set("tokens_in_use", decision.option.num_tokens)
        self._decision, self._num_reqs = decision, len(req_ids)
        return decision

    def close(self) -> None:
        """Count what the requests that still run have got so far: another controller takes over."""
        self._look()
        self._controller.remove_all()
        self._count_ended()

    def _count_ended(self) -> None:
        for ended in self._controller.ended:
            if self._file is not None:
                self._file.add(f"steps_{CLASS_LABELS[ended.label]}", ended.verify_steps)
                self._file.add(f"tokens_{CLASS_LABELS[ended.label]}", ended.verify_tokens)
        self._controller.ended.clear()

    def _look(self) -> None:
        """Look at the next step, which is not like those before."""
        if not (self._num_unseen or self._may_pass):
            return
        if self._num_unseen:
            self._controller.pass_over(self._num_unseen, (self._passed_at - self._last[0]) / self._num_unseen)
        self._num_unseen = self._may_pass = 0
        self._last = 0.0, None

    def observe(self, scheduler_output: Any, output: Any) -> None:
        """Learn from the output of a step."""
        if self._may_pass:
            self._may_pass -= 1
            self._num_unseen += 1
            self._passed_at = time.monotonic()
            return
        decision = compat.decision_of(scheduler_output)
        if decision is None or not output.req_ids:
            return
        req_ids = output.req_ids
        now, report = time.monotonic(), compat.report_of(output)
        drafts, num_reqs = scheduler_output.scheduled_spec_decode_tokens, len(req_ids)
        before, last = self._last
        self._last = now, decision
        step_s = (now - before) / (1 + self._num_unseen)
        if self._num_unseen:
            self._controller.pass_over(self._num_unseen, step_s)
            self._num_unseen = 0
        num_tokens = np.fromiter(map(len, output.sampled_token_ids), dtype=np.int64, count=num_reqs)
        is_timed = last is not None and not scheduler_output.scheduled_new_reqs
        num_scheduled = scheduler_output.total_num_scheduled_tokens
        key = (decision, last, req_ids, report.drafted, len(drafts), num_scheduled, is_timed)
        if self._alike[0] != key or report.reading:
            rows = np.fromiter(map(len, map(drafts.get, req_ids, repeat(()))), dtype=np.int64, count=num_reqs)
            is_real = report.drafted.issuperset(req_ids) or np.fromiter(
                map(report.drafted.__contains__, req_ids), dtype=bool, count=num_reqs
            )
            is_chain = last is None or last.option.is_prefix
            is_steady = last is not None and last.number == decision.number
            kind = StepKind(decision, req_ids, rows, is_chain, is_steady, report.reading, report.reading_s, is_real)
            # A step of decoding alone schedules a token of each request, and the draft tokens.
            is_pure = num_scheduled == num_reqs + int(rows.sum())
            self._alike = () if report.reading else key, kind, is_timed and is_pure
        _, kind, is_timed = self._alike
        self._controller.observe(kind, num_tokens, step_s if is_timed else None)
        self._controller.cannot_draft(report.skipped)
        if is_timed:
            self._may_pass = self._controller.num_quiet
        if not decision.option.num_tokens:  # where a class rests hardly a step is looked at: to look is no part of it
            self._last = time.monotonic(), decision
