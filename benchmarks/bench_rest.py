"""What our code adds to a step at rest, measured by taking it out of the engine's way every few steps.

    python benchmarks/bench_rest.py --tokens 256,4096 --batches 1,4

Two engines that do the same differ by more than this. In one engine whose requests are never shown to the draft, three
steps run with our hooks of the scheduler, the engine's core and the model runner, the next three without, and so on;
the first of three is not timed. A ratio is of means within a batch of answers, as our work is not the same in every
step; the figure is the median of ratios.
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

from benchmarks import inflated, scaling
from benchmarks.methods import CONTROLLER
from benchmarks.roles import Roles
from benchmarks.session import BenchEngine
from vllm_vidspec.tools.bench.trials import SEQUENTIAL, VANILLA, Variant
from vllm_vidspec.tools.progress import silent

FAMILY = "qwen2.5-vl"
VIDEOS, ANSWER_TOKENS = 2, 128
BLOCK = 3  # steps with our hooks, then as many without
BEGIN, END = 8, 120  # steps of an answer that are timed: no request comes or goes
WARM_UP, LEAST = 3, 5  # rounds of answers before; that are measured, at least


def never_shown(engine: harness.Engine) -> None:
    """Let no request be shown to the draft."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    scheduler._vidspec_side._control._controller._is_shown = lambda *_: False


def answer(
    llm_engine: Any, roles: Roles, prompts: list[dict[str, Any]], sampling: Any
) -> tuple[dict[bool, list[float]], list[list[int]]]:
    """Answer prompts at once; return seconds of steps with our hooks and without, and the answers' token ids."""
    for i, prompt in enumerate(prompts):
        llm_engine.add_request(str(i), prompt, sampling)
    times: dict[bool, list[float]] = {True: [], False: []}
    answers, step, on = {}, 0, True
    while llm_engine.has_unfinished_requests():
        if BEGIN <= step <= END and step % BLOCK == 0:
            on = not on or step + BLOCK > END
            roles.play(CONTROLLER if on else VANILLA)
        begin = time.perf_counter()
        outputs = llm_engine.step()
        if BEGIN < step < END and step % BLOCK:
            times[on].append(time.perf_counter() - begin)
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}
        step += 1
    return times, [answers[str(i)] for i in range(len(prompts))]


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row of each length and batch size: milliseconds of a step with our hooks and without, and their ratio."""
    from vllm import SamplingParams

    knobs = {"num_speculative_tokens": 5, "pruner": "specvlm", "adaptive_tokens": True}
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    sizes = {"rounds": 1, "max_tokens": ANSWER_TOKENS, "kept_requests": VIDEOS, "batch_size": max(args.batches)}
    for tokens in args.tokens:
        benchmark = scaling.ScalingBenchmark(families=(FAMILY,), video_tokens=tokens, **sizes)
        workload = inflated.workload_for(benchmark, FAMILY, 0.0, silent)
        job = benchmark.job(workload, Variant(CONTROLLER, SEQUENTIAL, knobs))
        prompts = BenchEngine.bundled_requests(job["prompts"] | {"held_out": list(range(VIDEOS))})
        with harness.Engine(job["llm"]) as engine:
            roles, llm_engine = Roles(engine.llm), engine.llm.llm_engine
            never_shown(engine)
            for batch in args.batches:
                asked, rounds, end = [prompts[i % VIDEOS] for i in range(batch)], list[dict[bool, list[float]]](), 0.0
                while len(rounds) < WARM_UP + LEAST or time.monotonic() < end:
                    rounds.append(answer(llm_engine, roles, asked, sampling)[0])
                    end = end if len(rounds) > WARM_UP else time.monotonic() + args.seconds
                yield {"tokens": tokens, "batch": batch} | figures(rounds[WARM_UP:])


def figures(rounds: list[dict[bool, list[float]]]) -> dict[str, float]:
    """Return the figures of rounds, given seconds of steps with our hooks and without."""
    with_s, without_s = ([statistics.mean(times[on]) for times in rounds] for on in (True, False))
    ratios = [ours / its for ours, its in zip(with_s, without_s, strict=True)]
    found = {"with_ms": 1e3 * statistics.median(with_s), "without_ms": 1e3 * statistics.median(without_s)}
    return found | {
        "ratio": statistics.median(ratios),
        "ratio_error": scaling.median_error(ratios),
        "rounds": len(rounds),
    }


if __name__ == "__main__":
    harness.command(__doc__, measure, tokens=[256, 1024, 4096, 14848], batches=[1, 4, 16], seconds=30.0)
