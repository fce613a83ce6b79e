"""Measure what relevance adds to a decode step, in the engine, at 128 to 25,000 video tokens.

python benchmarks/bench_relevance_overhead.py [--tokens 128,1024,8192,25088] [--rounds 5]

The bundled LLaVA-OneVision pair answers about one video of that many tokens, 10 drafts a step. Strict requests and
loose ones with lambda 0 and no shift take turns in one engine: the tokens, and so the steps, are the same, but the
latter measure relevance and walk by rules. A step is the target's forward, verification and the next drafts; `share` is
the median over the rounds of (with - without) / without, `inside_share` the time inside the relevance calls alone. The
model is tiny and its hidden states are 4 bytes an element: for what is to be read per step see `store_bytes`, beside
which a large target reads tens of gigabytes of weights.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import harness

NUM_DRAFTS, MAX_TOKENS = 10, 64
LOSSLESS = {"scorer": "loose", "lambda_loose": 0.0, "position_shift": False}


class Steps:
    """Times the runner's decode steps."""

    def __init__(self, engine: harness.Engine) -> None:
        self._engine = engine
        self._seconds: list[float] = []
        self._begin: float | None = None  # of the step in flight, if it decodes
        execute, sample = engine.runner.execute_model, engine.runner.sample_tokens

        def timed_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            is_decode = 1 < scheduler_output.total_num_scheduled_tokens <= NUM_DRAFTS + 1
            self._begin = time.perf_counter() if is_decode else None
            return execute(scheduler_output, *args, **kwargs)

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if self._begin is not None:
                self._seconds.append(time.perf_counter() - self._begin)
            return output

        engine.runner.execute_model, engine.runner.sample_tokens = timed_execute, timed_sample

    def run(self, prompt: harness.Row, is_loose: bool) -> tuple[float, float]:
        """Return the median seconds of a decode step, and the mean inside the relevance calls."""
        self._seconds.clear()
        sampling: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        sampling["extra_args"] = {"vidspec_scorer": "loose" if is_loose else "strict"}
        _, gained = self._engine.measure(self._engine.answer, [prompt], **sampling)
        return statistics.median(self._seconds), gained["relevance_us"] / 1e6 / len(self._seconds)


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Start an engine for each size, and yield its row."""
    for size in options.tokens:
        knobs = {"num_speculative_tokens": NUM_DRAFTS, "relevance_bytes": 2**27, **LOSSLESS}
        with harness.long_engine(size + 64 + MAX_TOKENS, **knobs) as engine:
            steps, pool = Steps(engine), engine.runner.parts.visual.store.pool
            run = lambda is_loose, steps=steps, prompt=harness.long_prompt(size): steps.run(prompt, is_loose)  # noqa: E731
            row = harness.in_turns(run, options.rounds, "step_ms", "loose_step_ms")
            yield {"video_tokens": size} | row | {"store_bytes": size * pool.shape[2] * pool.element_size()}


if __name__ == "__main__":
    harness.command(__doc__, measure, tokens=[128, 1024, 8192, 25088], rounds=5)
