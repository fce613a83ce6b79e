"""Step times: what a step takes by draft tokens, batch size and context, measured once while the engine starts.

Requests of our own pass through vLLM's scheduler, workers and draft as users' do, and an output's distance from the one
before is a step's time as it will be served: graphs, ranks, stages and a drafter's process included. Workers count none
of it, and the prefix cache is emptied afterwards.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.engine.policy import Decision, Option

_SIZES = (1, 4, 16, 64, 256)  # requests of a step
_PROMPT, _LONG = 48, 2048  # tokens of a prompt, and of one that tells what a context costs
_LONG_SIZE = 4  # requests with such prompts, at most
_SETTLE, _STEPS = 4, 5  # steps of an option before it is timed, and that are
_PATIENCE = 64  # steps until all prompts are read, at most, beside those that read them
_MOST_S = 60.0  # after which sizes that are not measured yet are left out
_SHARE = 0.8  # of the KV cache, that our requests may take


class Trial:
    """What every step drafts while options are measured, and what came of it."""

    def __init__(self, option: Option):
        self.decision = Decision(option)
        self.steps: list[tuple[float, int, int]] = []  # when each output came, its requests that got tokens, and drafts

    def observe(self, output: Any) -> None:
        """Take note of a step's output."""
        num_drafted = len(compat.report_of(output).drafted)
        self.steps.append((time.monotonic(), sum(map(bool, output.sampled_token_ids)), num_drafted))


def measure(core: Any, trial: Trial, options: Sequence[Option], is_parallel: bool):
    """Return seconds of a step by option's index, requests and thousands of tokens in a context; None if there are not
    enough tokens in a sequence, or blocks in a pool, for a single request.

    Args:
        core: vLLM's engine core, before it serves.
        trial: That its scheduler's side follows.
        options: What may be drafted, none last.
        is_parallel: Whether a drafter of its own drafts, which need not have drafts for all in every step.
    """
    scheduler, config = core.scheduler, core.vllm_config
    # Tokens that a request may gain while all options are measured.
    gains = sum((1 + option.num_tokens) * (_SETTLE + _STEPS) for option in options)
    gains += (1 + options[0].num_tokens) * _PATIENCE
    most = config.model_config.max_model_len - gains
    capacity = _SHARE * (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
    sizes = [size for size in _SIZES if size <= scheduler.scheduler_config.max_num_seqs]
    few = [size for size in sizes if size <= _LONG_SIZE]
    found: dict[tuple[int, int, float], float] = {}
    until = time.monotonic() + _MOST_S

    def try_size(size: int, num_tokens: int) -> bool:
        has_room = num_tokens <= most and size * (num_tokens + gains) <= capacity
        if not has_room or (found and time.monotonic() > until):
            return False
        step_s = _of_size(core, trial, options, is_parallel, size, num_tokens)
        found.update({(index, size, num_tokens / 1e3): seconds for index, seconds in enumerate(step_s or ())})
        return step_s is not None

    measured = [size for size in few if try_size(size, _PROMPT)]
    for size in reversed(measured):  # a long prompt is measured against the same size without it
        long = min(_LONG, most, int(capacity / size) - gains)
        if long >= 8 * _PROMPT and try_size(size, long):
            break
    for size in sizes[len(few) :]:
        try_size(size, _PROMPT)
    return found or None


def _of_size(
    core: Any, trial: Trial, options: Sequence[Option], is_parallel: bool, size: int, num_tokens: int
) -> list[float] | None:
    """Return the seconds of a step of each option; None where not all requests have drafts at the same time."""
    scheduler = core.scheduler

    def steps(num: int) -> list[tuple[float, int, int]]:
        first = len(trial.steps)
        while len(trial.steps) < first + num and scheduler.has_unfinished_requests():
            compat.step(core)
        return trial.steps[first:]

    def all_draft() -> bool:
        return bool(trial.steps) and trial.steps[-1][1:] == (size, size)

    trial.decision = Decision(options[0])
    ids = compat.add_own_requests(core, size, num_tokens)
    try:
        budget = scheduler.scheduler_config.max_num_batched_tokens
        for _ in range(_PATIENCE + 2 * size * num_tokens // budget):
            steps(1)
            if all_draft():
                break
        found = []
        for option in options:
            trial.decision = Decision(option)
            timed = steps(_SETTLE + _STEPS)[_SETTLE - 1 :]
            needed = size if option.num_tokens and not is_parallel else 0
            if len(timed) <= _STEPS or any(tokens < size or drafts < needed for _, tokens, drafts in timed):
                return None
            found.append(float(np.median(np.diff([at for at, *_ in timed]))))
        return found
    finally:
        compat.end_own_requests(core, ids)
