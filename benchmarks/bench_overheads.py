"""Measure what of a step guidance, pruning, relevance, tree building and scoring take, beside an inflated target.

python benchmarks/bench_overheads.py [--inflate 9] [--requests 12] [--json overheads.json]

One request at a time, greedily, one engine per setting. Our calls are wrapped on the live objects, as in
bench_host_time.py; what they call of the draft's forwards and of vLLM is taken off. Two kinds of steps: the prompt's,
from a request's arrival to the first step that verifies drafts, and verify steps. Medians of each. On the CPU engine
a kernel's reference does the work that a GPU would be told to do, and the target is a million parameters and zeros:
shares are of such steps.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_host_time import Stopwatch, wrap_foreign
from vidspec_tools.bench import parallel, trials
from vidspec_tools.bench.methods import SEQUENTIAL
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.tables import percent

FAMILY = "qwen2.5-vl"
ANSWER_TOKENS = 64
# What each setting's engine runs: every component is in one of them.
SETTINGS: dict[str, dict[str, Any]] = {
    "chain, uv, strict": {"pruner": "uv", "num_speculative_tokens": 5},
    "chain, specvlm, loose": {"pruner": "specvlm", "scorer": "loose", "num_speculative_tokens": 5},
    "tree-static, specvlm, strict": {"pruner": "specvlm", "drafting": "tree-static"},
    "tree-adaptive, specvlm, strict": {"pruner": "specvlm", "drafting": "tree-adaptive"},
}
BENCHMARK = trials.Benchmark(families=(FAMILY,), pruner="specvlm")  # whose draft's step the ratio is of
COMPONENTS = ("guidance", "pruning", "relevance", "tree building", "scoring")


class Watched:
    """What one engine's steps are made of.

    Attributes:
        prompts: Of each request, until its first verify step: seconds, and seconds by component.
        verifies: Of each verify step but a request's last, the same.
    """

    def __init__(self, llm: Any) -> None:
        self.prompts: list[tuple[float, dict[str, float]]] = []
        self.verifies: list[tuple[float, dict[str, float]]] = []
        self._llm, self._watch = llm, Stopwatch()
        self._watch.is_fine = True
        self._begun, self._into = 0.0, self.prompts
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._wrap(runner)
        execute = runner.execute_model

        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            if output.scheduled_spec_decode_tokens:
                self._close()
                self._into = self.verifies
            return execute(output, *args, **kwargs)

        runner.execute_model = execute_model

    def _close(self) -> None:
        now = time.perf_counter()
        self._into.append((now - self._begun, self._watch.take()))
        self._begun = now

    def answer(self, prompt: dict[str, Any]) -> None:
        """Answer one request."""
        from vllm import SamplingParams

        self._watch.take()
        self._begun, self._into = time.perf_counter(), self.prompts
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        self._llm.generate([prompt], sampling, use_tqdm=False)

    def unwrap(self) -> None:
        """Put everything back."""
        self._watch.unwrap()

    def _wrap(self, runner: Any) -> None:
        from vllm_vidspec.engine.draft.noise import CoupledSampler
        from vllm_vidspec.engine.listen.prompts import PendingScores

        wrap_foreign(self._watch, runner)
        drafts, trees = runner.speculator.drafter, runner.speculator.drafter.trees
        wrapped: list[tuple[Any, tuple[str, ...], str]] = [
            (runner.parts.guidance, ("before_forward", "after_forward", "take"), "guidance"),
            (PendingScores, ("wait",), "guidance"),
            (drafts.prefills, ("_plan", "_choose", "_prune"), "pruning"),
            (runner.rejection_sampler, ("_verify",), "scoring"),
        ]
        if hasattr(runner.parts.guidance, "observe"):  # inside the target's forward
            wrapped.append((runner.parts.guidance, ("observe",), "guidance"))
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


def measure(name: str, spec: dict[str, Any], workload: trials.Workload, num_requests: int) -> dict[str, Any]:
    """Load one engine, answer the requests, and return its row."""
    from vllm import LLM

    variant = trials.Variant("vidspec", SEQUENTIAL, {"prune_ratio": 0.9} | spec)
    llm = LLM(**workload.job(BENCHMARK, variant, [0])["llm"])
    watched = Watched(llm)
    for i in range(num_requests + 1):
        watched.answer(pairs.video_prompt(FAMILY, world.held_out(i).frames))
        if i == 0:  # a warm-up
            watched.prompts.clear()
            watched.verifies.clear()
    watched.unwrap()
    llm.llm_engine.engine_core.shutdown()
    row: dict[str, Any] = {
        "setting": name,
        "inflate": workload.ratio,
        "label": workload.label,
        "requests": num_requests,
    }
    for kind, steps in (("prompt", watched.prompts), ("verify", watched.verifies)):
        row[f"{kind}_ms"] = round(1e3 * statistics.median(seconds for seconds, _ in steps), 3)
        row[f"{kind}_steps"] = len(steps)
        row[f"{kind}_parts"] = {
            part: round(1e3 * statistics.median(parts.get(part, 0.0) for _, parts in steps), 4) for part in COMPONENTS
        }
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    """Print one row: of each component its ms, and its share of such a step."""
    for kind in ("prompt", "verify"):
        whole, parts = row[f"{kind}_ms"], row[f"{kind}_parts"]
        found = ", ".join(f"{part} {ms:.2f} ms ({percent(ms / whole)})" for part, ms in parts.items() if ms)
        print(f"{row['setting']}: {kind} step {whole:.1f} ms: {found}", flush=True)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inflate", type=float, default=9.0, help="how many times a draft's step a target's takes")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    workload = parallel.workload_for(BENCHMARK, FAMILY, options.inflate)
    rows = [measure(name, spec, workload, options.requests) for name, spec in SETTINGS.items()]
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
