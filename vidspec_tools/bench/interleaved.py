"""Engines interleaved on the same requests, for `vidspec bench speed` and `vidspec bench paper`.

Vanilla and two variants are alive at once, each in a subprocess, and one of them generates at a time: request by
request, in an order that changes. A figure is a median over rounds of what a round's trials give, so that what the
machine does meanwhile meets all of them alike. The target of every variant has one core, the same one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from vidspec_tools import inflation
from vidspec_tools.bench import ratios, trials
from vidspec_tools.bench.methods import PARALLEL, STOCK
from vidspec_tools.bench.rows import make_rows
from vidspec_tools.bench.session import BenchSession
from vidspec_tools.bench.trials import SELF_DRAFT, VANILLA_VARIANT, Benchmark, Trial, Variant, Workload, draft_model
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

# Engines beside vanilla that are alive at once.
_AT_ONCE = 2
# How many requests tell what a step takes, and how long their answers are.
_TIMED_REQUESTS, _TIMED_TOKENS = 6, 48


def check(benchmark: Benchmark) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    if wrong := [ratio for ratio in benchmark.inflate if ratio and ratio < 1]:
        raise VidSpecError(f"--inflate {wrong[0]:g}: a ratio of target time to draft time is at least 1 (0: as it is)")
    for name in benchmark.knobs:
        if name in trials.OWN_OPTIONS:
            raise VidSpecError(f"--knob {name}: it has an option of its own, or is what is compared")
    variants = [one for ratio in benchmark.inflate for one in benchmark.variants(ratio)]
    is_parallel = any(one.mode == PARALLEL for one in variants)
    if is_parallel and benchmark.draft_device == "cpu" and len(trials.cores()) < 2:
        raise VidSpecError("the parallel drafter needs a core of its own: this process may use one only")
    for family in benchmark.families:
        pairs.pair_for(family)
        if draft_model(family, benchmark.draft) == SELF_DRAFT and any(benchmark.inflate):
            raise VidSpecError(f"--inflate: with --draft {SELF_DRAFT} there is no ratio to reach: layers slow both")
        for variant in variants:
            if variant.mode != STOCK:
                draft = draft_model(family, variant.draft or benchmark.draft)
                parse_config(pairs.speculative_config(family, draft, **variant.knobs(benchmark)))


def run(benchmark: Benchmark, report: Report = silent) -> dict[str, Any]:
    """Return `rows` (vanilla's and one a variant, by family and ratio), `failures` (`family`, `inflate`, `method`,
    `reason`), `provenance`.
    """
    check(benchmark)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for family in benchmark.families:
        for ratio in benchmark.inflate:
            workload = workload_for(benchmark, family, ratio, report)
            variants = benchmark.variants(ratio)
            with ExitStack() as stack:
                vanilla = stack.enter_context(_load(benchmark, workload, VANILLA_VARIANT, report))
                for number in range(0, max(1, len(variants)), _AT_ONCE):
                    sessions, chosen = {VANILLA_VARIANT: vanilla}, variants[number : number + _AT_ONCE]
                    answered, failed = run_variants(benchmark, workload, sessions, chosen, report)
                    failures += [{"family": family, "inflate": ratio, **one} for one in failed]
                    found = make_rows(benchmark, workload, answered)
                    # Vanilla answers again beside each two of the others; its row is that beside the first.
                    rows += found if number == 0 else found[1:]
    return {"rows": rows, "failures": failures, "provenance": provenance() | {"cores": trials.cores()[:2]}}


def workload_for(benchmark: Benchmark, family: str, ratio: float, report: Report = silent) -> Workload:
    """Return the pair of a family at a ratio; how many layers that takes is measured, and known from then on."""
    if not ratio:
        return Workload(family)
    ours = benchmark.reference(ratio)
    videos = list(range(_TIMED_REQUESTS + 1))

    def job(drafts: bool, target_layers: int, draft_layers: int) -> dict[str, Any]:
        pair = Workload(family, ratio, target_layers, draft_layers)
        return pair.job(benchmark, ours if drafts else VANILLA_VARIANT, videos)

    knobs = {name: value for name, value in ours.knobs(benchmark).items() if name != "num_speculative_tokens"}
    models = [pairs.checkpoint(family, "target"), draft_model(family, ours.draft or benchmark.draft)]
    models = [models[0] if model == SELF_DRAFT else model for model in models]
    key = ratios.key_of(models, [ours.mode, knobs])
    sampling = {"temperature": 0.0, "max_tokens": _TIMED_TOKENS}
    path = inflation.cache_folder() / f"steps-{key}.json"
    times = ratios.step_times(job, path, sampling, _TIMED_REQUESTS, report)
    return Workload(family, ratio, *times.layers_for(ratio))


def _load(benchmark: Benchmark, workload: Workload, variant: Variant, report: Report) -> BenchSession:
    """Return an engine that has every request of a benchmark before it; it starts when it is entered."""
    report("loading", {"label": f"{workload.family} {variant.method} {workload.label}".rstrip()})
    return BenchSession(workload.job(benchmark, variant, list(range(benchmark.rounds * benchmark.requests + 1))))


def run_variants(
    benchmark: Benchmark,
    workload: Workload,
    sessions: dict[Variant, BenchSession],
    variants: Sequence[Variant],
    report: Report,
) -> tuple[dict[Variant, list[list[Trial]]], list[dict[str, Any]]]:
    """Let engines that run already, and a new one of each variant, answer every request in turn; return the trials of
    each that went through, `[rounds][requests]`, and of each that did not `method` and `reason`.
    """
    failures = []
    with ExitStack() as stack:
        for variant in variants:
            try:
                sessions[variant] = stack.enter_context(_load(benchmark, workload, variant, report))
            except VidSpecError as error:
                failures.append({"method": variant.method, "reason": str(error)})
        answered: dict[Variant, list[list[Trial]]] = {one: [[] for _ in range(benchmark.rounds)] for one in sessions}
        report("plan", {"total": benchmark.rounds * benchmark.requests * len(sessions)})
        report("measuring", {})
        for number, index, variant in order(benchmark, list(sessions)):
            if variant not in sessions:
                continue
            try:
                command = {"command": "clock", "index": index, "sampling": benchmark.sampling}
                answer = sessions[variant].ask(command | {"seed": benchmark.seed + index})
                answered[variant][number].append(Trial(**answer))
            except VidSpecError as error:
                if variant is VANILLA_VARIANT:
                    raise
                failures.append({"method": variant.method, "reason": str(error)})
                del sessions[variant], answered[variant]
            report("measured", {})
    return answered, failures


def order(benchmark: Benchmark, variants: Sequence[Variant]) -> Iterator[tuple[int, int, Variant]]:
    """Yield round, request and variant of each trial; who comes first changes with every request."""
    for index in range(benchmark.rounds * benchmark.requests):
        first = index % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            yield index // benchmark.requests, index, variant
