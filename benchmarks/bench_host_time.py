"""Measure our own host time per decode step, in the engine: what our code does outside model forwards and vLLM itself.

python benchmarks/bench_host_time.py [--drafting chain,tree-static,tree-adaptive] [--batch 1,4,8,16] [--steps 100]

The bundled LLaVA-OneVision pair answers short videos, greedily. Our entry points are wrapped on the live objects; what
they call that is not ours (the draft's forwards, logits and embeddings, vLLM's attention metadata and sampler) is
wrapped too and taken off. `own_ms` is the median over the steps that only decode. Kernels are launches on a GPU, and
the whole work on a CPU, where their reference runs. Budget: 1 ms and 20 us per request.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness

from vllm_vidspec.tools import pairs

FAMILY = "llava-onevision"
MAX_BATCH = 16
ANSWER_TOKENS = 96
FOREIGN = "(not ours)"


class Stopwatch:
    """Adds up, by label, the time inside wrapped calls that is not inside other wrapped calls."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # of each open call the time spent in wrapped calls
        self._wrapped: list[tuple[Any, str, Any]] = []

    def timed(self, original: Callable, label: str) -> Callable:
        """Return `original` with its time under `label`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._inside.append(0.0)
            try:
                return original(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - begin
                self.parts[label] += elapsed - self._inside.pop()
                if self._inside:
                    self._inside[-1] += elapsed

        return call

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Put a timed call in an attribute's place."""
        original = getattr(owner, name)
        self._wrapped.append((owner, name, original))
        setattr(owner, name, self.timed(original, label))

    def unwrap(self) -> None:
        """Put everything back: modules and classes outlive the engine."""
        while self._wrapped:
            setattr(*self._wrapped.pop())

    def take(self) -> dict[str, float]:
        """Return what was added up since the last call, without what is not ours."""
        parts, self.parts = self.parts, defaultdict(float)
        parts.pop(FOREIGN, None)
        return dict(parts)


def wrap_foreign(watch: Stopwatch, runner: Any) -> None:
    """Time what our code calls that is not ours: the draft's layers, vLLM's attention metadata and sampler."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_vidspec.engine.draft import model as draft_model

    for owner, names in (
        (runner.speculator.backend.draft_model, ("_run", "compute_logits", "embed")),
        (draft_model, ("build_attn_metadata", "build_slot_mappings_by_layer")),
        (runner.sampler, ("sample", "apply_sampling_params")),
        (GPUModelRunner, ("take_draft_token_ids",)),
    ):
        for name in names:
            watch.wrap(owner, name, FOREIGN)


class HostTime:
    """Our host time in each step of one engine.

    Attributes:
        steps: Per step that only decodes its batch size and our seconds.
    """

    def __init__(self, llm: Any) -> None:
        self.watch = Stopwatch()
        self.steps: list[tuple[int, float]] = []
        self._batch_size = 0  # of the step in flight, where that only decodes
        runner = harness.runner_of(llm.llm_engine)
        self._wrap_entries(runner)
        wrap_foreign(self.watch, runner)
        self._wrap_steps(runner)

    def _wrap_entries(self, runner: Any) -> None:
        """Time where vLLM enters our code."""
        entries = [
            (runner.speculator, ("propose",)),
            (runner.rejection_sampler, ("_verify",)),
            (runner.counters, ("flush",)),
            (runner, ("take_draft_token_ids",)),
        ]
        if runner.parts.guidance is not None:
            entries.append((runner.parts.guidance, ("before_forward", "after_forward")))
        if runner.trees is not None:
            entries.append((runner.trees, ("before_forward", "after_forward", "compact")))
            # The hook keeps the adjusting method in its closure.
            hook = runner.model_state.prepare_inputs
            cell = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))["adjust"]
            cell.cell_contents = self.watch.timed(cell.cell_contents, "positions")
        for owner, names in entries:
            for name in names:
                self.watch.wrap(owner, name, name)

    def _wrap_steps(self, runner: Any) -> None:
        """Part the time by steps, of which one begins with each `execute_model`."""
        execute, propose = runner.execute_model, runner.speculator.propose

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            seconds = sum(self.watch.take().values())
            if self._batch_size:
                self.steps.append((self._batch_size, seconds))
            self._batch_size = 0
            return execute(scheduler_output, *args, **kwargs)

        def propose_once(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = input_batch.num_draft_tokens_per_req
            if drafts is not None and drafts.all() and not input_batch.is_prefilling_np.any():
                self._batch_size = input_batch.num_reqs
            return propose(input_batch, *args, **kwargs)

        runner.execute_model, runner.speculator.propose = execute_model, propose_once

    def run(self, llm: Any, prompts: list[dict[str, Any]]) -> list[float]:
        """Answer every prompt; return our seconds in each step that decoded for all of them."""
        from vllm import SamplingParams

        self.steps.clear()
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        llm.generate(prompts, sampling, use_tqdm=False)
        return [seconds for size, seconds in self.steps if size == len(prompts)]


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Start an engine for each draft shape, and yield a row for each batch size; times in ms."""
    for drafting in options.drafting:
        overrides: dict[str, Any] = {
            "max_num_seqs": max(MAX_BATCH, *options.batch), "limit_mm_per_prompt": {"video": 1},
        }  # fmt: skip
        if options.sync_scheduling:  # adaptive trees keep their own size
            overrides["async_scheduling"] = False
        with harness.Engine(pairs.llm_kwargs(FAMILY, "draft", drafting=drafting, overrides=overrides)) as engine:
            is_async = engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            common = {"drafting": drafting, "scheduling": "async" if is_async else "sync"}
            host_time = HostTime(engine.llm)
            for batch_size in options.batch:
                prompts, own = harness.videos(FAMILY, range(batch_size)), []
                host_time.run(engine.llm, prompts)  # a warm-up
                while len(own) < options.steps:
                    if not (found := host_time.run(engine.llm, prompts)):
                        raise SystemExit(f"{drafting}: no step decoded for {batch_size} requests at once")
                    own += [1e3 * seconds for seconds in found]
                p20, p80 = np.quantile(own, [0.2, 0.8])
                yield common | {
                    "batch_size": batch_size,
                    "steps": len(own),
                    "own_ms": round(statistics.median(own), 4),
                    "p20_ms": round(float(p20), 4),
                    "p80_ms": round(float(p80), 4),
                    "budget_ms": 1.0 + 0.02 * batch_size,
                }
            host_time.watch.unwrap()


if __name__ == "__main__":
    shapes = ["chain", "tree-static", "tree-adaptive"]
    harness.command(__doc__, measure, drafting=shapes, batch=[1, 4, 8, 16], steps=100, sync_scheduling=False)
