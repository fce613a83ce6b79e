"""Measure what guidance adds to the target's prefill, in the engine, at 128 to 25,000 video tokens.

python benchmarks/bench_guidance_overhead.py [--pruner specvlm,uv] [--tokens 128,1024,8192,25088] [--rounds 3]

The bundled LLaVA-OneVision target (16 tokens a frame) prefills one video of that many tokens and the usual question, in
one chunk: vision tower and language model. Prefills with and without the hooks take turns in one engine; `share` is
the median of (with - without) / without over the rounds, `inside_share` the time that our own clock saw inside the
hooks. Only the target's forward is timed, not the draft's. The same model at every length: its attention is a small
part of a step, so the share here is an upper bound of the kind, not a prediction for a large model.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import harness


class Prefill:
    """Times the runner's forward, with the hooks in place or taken out."""

    def __init__(self, engine: harness.Engine) -> None:
        self._engine, self._hooks = engine, engine.runner.hooks
        self._guarded = self._hooks._guarded
        self._seconds = 0.0
        execute = engine.runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            output = execute(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens > 8:
                self._seconds += time.perf_counter() - begin
            return output

        engine.runner.execute_model = timed

    def run(self, prompt: harness.Row, is_guided: bool) -> tuple[float, float]:
        """Return the seconds of one prefill, and those inside the hooks."""
        self._hooks._guarded = self._guarded if is_guided else []
        self._engine.llm.reset_prefix_cache()
        self._seconds = 0.0
        _, gained = self._engine.measure(self._engine.answer, [prompt], max_tokens=1)
        return self._seconds, gained["guidance_us"] / 1e6


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Start an engine for each pruner, and yield a row for each size."""
    for pruner in options.pruner:
        with harness.long_engine(max(options.tokens) + 64, pruner=pruner) as engine:
            prefill = Prefill(engine)
            for size in options.tokens:
                run = lambda is_guided, prompt=harness.long_prompt(size): prefill.run(prompt, is_guided)  # noqa: B023, E731
                row = harness.in_turns(run, options.rounds, "prefill_ms", "guided_prefill_ms")
                yield {"pruner": pruner, "video_tokens": size} | row


if __name__ == "__main__":
    harness.command(__doc__, measure, pruner=["specvlm", "uv"], tokens=[128, 1024, 8192, 25088], rounds=3)
