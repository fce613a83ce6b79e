"""`vidspec bench speed`: engines interleaved on the same requests.

Vanilla and two variants are alive at once, each in a subprocess, and one of them generates at a time: request by
request, in an order that changes. A figure is a median over rounds of what a round's trials give, so that what the
machine does meanwhile meets all of them alike. The target of every variant has one core, the same one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench import trials
from vllm_vidspec.tools.bench.rows import make_rows
from vllm_vidspec.tools.bench.trials import (
    PARALLEL,
    VANILLA_VARIANT,
    Benchmark,
    Trial,
    Variant,
    Workload,
    draft_model,
)
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

# Engines beside vanilla that are alive at once.
_AT_ONCE = 2


def check(benchmark: Benchmark, ratios: Sequence[float] = (0.0,)) -> None:
    """Refuse a wrong value, in one line, before an engine starts; `ratios` are those of the workloads."""
    for name in benchmark.knobs:
        if name in trials.OWN_OPTIONS:
            raise VidSpecError(f"--knob {name}: it has an option of its own, or is what is compared")
    for family in benchmark.families:
        pairs.pair_for(family)
        draft_model(family, benchmark.draft)
        for variant in (one for ratio in ratios for one in benchmark.variants(Workload(family, ratio))):
            if variant.mode == PARALLEL and benchmark.draft_device == "cpu" and len(trials.cores()) < 2:
                raise VidSpecError("the parallel drafter needs a core of its own: this process may use one only")
            if variant.is_ours:
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
        for workload in benchmark.workloads(family, report):
            variants = benchmark.variants(workload)
            with ExitStack() as stack:
                vanilla = stack.enter_context(_load(benchmark, workload, VANILLA_VARIANT, report))
                for number in range(0, max(1, len(variants)), _AT_ONCE):
                    sessions, chosen = {VANILLA_VARIANT: vanilla}, variants[number : number + _AT_ONCE]
                    answered, failed = run_variants(benchmark, workload, sessions, chosen, report)
                    failures += [{"family": family, "inflate": workload.ratio, **one} for one in failed]
                    found = make_rows(benchmark, workload, answered)
                    # Vanilla answers again beside each two of the others; its row is that beside the first.
                    rows += found if number == 0 else found[1:]
    return {"rows": rows, "failures": failures, "provenance": provenance() | {"cores": trials.cores()[:2]}}


def _load(benchmark: Benchmark, workload: Workload, variant: Variant, report: Report) -> EngineSession:
    """Return an engine that has every request of a benchmark before it; it starts when it is entered."""
    report("loading", {"label": f"{workload.family} {variant.method} {workload.label}".rstrip()})
    return benchmark.session(workload.job(benchmark, variant, list(range(benchmark.rounds * benchmark.requests + 1))))


def run_variants(
    benchmark: Benchmark,
    workload: Workload,
    sessions: dict[Variant, EngineSession],
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
