"""Measure what of a step guidance, pruning, relevance, tree building and scoring take, beside an inflated target.

python -m benchmarks.bench_overheads [--inflate 9] [--requests 12] [--json overheads.json]

One request at a time, greedily, one engine per setting. Our calls are wrapped on the live objects; what they call of
the draft's forwards and of vLLM is taken off. `the rest` is all else of ours, from where vLLM calls it. Two kinds of
steps: the prompt's, from a request's arrival to the first step that verifies drafts, and verify steps. Medians of each.
On the CPU engine a kernel's reference does the work that a GPU would be told to do, and the target is a million
parameters and zeros: shares are of such steps.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks import harness, inflated
from vllm_vidspec.tools.bench import trials

FAMILY = "qwen2.5-vl"
ANSWER_TOKENS = 64
# What each setting's engine runs: every component is in one of them.
SETTINGS: dict[str, dict[str, Any]] = {
    "chain, uv, strict": {"pruner": "uv", "num_speculative_tokens": 5},
    "chain, specvlm, loose": {"pruner": "specvlm", "scorer": "loose", "num_speculative_tokens": 5},
    "tree-static, specvlm, strict": {"pruner": "specvlm", "drafting": "tree-static"},
    "tree-adaptive, specvlm, strict": {"pruner": "specvlm", "drafting": "tree-adaptive"},
}
BENCHMARK = inflated.InflatedBenchmark(families=(FAMILY,), pruner="specvlm")  # whose draft's step the ratio is of
COMPONENTS = ("guidance", "pruning", "relevance", "tree building", "scoring", "the rest")
FOREIGN = "(not ours)"


class Stopwatch:
    """Adds up, by label, the time inside wrapped calls that is not inside other wrapped calls."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # of each open call the time spent in wrapped calls
        self._wrapped: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

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

        self._wrapped.append((owner, name, original))
        setattr(owner, name, call)

    def unwrap(self) -> None:
        """Put everything back: modules and classes outlive the engine."""
        while self._wrapped:
            setattr(*self._wrapped.pop())

    def take(self) -> dict[str, float]:
        """Return what was added up since the last call, without what is not ours."""
        parts, self.parts = self.parts, defaultdict(float)
        parts.pop(FOREIGN, None)
        return dict(parts)


class Watched:
    """What one engine's steps are made of: seconds of each, and seconds by component."""

    def __init__(self, engine: harness.Engine) -> None:
        self.prompts: list[tuple[float, dict[str, float]]] = []  # of each request, until its first verify step
        self.verifies: list[tuple[float, dict[str, float]]] = []  # of each verify step but a request's last
        self._engine, self._watch = engine, Stopwatch()
        self._begun, self._into = 0.0, self.prompts
        self._wrap(engine.runner)
        execute = engine.runner.execute_model

        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            if output.scheduled_spec_decode_tokens:
                now = time.perf_counter()
                self._into.append((now - self._begun, self._watch.take()))
                self._begun, self._into = now, self.verifies
            return execute(output, *args, **kwargs)

        engine.runner.execute_model = execute_model

    def answer(self, prompt: dict[str, Any]) -> None:
        self._watch.take()
        self._begun, self._into = time.perf_counter(), self.prompts
        self._engine.answer([prompt], max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def unwrap(self) -> None:
        self._watch.unwrap()

    def _wrap(self, runner: Any) -> None:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        from vllm_vidspec.engine.draft import model as draft_model
        from vllm_vidspec.engine.draft.noise import CoupledSampler
        from vllm_vidspec.engine.hooks.prompts import PendingScores

        drafts, trees = runner.speculator.backend.drafter, runner.speculator.backend.drafter.trees
        wrapped: list[tuple[Any, tuple[str, ...], str]] = [
            # What our code calls that is not ours: the draft's layers, vLLM's attention metadata and sampler.
            (runner.speculator.backend.draft_model, ("_run", "compute_logits", "embed"), FOREIGN),
            (draft_model, ("build_attn_metadata", "build_slot_mappings_by_layer"), FOREIGN),
            (runner.sampler, ("sample", "apply_sampling_params"), FOREIGN),
            (GPUModelRunner, ("take_draft_token_ids",), FOREIGN),
            *((guide, ("before_forward", "after_forward", "take"), "guidance") for guide in runner.parts.guides),
            (PendingScores, ("wait",), "guidance"),
            (drafts.prefills, ("_plan", "_prune"), "pruning"),
            (runner.rejection_sampler, ("_verify",), "scoring"),
            (runner.speculator, ("propose",), "the rest"),
            (runner.counters, ("flush",), "the rest"),
            (runner, ("take_draft_token_ids",), "the rest"),
        ]
        # Inside the target's forward.
        wrapped += [(guide, ("observe",), "guidance") for guide in runner.parts.guides if hasattr(guide, "observe")]
        if runner.parts.visual is not None:
            wrapped.append((runner.parts.visual, ("before_forward", "after_forward", "relevance"), "relevance"))
        if trees is not None:
            wrapped += [
                (trees.policy, ("begin", "extend", "send", "finish"), "tree building"),
                (CoupledSampler, ("candidates_into",), "tree building"),
                (drafts.buffers, ("place",), "tree building"),
                (runner.trees, ("before_forward", "after_forward", "compact"), "tree building"),
            ]
        for owner, names, component in wrapped:
            for name in names:
                self._watch.wrap(owner, name, component)


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Start an engine for each setting, and yield what a prompt's steps and a verify step take, and their parts."""
    workload = inflated.workload_for(BENCHMARK, FAMILY, options.inflate)
    for name, spec in SETTINGS.items():
        variant = trials.Variant("vidspec", trials.SEQUENTIAL, {"prune_ratio": 0.9} | spec)
        with harness.Engine(workload.job(BENCHMARK, variant, [0])["llm"]) as engine:
            watched = Watched(engine)
            for i, prompt in enumerate(harness.videos(FAMILY, range(options.requests + 1))):
                watched.answer(prompt)
                if i == 0:  # a warm-up
                    watched.prompts.clear()
                    watched.verifies.clear()
            watched.unwrap()
        row = {"setting": name, "inflate": workload.ratio, "label": workload.label, "requests": options.requests}
        for kind, steps in (("prompt", watched.prompts), ("verify", watched.verifies)):
            row[f"{kind}_ms"] = round(1e3 * statistics.median(seconds for seconds, _ in steps), 3)
            row[f"{kind}_steps"] = len(steps)
            row[f"{kind}_parts"] = {
                part: round(1e3 * statistics.median(parts.get(part, 0.0) for _, parts in steps), 4)
                for part in COMPONENTS
            }
        yield row


if __name__ == "__main__":
    harness.command(__doc__, measure, inflate=9.0, requests=12)
