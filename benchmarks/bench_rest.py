"""What our code adds to a step at rest, measured by taking it out of the engine's way every few steps.

    python benchmarks/bench_rest.py --batches 1,4

Two engines that do the same differ by more than this. In one engine whose requests are never shown to the draft, three
steps run with our hooks of the scheduler, the engine's core and the model runner, the next three without, and so on;
the first of three is not timed. A ratio is of medians within a batch of answers; the figure is the median of ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness

from vidspec_tools.bench import interleaved, scaling
from vidspec_tools.bench.methods import SEQUENTIAL
from vidspec_tools.bench.session import BenchEngine
from vidspec_tools.bench.trials import Variant
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.tools.progress import silent

FAMILY = "qwen2.5-vl"
VIDEOS, TOKENS, ANSWER_TOKENS = 4, 256, 128
BLOCK = 3  # steps with our hooks, then as many without
BEGIN, END = 8, 120  # steps of an answer that are timed: no request comes or goes
WARM_UP = 6  # rounds of answers before
# What runs in every step.
OF_VLLM = ("_update_after_schedule", "update_from_output", "post_step")
OF_RUNNER = ("prepare_inputs", "execute_model", "sample", "sample_tokens", "take_draft_token_ids")


class Hooks:
    """What of ours runs in a step of an engine; `switch` takes it out of the way, or puts it back."""

    def __init__(self, engine: harness.Engine) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        from vllm_vidspec.engine.runner import VidSpecModelRunner

        self._core, self._runner = engine.llm.llm_engine.engine_core.engine_core, engine.runner
        self._spec = self._runner.speculator, self._runner.num_speculative_steps
        of_vllm = [(owner, name) for owner in (Scheduler, AsyncScheduler, EngineCore) for name in OF_VLLM]
        of_vllm = [(owner, name) for owner, name in of_vllm if hasattr(vars(owner).get(name), MARK)]
        # Whose each is, what it is called, ours and vLLM's.
        self.methods = [(owner, name, vars(owner)[name], getattr(vars(owner)[name], MARK)) for owner, name in of_vllm]
        for name in OF_RUNNER:
            ours, its = vars(VidSpecModelRunner)[name], getattr(GPUModelRunner, name)
            self.methods.append((VidSpecModelRunner, name, ours, its))

    def switch(self, on: bool) -> None:
        for owner, name, ours, its in self.methods:
            setattr(owner, name, ours if on else its)
        self._runner.speculator, self._runner.num_speculative_steps = self._spec if on else (None, 0)
        self._core.check_for_draft_tokens = on


def never_shown(engine: harness.Engine) -> None:
    """Let no request be shown to the draft."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    scheduler._vidspec_side._control._controller._is_shown = lambda *_: False


def answer(
    llm_engine: Any, hooks: Hooks, prompts: list[dict[str, Any]], sampling: Any
) -> tuple[dict[bool, list[float]], list[list[int]]]:
    """Answer prompts at once; return seconds of steps with our hooks and without, and the answers' token ids."""
    for i, prompt in enumerate(prompts):
        llm_engine.add_request(str(i), prompt, sampling)
    times: dict[bool, list[float]] = {True: [], False: []}
    answers, step, on = {}, 0, True
    while llm_engine.has_unfinished_requests():
        if BEGIN <= step <= END and step % BLOCK == 0:
            on = not on or step + BLOCK > END
            hooks.switch(on)
        begin = time.perf_counter()
        outputs = llm_engine.step()
        if BEGIN < step < END and step % BLOCK:
            times[on].append(time.perf_counter() - begin)
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}
        step += 1
    return times, [answers[str(i)] for i in range(len(prompts))]


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row of each batch size: milliseconds of a step with and without our hooks, and their ratio."""
    from vllm import SamplingParams

    knobs = {"num_speculative_tokens": 5, "pruner": "specvlm", "adaptive_tokens": True}
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    sizes = {"video_tokens": TOKENS, "rounds": 1, "max_tokens": ANSWER_TOKENS, "kept_requests": VIDEOS}
    for batch in args.batches:
        benchmark = scaling.ScalingBenchmark(families=(FAMILY,), batch_size=batch, **sizes)
        workload = interleaved.workload_for(benchmark, FAMILY, 0.0, silent)
        job = benchmark.job(workload, Variant("controller", SEQUENTIAL, knobs))
        prompts = BenchEngine.bundled_requests(job["prompts"] | {"held_out": list(range(VIDEOS))})
        prompts = [prompts[i % VIDEOS] for i in range(batch)]
        with harness.Engine(job["llm"]) as engine:
            hooks = Hooks(engine)
            never_shown(engine)
            rounds = [answer(engine.llm.llm_engine, hooks, prompts, sampling)[0] for _ in range(WARM_UP + args.rounds)]
        ratios = [statistics.median(times[True]) / statistics.median(times[False]) for times in rounds[WARM_UP:]]
        with_s, without_s = (
            statistics.median(s for times in rounds[WARM_UP:] for s in times[on]) for on in (True, False)
        )
        row = {"batch": batch, "with_ms": 1e3 * with_s, "without_ms": 1e3 * without_s}
        yield row | {"ratio": statistics.median(ratios), "rounds": args.rounds}


if __name__ == "__main__":
    harness.command(__doc__, measure, batches=[1, 4], rounds=60)
