"""Three small measurements, each in an engine of this process.

    python -m benchmarks.small_cases auto-pruner --family qwen2.5-vl --learn 200 --measure 100 --json auto.json
    python -m benchmarks.small_cases draft-parameters --videos 24 --cases top-p
    python -m benchmarks.small_cases overheads --inflate 9 --requests 12

`auto-pruner`: what `pruner: auto` reaches, beside every pruner that it chooses from, on the same requests.
All of it in one engine.
First so many requests are given whatever auto gives them, while it learns; then the next ones are asked with auto,
which
goes on learning, and with each pruner for all of them. A second run of each bundled family has its guidance turned
upside down (emulated: every score is taken from the greatest): there the guided pruners are the worst choice. A long
pair is asked about reels of `--tokens` video tokens.

`draft-parameters`: what drafts lose by ignoring a sampling parameter that the target applies. A draft under a
temperature and noise alone is one CUDA graph; one whose logits vLLM processes is a graph a level, with launches
between. So a parameter should be processed where that raises acceptance, and not otherwise. Both variants take turns
in one engine: the mean number of tokens a verify step, processed and ignored. The text is the target's in both.

`overheads`: what of a step guidance, pruning, relevance, tree building and scoring take, beside an inflated target, one
request at a time, greedily, one engine per setting. Our calls are wrapped on the live objects; what they call of the
draft's forwards and of vLLM is taken off; `the rest` is all else of ours. Two kinds of steps: the prompt's, from a
request's arrival to the first step that verifies drafts, and verify steps; medians of each. On the CPU engine a
kernel's reference does the work that a GPU would be told to do: shares are of such steps.
"""

import argparse
import contextlib
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks import harness, inflated, reel
from vllm_vidspec import assets, metrics
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench import speed

# ---- auto-pruner -----------------------------------------------------------------------------------------------------

BATCH = 16


@contextlib.contextmanager
def upside_down() -> Iterator[None]:
    """Invert the guidance scores: the most attended token ranks last."""
    from vllm_vidspec.pruning import prompt

    choose = prompt.choose_kept

    def opposite(unit: Any, knobs: Any, scores: Any, embeddings: Any) -> Any:
        return choose(unit, knobs, None if scores is None else scores.max() - scores, embeddings)

    with mock.patch("vllm_vidspec.engine.draft.prefill.choose_kept", opposite):
        yield


def start(family: str, tokens: int) -> harness.Engine:
    if family not in assets.LONG_PAIRS:
        return harness.pair(family, pruner="auto", overrides={"enable_prefix_caching": False})
    from benchmarks.long import job

    llm = job(tokens, range(1), {"pruner": "auto", "prune_ratio": 0.9}, family=family)["llm"]
    return harness.Engine(llm | {"enable_prefix_caching": False})


def prompts(family: str, numbers: range, tokens: int) -> list[harness.Row]:
    if family not in assets.LONG_PAIRS:
        return harness.videos(family, numbers)
    reels = (reel.held_out(i, tokens) for i in numbers)
    return [pairs.video_prompt(family, frames, question.text) for frames, question, _ in reels]


def ask(engine: harness.Engine, family: str, numbers: range, tokens: int) -> tuple[float, list[list[int]]]:
    """Return the acceptance length over requests about these held-out videos, and their answers."""
    longest = 160 if family in assets.LONG_PAIRS else 64
    batches = [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]
    answers, gained = engine.measure(
        lambda: [
            text for batch in batches for text in engine.answer(prompts(family, batch, tokens), max_tokens=longest)
        ]
    )
    return float(metrics.summarize(gained)["acceptance_length"] or 0.0), answers


def race(family: str, learn: int, measure: int, tokens: int) -> harness.Row:
    with start(family, tokens) as engine:
        config = engine.llm.llm_engine.vllm_config
        pruners = config.additional_config["vidspec"]["prune"]["auto_pruners"]
        while_learning, _ = ask(engine, family, range(learn), tokens)
        numbers = range(learn, learn + measure)
        with_auto, answers = ask(engine, family, numbers, tokens)
        counted = engine.counters()
        fixed, same = {}, True
        for pruner in pruners:
            engine.llm.collective_rpc("vidspec_retune", args=({"pruner": pruner},))
            fixed[pruner], others = ask(engine, family, numbers, tokens)
            same &= others == answers
    best = max(fixed, key=fixed.__getitem__)
    return {
        "family": family,
        "learned_from": learn,
        "measured_on": measure,
        "while_learning": while_learning,
        "auto": with_auto,
        **fixed,
        "best": best,
        "share_of_best": with_auto / fixed[best],
        "requests_by_pruner": {pruner: counted[f"auto_requests_{pruner}"] for pruner in pruners},
        "identical": same,
    }


