"""Measure what guidance adds to the target's prefill, in the engine, at 128 to 25,000 video tokens.

python benchmarks/bench_guidance_overhead.py [--pruner specvlm,uv] [--tokens 128,1024,8192,25088] [--rounds 3]

The bundled LLaVA-OneVision target (16 tokens a frame) prefills one video of that many tokens and the usual question, in
one chunk: vision tower and language model. Prefills with and without the listeners take turns in one engine; `share` is
the median of (with - without) / without over the rounds, `inside_share` the time that our own clock saw inside the
listeners. Only the target's forward is timed, not the draft's. The same model at every length: its attention is a small
part of a step, so the share here is an upper bound of the kind, not a prediction for a large model.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import overhead


class Prefill(overhead.Engine):
    """Times the runner's forward, with the listeners in place or taken out."""

    def __init__(self, longest: int, pruner: str) -> None:
        super().__init__(longest, pruner=pruner)
        self.listeners = self.runner.listeners
        self.guarded = self.listeners._guarded
        self.seconds: list[float] = []
        execute = self.runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            output = execute(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens > 8:
                self.seconds.append(time.perf_counter() - begin)
            return output

        self.runner.execute_model = timed

    def run(self, prompt: dict[str, Any], listens: bool) -> tuple[float, float]:
        """Return the seconds of one prefill, and those inside the listeners."""
        self.listeners._guarded = self.guarded if listens else []
        self.llm.reset_prefix_cache()
        self.seconds.clear()
        inside = self.seconds_inside("guidance_us", prompt, max_tokens=1)
        return sum(self.seconds), inside


def measure(options: Any, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Load an engine for each pruner and yield a row per size."""
    for pruner in options.pruner.split(","):
        prefill = Prefill(max(sizes) + 64, pruner)
        for size in sizes:
            prompt = overhead.prompt_of(size)
            yield {"pruner": pruner, "video_tokens": size} | overhead.in_turns(
                lambda listens: prefill.run(prompt, listens),  # noqa: B023  # called at once
                options.rounds,
                "prefill_ms",
                "guided_prefill_ms",
            )
        prefill.close()


if __name__ == "__main__":
    sys.exit(overhead.main(__doc__, measure, rounds=3, pruner="specvlm,uv"))
