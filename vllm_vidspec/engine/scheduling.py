"""SchedulerSide: our part beside vLLM's scheduler, which sees every step of every request and decides for all ranks.

It decides how many draft tokens a step proposes: the number that an operator has set, none for a while after the draft
has failed too often, what pays (`adaptive_tokens`, see `control.py`), in the shape that an operator has set. And with
which pruner a request's prompt is pruned (`pruner: auto`). Ranks follow the scheduler's output, so no collective is
needed.
"""

import contextlib
import copy
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.adapt import Bandit, Decision
from vllm_vidspec.config import AUTO, METHOD, PruneKnobs, VidSpecConfig
from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.engine.control import SchedulerControl
from vllm_vidspec.errors import VidSpecError, quoted
from vllm_vidspec.metrics.files import open_for
from vllm_vidspec.scoring.choices import WAY

logger = init_logger("vllm.vidspec")

_SAVE_EVERY = 64  # requests between two saves
LIMIT, SHAPE = HERE = ("num_speculative_tokens", "draft_shape")  # knobs that are changed here and not in the workers
_UNDER_WAY = 16  # steps at the same time, at most: pipeline stages
_POLL_S = 0.2  # between two readings of the worker's counters
# Within the first, `max_draft_failures` failures of the draft switch speculation off for the second.
FAILURE_WINDOW_S = COOLDOWN_S = 60.0


def way_of(sampling: Any) -> int:
    """Return by which of `PruneKnobs.variants` a request is pruned, given its `SamplingParams`."""
    way = (getattr(sampling, "extra_args", None) or {}).get(WAY, 0)
    return way if isinstance(way, int) else 0


def _give_way(request: Any, **way: int) -> None:
    """Let a request's parameters say this way alone, or none, whatever its client has put there."""
    params = request.sampling_params
    if params is None or (not way and WAY not in (params.extra_args or {})):
        return
    params = copy.copy(params)  # the answers of one prompt may share it
    params.extra_args = {key: value for key, value in (params.extra_args or {}).items() if key != WAY} | way
    request.sampling_params = params


