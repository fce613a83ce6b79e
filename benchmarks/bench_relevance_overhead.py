"""Measure what relevance adds to a decode step, in the engine, at 128 to 25,000 video tokens.

python benchmarks/bench_relevance_overhead.py [--tokens 128,1024,8192,25088] [--rounds 5]

The bundled LLaVA-OneVision pair answers about one video of that many tokens, 10 drafts a step. Strict requests and
loose ones with lambda 0 and no shift take turns in one engine: the tokens, and so the steps, are the same, but the
latter measure relevance and walk by rules. A step is the target's forward, verification and the next drafts; `share` is
the median over the rounds of (with - without) / without, `inside_share` the time inside the relevance calls alone. The
model is tiny and its hidden states are 4 bytes an element: for what is to be read per step see `store_bytes`, beside
which a large target reads tens of gigabytes of weights.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import overhead

NUM_DRAFTS = 10
MAX_TOKENS = 64
LOSSLESS = {"scorer": "loose", "lambda_loose": 0.0, "position_shift": False}


class Steps(overhead.Engine):
    """Times the runner's decode steps."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest, num_speculative_tokens=NUM_DRAFTS, relevance_bytes=2**27, **LOSSLESS)
        self.seconds: list[float] = []
        execute, sample = self.runner.execute_model, self.runner.sample_tokens

        def timed_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.is_decode = 1 < scheduler_output.total_num_scheduled_tokens <= NUM_DRAFTS + 1
            self.begin = time.perf_counter()
            return execute(scheduler_output, *args, **kwargs)

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if self.is_decode:
                self.seconds.append(time.perf_counter() - self.begin)
            return output

        self.runner.execute_model, self.runner.sample_tokens = timed_execute, timed_sample

    def run(self, prompt: dict[str, Any], is_loose: bool) -> tuple[float, float]:
        """Return the median seconds of a decode step, and the mean inside the relevance calls."""
        self.seconds.clear()
        scorer = {"vidspec_scorer": "loose" if is_loose else "strict"}
        inside = self.seconds_inside("relevance_us", prompt, max_tokens=MAX_TOKENS, ignore_eos=True, extra_args=scorer)
        return statistics.median(self.seconds), inside / len(self.seconds)


def measure(options: Any, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Load an engine for each size and yield its row."""
    for size in sizes:
        steps, prompt = Steps(size + 64 + MAX_TOKENS), overhead.prompt_of(size)
        pool = steps.runner.parts.visual.store.pool
        row = overhead.in_turns(
            lambda is_loose: steps.run(prompt, is_loose),  # noqa: B023  # called at once
            options.rounds,
            "step_ms",
            "loose_step_ms",
        )
        yield {"video_tokens": size} | row | {"store_bytes": size * pool.shape[2] * pool.element_size()}
        steps.close()


if __name__ == "__main__":
    sys.exit(overhead.main(__doc__, measure, rounds=5))