def auto_pruner(options: argparse.Namespace) -> Iterator[harness.Row]:
    for family in options.family:
        for guidance in ("never trained",) if family in assets.CLONE_ONLY else ("as trained", "upside down"):
            with upside_down() if guidance == "upside down" else contextlib.nullcontext():
                yield {"guidance": guidance, **race(family, options.learn, options.measure, options.tokens)}


# ---- draft-parameters ------------------------------------------------------------------------------------------------

SAMPLING: dict[str, dict[str, float]] = {
    "T 0": {"temperature": 0.0},
    "T 0, repetition 1.05": {"temperature": 0.0, "repetition_penalty": 1.05},
    "T 0, repetition 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "T 0, repetition 1.2": {"temperature": 0.0, "repetition_penalty": 1.2},
    "T 0.7, repetition 1.05": {"temperature": 0.7, "repetition_penalty": 1.05},
    "T 1, presence 0.6, frequency 0.4": {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "T 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "T 0.7, top-p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "T 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "T 1, top-k 1": {"temperature": 1.0, "top_k": 1},
    "T 0.7, top-k 20": {"temperature": 0.7, "top_k": 20},
    "T 1, top-k 5": {"temperature": 1.0, "top_k": 5},
    "T 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def always(self: CoupledSampler, rows_np: Any) -> bool:
    """Process whatever vLLM flags."""
    return bool(self._sampler.needs_logits_processing[rows_np].any())


def draft_parameters(options: argparse.Namespace) -> Iterator[harness.Row]:
    from vllm import SamplingParams

    for family in pairs.FAMILIES:
        with harness.pair(family, pruner="uniform", prune_ratio=0.9, num_speculative_tokens=5) as engine:
            prompts = harness.videos(family, range(options.videos))
            for name in filter(re.compile(options.cases).search, SAMPLING):
                row: harness.Row = {"family": family, "case": name}
                for way, needs in (("processed", always), ("ignored", lambda self, rows_np: False)):
                    params = [
                        SamplingParams(seed=i, max_tokens=options.max_tokens, **SAMPLING[name])
                        for i in range(options.videos)
                    ]
                    with mock.patch.object(CoupledSampler, "needs_processors", needs):
                        _, gained = engine.measure(engine.llm.generate, prompts, params, use_tqdm=False)
                    row[way] = round(1 + gained["accepted_tokens"] / gained["drafts"], 3)
                yield row | {"lost": round(1 - row["ignored"] / row["processed"], 4)}


# ---- overheads -------------------------------------------------------------------------------------------------------

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
        from vllm_vidspec.engine.hooks.prompts import PendingScores

        drafts = runner.speculator.backend.drafter
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
        for trees in drafts.trees.values():  # one shape is drafted
            wrapped += [
                (trees.policy, ("begin", "extend", "send", "finish"), "tree building"),
                (CoupledSampler, ("candidates_into",), "tree building"),
                (drafts.buffers, ("place",), "tree building"),
                (runner.trees, ("before_forward", "after_forward", "compact"), "tree building"),
            ]
        for owner, names, component in wrapped:
            for name in names:
                self._watch.wrap(owner, name, component)


def overheads(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Start an engine for each setting, and yield what a prompt's steps and a verify step take, and their parts."""
    workload = inflated.workload_for(BENCHMARK, FAMILY, options.inflate)
    for name, spec in SETTINGS.items():
        variant = speed.Variant("vidspec", speed.SEQUENTIAL, {"prune_ratio": 0.9} | spec)
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


CASES: dict[str, tuple[Callable[[argparse.Namespace], Iterator[harness.Row]], dict[str, Any]]] = {
    "auto-pruner": (
        auto_pruner,
        {
            "family": [name for name in pairs.PAIRS if name not in assets.LONG_PAIRS],
            "learn": 200,
            "measure": 100,
            "tokens": 1024,
        },
    ),
    "draft-parameters": (draft_parameters, {"videos": 24, "max_tokens": 80, "cases": ""}),
    "overheads": (overheads, {"inflate": 9.0, "requests": 12}),
}

if __name__ == "__main__":
    rows = harness.cases(__doc__, CASES)
    sys.exit(int(not all(row.get("identical", True) for row in rows)))