class SchedulerSide:
    """Our part beside one scheduler of vLLM's."""

    def __init__(self, scheduler: Any, vllm_config: Any):
        config = VidSpecConfig(**vllm_config.additional_config[METHOD])
        self._scheduler = scheduler
        self._config, self._vllm_config, self._most = config, vllm_config, config.num_speculative_tokens
        self._file = open_for(vllm_config)
        self._ways = _Ways(config, self._file) if len(config.variants) > 1 else None
        # vLLM's own table of tokens by batch size; None: always K.
        self._table: list[int] | None = scheduler.dynamic_sd_lookup
        # Data-parallel engines need one number of tokens in every step.
        self._is_alone = vllm_config.parallel_config.data_parallel_size == 1
        self._control = self._controlled(config) if config.adaptive_tokens and self._is_alone else None
        self._limit: int | None = None  # what an operator has set
        self._shape = config.draft_shape  # what he has chosen
        self._num_undrafted = 0  # steps since one was planned that drafts anything
        self._breaker = _Breaker(config, self._file) if self._is_alone and self._file is not None else None
        self._publish()

    def add(self, request: Any) -> None:
        """Take in a request before it is queued; it may be given a pruner, and has none of its own choice."""
        _give_way(request)
        if self._ways is not None:
            self._ways.collect(self._scheduler.requests)
            self._ways.add(request)

    def is_shown(self, request: Any) -> bool:
        """Return whether a request that is scheduled for the first time, or again, is shown to the draft."""
        return self._control is None or self._control.is_shown(request, way_of(request.sampling_params))

    def plan(self, scheduler_output: Any) -> Decision | None:
        """Return what a step drafts; None where vLLM's table says it."""
        decision = None if self._control is None else self._control.plan(scheduler_output, self._most_now)
        drafts = decision is None or decision.option.num_tokens > 0
        self._num_undrafted = 0 if drafts else self._num_undrafted + 1
        return decision

    @property
    def has_drafts(self) -> bool:
        """Whether any step that may be under way, or has just ended, drafts anything."""
        return self._num_undrafted <= _UNDER_WAY

    def observe(self, scheduler_output: Any, output: Any) -> None:
        """Take in the output of a step."""
        if self._file is not None and (carried := compat.told_with(output).carried):
            self._file.take_in(carried)
        if self._ways is not None:
            self._ways.observe(scheduler_output, output)
        if self._control is not None:
            self._control.observe(scheduler_output, output)
        if self._breaker is not None and self._breaker.poll():
            self._publish()

    @contextlib.contextmanager
    def retuned(self, knobs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Apply the knobs that are changed here, from the next step on: `num_speculative_tokens`, the most draft tokens
        of a step, 0 for none, null for as many as was configured; and `draft_shape`, one that the engine can draft.

        Yields:
            The other knobs, for the workers; if they fail, nothing changes here.

        Raises:
            VidSpecError: The number is not in 0 to K, or this engine cannot change it or the shape.
        """
        left = {name: value for name, value in knobs.items() if name not in HERE}
        if LIMIT in knobs:
            self._check(knobs[LIMIT])
        if not self._is_alone and (fixed := [name for name in HERE if name in knobs]):
            raise VidSpecError(f"{fixed[0]} cannot change while data-parallel engines run")
        control = self._controlled(self._config.of_shape(knobs[SHAPE])) if SHAPE in knobs else self._control
        yield left
        if self._control is not None and control is not self._control:
            self._control.close()
        self._control = control
        self._shape = knobs.get(SHAPE, self._shape)
        if LIMIT in knobs:
            self._limit = knobs[LIMIT]
            self._publish()
        if self._ways is not None and "pruner" in left:
            # With one fixed pruner nothing is chosen here, and nothing learned.
            self._ways.is_on = left["pruner"] == AUTO

    def _controlled(self, config: VidSpecConfig) -> SchedulerControl:
        """Return a controller that has learned nothing yet; requests that run get what it drafts for all."""
        return SchedulerControl(config, self._scheduler, self._vllm_config, self._file)

    def _check(self, most: Any) -> None:
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= self._most):
            raise VidSpecError(
                f"num_speculative_tokens: between 0 and {self._most} while the engine runs, got {quoted(most)}"
            )

    @property
    def _most_now(self) -> int | None:
        """The most drafts of a step, by the operator or after failures; None for as many as was configured."""
        return 0 if self._breaker is not None and self._breaker.is_open else self._limit

    @property
    def in_force(self) -> dict[str, Any]:
        """The knobs of `HERE` as they hold, and as configured; and whether drafts are asked for, or who forbids it."""
        is_cooling = self._most_now == 0 != self._limit
        return {
            "speculation": "cool-down" if is_cooling else "operator" if self._limit == 0 else "on",
            LIMIT: self._most if self._limit is None else self._limit,
            SHAPE: self._shape,
            "configured": {LIMIT: self._most, SHAPE: self._config.draft_shape},
        }

    def _publish(self) -> None:
        most = self._most_now
        table = self._table
        if most is not None:
            size = self._scheduler.scheduler_config.max_num_seqs
            table = [min(most, number) for number in table or [self._most] * (size + 1)]
        self._scheduler.dynamic_sd_lookup = table
        if self._file is not None:
            self._file.set("speculation_on", int(most != 0))
            self._file.set("cooling_down", int(most == 0 != self._limit))

    def close(self) -> None:
        """Save what was learned."""
        if self._ways is not None:
            self._ways.collect({})
            self._ways.save()


class _Breaker:
    """Switches speculation off for a while after `max_draft_failures` failures of the draft within a window."""

    def __init__(self, config: VidSpecConfig, file: metrics.MetricsFile):
        self._file = file  # which counts the worker's failures
        self._most = config.max_draft_failures
        self.is_open = False  # whether speculation is off
        self._failures: deque[float] = deque()
        self._num_known = 0
        self._until = self._next_poll = 0.0

    def poll(self) -> bool:
        """Read the worker's count of failures; return whether `is_open` has changed."""
        now = time.monotonic()
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


class _Ways:
    """`pruner: auto`: gives each request a pruner, and learns from how many tokens its verify steps emit."""

    def __init__(self, config: VidSpecConfig, file: metrics.MetricsFile | None):
        self._prune, self._num_drafts, self._file = config, config.num_speculative_tokens, file
        self._bandit = Bandit([(way.pruner, way.prune_ratio) for way in config.variants])
        self.is_on = True  # whether requests are given ways
        self._running: dict[str, list[int]] = {}  # by request: its way, tokens and verify steps
        self._num_visual = self._num_media = 0  # tokens of images and videos, of so many requests that had any
        self._path, self._num_unsaved = config.auto_file, 0
        if self._path is not None and os.path.exists(self._path):
            self._restore(self._path)

    def add(self, request: Any) -> None:
        """Give a request with images or videos a way to be pruned."""
        if not self.is_on or not request.mm_features or request.sampling_params is None:
            return
        self._num_visual += sum(feature.mm_position.length for feature in request.mm_features)
        self._num_media += 1
        way = self._bandit.choose(self._costs())
        _give_way(request, **{WAY: way})
        self._running[request.request_id] = [way, 0, 0]

    def observe(self, scheduler_output: Any, output: Any) -> None:
        """Count the tokens of requests that had drafts."""
        for req_id in scheduler_output.scheduled_spec_decode_tokens.keys() & self._running.keys():
            place = output.req_id_to_index.get(req_id)
            if place is None or place >= len(output.sampled_token_ids):
                continue
            known = self._running[req_id]
            known[1] += len(output.sampled_token_ids[place])
            known[2] += 1

    def collect(self, requests: Any) -> None:
        """Learn from finished requests: those that are no longer among the scheduler's."""
        for req_id in self._running.keys() - requests.keys():
            way, num_tokens, num_steps = self._running.pop(req_id)
            if not num_steps:
                continue
            self._bandit.observe(way, num_tokens / num_steps, num_steps)
            self._num_unsaved += 1
            if self._file is not None:
                pruner = self._prune.variants[way].pruner
                for name, count in (("requests", 1), ("verify_steps", num_steps), ("tokens", num_tokens)):
                    self._file.add(f"auto_{name}_{pruner}", count)
        if self._num_unsaved >= _SAVE_EVERY:
            self.save()

    def _costs(self) -> list[float] | None:
        """Return by way the bytes that a step loads, over those of a step without drafts; None if not known."""
        ratios = {way.prune_ratio for way in self._prune.variants}
        if self._file is None or len(ratios) == 1:
            return None
        known = self._file.value
        target, draft = known("target_load_bytes"), known("draft_load_bytes")
        if not target:
            return None
        visual = self._num_visual / max(1, self._num_media)
        per_token = known("draft_kv_bytes_per_token")
        return [
            1 + self._num_drafts * (draft + per_token * visual * (1 - way.prune_ratio)) / target
            for way in self._prune.variants
        ]

    # ---- the file ----------------------------------------------------------------------------------------------

    def _restore(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                self._bandit.restore(json.load(file)["learned"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("vidspec: auto_file %s is not read (%s): pruners are tried anew", path, error)

    def save(self) -> None:
        """Write the file atomically."""
        self._num_unsaved = 0
        if self._path is None:
            return
        best: PruneKnobs = self._prune.variants[self._bandit.best(self._costs())]
        config = {"pruner": best.pruner, "prune_ratio": best.prune_ratio}
        made = ""
        try:
            folder = os.path.dirname(os.path.abspath(self._path))
            handle, made = tempfile.mkstemp(prefix=".vidspec-auto-", dir=folder)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"config": config, "learned": self._bandit.state()}, file, indent=1)
            os.replace(made, self._path)
        except OSError as error:
            logger.warning("vidspec: auto_file %s is not written: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                os.unlink(made)
