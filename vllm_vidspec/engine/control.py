"""SchedulerControl: the controller (`adapt/control.py`) on vLLM's scheduler: how many tokens each step drafts."""

import time
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.adapt import REST, Controller, Decision, Option, class_label
from vllm_vidspec.config import Plan, VidSpecConfig
from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.names import CLASS_LABELS

logger = init_logger("vllm.vidspec")

_PLAIN_STEPS = 8  # steps without drafts that the controller takes in together
_WAITING_STEPS = 16  # steps that it takes in one after the other: a step's work evicts its code and tables from caches
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

        self._config, self._file = config, file
        has_graphs = not current_platform.is_cpu()
        plans = config.choices(has_graphs)
        if config.is_parallel:  # a window is as long as it is
            plans = plans[:1]
        options = (*(self._option(plan) for plan in plans), REST)
        pads = has_graphs and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        # Requests that are preempted keep their slot.
        self._controller = Controller(options, 2 * scheduler.scheduler_config.max_num_seqs, pads)
        self._is_resting: dict[int, bool] = {}  # by place in `Controller.classes`, as logged last
        # Of the last step's output: when it came, and by what decision.
        self._last: tuple[float, Decision | None] = (0.0, None)
        # By what a step's draft tokens are known again, then these tokens by request, whose are real, and whether the
        # step only decodes.
        self._rows: tuple[Any, ...] = ()
        # What the controller has yet to take in: steps, as it is told of them, and steps without drafts: their
        # requests, when they began, how many.
        self._waiting: list[tuple[Any, ...]] = []
        self._plain: tuple[list[str], float, int] = ([], 0.0, 0)

    def _option(self, plan: Plan) -> Option:
        """Return a plan as the controller knows it; with a drafter process of its own no draft forward runs here."""
        is_parallel, tree = self._config.is_parallel, self._config.tree
        num_levels = {
            "chain": lambda: plan.num_tokens,
            "tree-static": lambda: max(map(len, tree.static_paths)),
            "tree-adaptive": lambda: min(plan.num_tokens, tree.depth_max),
        }[plan.shape]()
        return Option(*plan, 0 if is_parallel else num_levels, plan.shape == "chain" and not is_parallel)

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
            num_kept += size * (1 - self._config.prune.ratio_for(modality))
        total, params = sum(num_visual.values()), request.sampling_params
        is_sampled = params is not None and params.temperature > _GREEDY
        label, num_tokens = class_label(num_visual["video"], num_visual["image"]), request.num_tokens
        self._take_in()
        shown = self._controller.add(
            request.request_id, label, (is_sampled, way), num_tokens, num_tokens - total + int(num_kept)
        )
        self._log_classes()
        if self._file is not None:
            self._file.add(f"{'shown' if shown else 'unshown'}_{CLASS_LABELS[label]}")
        return shown

    def _log_classes(self) -> None:
        """Log and count the classes that have come to rest, or resumed."""
        for index, known in enumerate(self._controller.classes):
            if self._is_resting.get(index, False) == known.rests:
                continue
            self._is_resting[index], name = known.rests, CLASS_LABELS[known.label]
            length = self._controller.expected_length(index)
            if self._file is not None:
                self._file.add(f"{'rests' if known.rests else 'resumes'}_{name}")
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
        req_ids = list(scheduler_output.num_scheduled_tokens)
        if scheduler_output.finished_req_ids:
            self._flush()
        elif len(self._waiting) >= self._controller.steps_left:
            self._take_in()
        for req_id in scheduler_output.finished_req_ids:
            ended = self._controller.remove(req_id)
            if ended is not None and self._file is not None:
                self._file.add(f"steps_{CLASS_LABELS[ended.label]}", ended.verify_steps)
                self._file.add(f"tokens_{CLASS_LABELS[ended.label]}", ended.verify_tokens)
        if self._config.has_schedule and req_ids:
            allowed = self._config.plan_for(len(req_ids)).num_tokens
            most = allowed if most is None else min(most, allowed)
        decision = self._controller.decide(req_ids, most)
        if self._file is not None:
            self._file.set("tokens_in_use", decision.option.num_tokens)
        return decision

    def observe(self, scheduler_output: Any, output: Any) -> None:
        """Learn from the output of a step."""
        decision = compat.decision_of(scheduler_output)
        if decision is None or not output.req_ids:
            return
        req_ids = output.req_ids
        now, report = time.monotonic(), compat.report_of(output)
        drafts, num_reqs = scheduler_output.scheduled_spec_decode_tokens, len(req_ids)
        before, last = self._last
        self._last = now, decision
        if decision == last and self._is_plain(scheduler_output, report, num_reqs):
            return self._defer(req_ids, before, now)
        if self._plain[2]:
            self._flush()
        num_tokens = np.fromiter(map(len, output.sampled_token_ids), dtype=np.int64, count=num_reqs)
        # Usually this is the same in one step after the other.
        key = (req_ids, report.drafted, len(drafts), scheduler_output.total_num_scheduled_tokens)
        if self._rows[:4] != key:
            rows = np.array([len(drafts.get(req_id, ())) for req_id in req_ids], dtype=np.int64)
            is_real = np.array([req_id in report.drafted for req_id in req_ids], dtype=bool)
            # A step of decoding alone schedules a token of each request, and the draft tokens.
            is_pure = scheduler_output.total_num_scheduled_tokens == num_reqs + sum(map(len, drafts.values()))
            self._rows = (*key, rows, is_real, is_pure)
        rows, is_real, is_pure = self._rows[4:]
        is_timed = is_pure and last is not None and not scheduler_output.scheduled_new_reqs
        is_chain, is_steady = last is None or last.option.is_prefix, last is not None and last.number == decision.number
        step = (decision, req_ids, rows, num_tokens, is_chain, now - before if is_timed else None, is_steady)
        self._waiting.append((*step, report.reading, report.reading_s, 1, is_real))
        if report.skipped or len(self._waiting) == _WAITING_STEPS:
            self._take_in()
            self._controller.cannot_draft(report.skipped)

    def _take_in(self) -> None:
        """Let the controller observe the steps that wait for it."""
        for step in self._waiting:
            self._controller.observe(*step)
        self._waiting.clear()

    # ---- steps without drafts: the controller takes in several at a time, which saves host time ----------------------

    @staticmethod
    def _is_plain(scheduler_output: Any, report: compat.StepReport, num_reqs: int) -> bool:
        """Return whether a step has decoded one token of each request, without drafts and with nothing to report."""
        return (
            scheduler_output.total_num_scheduled_tokens == num_reqs
            and not scheduler_output.num_spec_tokens_to_schedule
            and not scheduler_output.scheduled_new_reqs
            and not any(report)
        )

    def _defer(self, req_ids: list[str], before: float, now: float) -> None:
        """Count a step without drafts."""
        known, since, num_steps = self._plain
        if num_steps and known != req_ids:
            self._flush()
            num_steps = 0
        self._plain = (req_ids, since if num_steps else before, num_steps + 1)
        if num_steps + 1 == _PLAIN_STEPS:
            self._flush(now)

    def _flush(self, now: float | None = None) -> None:
        """Let the controller observe what it has not; `now`, if steps without drafts have just ended."""
        self._take_in()
        req_ids, since, num_steps = self._plain
        self._plain = ([], 0.0, 0)
        if not num_steps:
            return
        zeros = np.zeros(len(req_ids), dtype=np.int64)
        seconds = None if now is None else (now - since) / num_steps
        decision = Decision(REST, frozenset(), -1, False)
        self._controller.observe(decision, req_ids, zeros, zeros + num_steps, True, seconds, num_steps=num_steps)
