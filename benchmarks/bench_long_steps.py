"""Where a decode step of the long pair goes, by length of the video: target and draft, attention and the rest.

    python -m benchmarks.bench_long_steps --tokens 1024,4096,16384 --json docs/results/long-steps.json

One request in an engine of its own: vanilla (one query row), then with drafts of the whole video and of a tenth of it
(six rows in a verify step). Medians over decode steps, in ms: `target attention` and `draft attention` are vLLM's
kernel, all layers; `target` and `draft` the rest of these models; `vidspec` our code on the host, `vLLM` its runner.
`gbs` and `gflops` are what the attention kernel reads and computes per second, beside what the core can do (`core`).
"""

import argparse
import statistics
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import harness, reel
from benchmarks.bench_long import FAMILY, WHOLE, job
from benchmarks.bench_overheads import Stopwatch
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.planning.models import from_folder
from vllm_vidspec.tools import pairs

SETTINGS: dict[str, dict[str, Any] | None] = {
    "vanilla": None,
    "whole": WHOLE,
    "specvlm": {"pruner": "specvlm", "prune_ratio": 0.9},
}
MAX_TOKENS = 256  # what `bench_long.job` leaves room for


def watch(engine: harness.Engine, is_ours: bool) -> Stopwatch:
    """Time the models, their attention, and our code on the host."""
    found, runner = Stopwatch(), engine.runner
    found.wrap(runner, "execute_model", "vLLM")
    found.wrap(runner, "sample_tokens", "vLLM")
    found.wrap(runner.model, "forward", "target")
    configs = {"target attention": engine.llm.llm_engine.vllm_config}
    if is_ours:
        backend = runner.speculator.backend
        found.wrap(runner.speculator, "propose", "vidspec")
        found.wrap(runner.rejection_sampler, "_verify", "vidspec")
        found.wrap(backend.draft_model, "_run", "draft")
        found.wrap(backend.draft_model, "compute_logits", "draft")
        configs["draft attention"] = backend.draft_model.config
    for label, config in configs.items():
        for layer in attention_layers(config).values():
            found.wrap(layer.impl, "forward", label)
    return found


def steps(engine: harness.Engine, prompt: harness.Row, is_ours: bool, number: int) -> tuple[harness.Row, harness.Row]:
    """Return the parts of the prefill, and the medians of those of a decode step, in ms."""
    loop, clock = harness.DecodeLoop(engine.llm.llm_engine, is_ours), watch(engine, is_ours)
    before = engine.counters() if is_ours else None
    begun = time.perf_counter()
    loop.start([prompt], MAX_TOKENS, 10)
    prefill = {name: round(1e3 * seconds, 1) for name, seconds in clock.take().items()}
    prefill["all"] = round(1e3 * (time.perf_counter() - begun), 1)
    if before is not None:
        after = engine.counters()
        prefill |= {name: (after[f"{name}_us"] - before[f"{name}_us"]) / 1e3 for name in ("guidance", "draft_prefill")}
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(number):
        begin = time.perf_counter()
        loop.step()
        parts["step"].append(time.perf_counter() - begin)
        for name, seconds in clock.take().items():
            parts[name].append(seconds)
    loop.stop()
    clock.unwrap()
    return prefill, {name: round(1e3 * statistics.median(values), 3) for name, values in parts.items()}


def core_peaks() -> harness.Row:
    """Return what one core does at most: GFlop/s of a float32 product, GB/s of reading memory."""
    torch.set_num_threads(1)
    a, long = torch.randn(1536, 1536), torch.ones(2**27)

    product, read = (min(timeit.repeat(call, number=1, repeat=5)) for call in (lambda: a @ a, long.sum))
    return {"gflops": round(2 * 1536**3 / product / 1e9, 1), "gbs": round(4 * 2**27 / read / 1e9, 1)}


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    yield {"core": core_peaks()}
    shape = from_folder(pairs.checkpoint(FAMILY, "target"))
    for tokens in options.tokens:
        frames, question, _ = reel.held_out(0, tokens)
        prompt = pairs.video_prompt(FAMILY, frames, question.text)
        for setting in options.setting:
            spec = SETTINGS[setting]
            with harness.Engine(job(tokens, range(1), spec)["llm"] | {"enable_prefix_caching": False}) as engine:
                engine.answer([prompt], max_tokens=8)
                prefill, step = steps(engine, prompt, spec is not None, options.steps)
            rows, seconds = (1 if spec is None else 6), step["target attention"] / 1e3 / shape.layers
            yield {
                "tokens": tokens,
                "setting": setting,
                "step": step,
                "prefill": prefill,
                "query_rows": rows,
                "attention_ms_per_layer": round(1e3 * seconds, 4),
                "gbs": round(2 * 4 * tokens * shape.kv_heads * shape.head_dim / seconds / 1e9, 1),
                "gflops": round(4 * rows * tokens * shape.heads * shape.head_dim / seconds / 1e9, 1),
            }


if __name__ == "__main__":
    harness.command(__doc__, measure, tokens=[1024, 4096, 16384], setting=list(SETTINGS), steps=30)
