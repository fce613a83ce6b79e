"""`vidspec bench speed`: engines interleaved on the same requests.

Vanilla and two variants are alive at once, each in a subprocess, and one of them generates at a time: request by
request, in an order that changes. A figure is a median over rounds of what a round's trials give, so that what the
machine does meanwhile meets all of them alike. The target of every variant has one core, the same one.
"""

import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_vidspec.assets import FAR
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.acceptance import identical_frac
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

VANILLA, SEQUENTIAL, PARALLEL = "vanilla", "sequential", "parallel"  # how an engine drafts
WINDOW = 5  # drafts of a step where nothing else is said
SELF_DRAFT = "target"  # what is a draft that is the target itself
# Knobs that have an option of their own, or are what is compared.
OWN_OPTIONS = (
    *("pruner", "prune_ratio", "num_speculative_tokens", "parallel", "scorer"),
    *("model", "draft", "drafting", "draft_shape"),
)


@dataclass(frozen=True)
class Trial:
    """One request that one engine answered alone; see `session_job.Engine.clock`."""

    token_ids: list[int]
    ttft_s: float
    decode_s: float
    step_s: list[float]
    verified: list[list[int]]
    metrics: dict[str, int] | None

    @property
    def num_streams(self) -> int:
        """Streams of drafts that the answer took: one ends where a draft is rejected, the last one with the answer.

        A fully accepted window ends its stream if the target's own token behind it is not the stream's; the stream
        is then found stale before anything else of it is verified.
        """
        found, is_new = 1, True
        for drafted, accepted, stale in self.verified:
            if accepted < drafted or (stale and not is_new):
                found += 1
                is_new = True
            elif drafted:
                is_new = False
        return found

    @property
    def num_decoded(self) -> int:
        """Tokens that came in `decode_s`: all but the first."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class Benchmark:
    """What to measure: one setting beside vanilla, which is what other benchmarks build on."""

    session: ClassVar[type[EngineSession]] = EngineSession  # what runs an engine

    families: tuple[str, ...] = ("qwen2.5-vl",)  # bundled pairs
    target: str | None = None  # a checkpoint in place of the bundled target
    # Of the setting; `prune_ratio`, `drafting` (the draft's shape), `scorer`, `parallel` and `num_speculative_tokens`
    # (K; None: WINDOW, or what the tree's shape has) too
    pruner: str = "specvlm"
    prune_ratio: float = 0.9
    drafting: str = "chain"
    scorer: str = "strict"
    parallel: bool = False
    num_speculative_tokens: int | None = None
    requests: int = 4  # held-out videos of a round, each asked for alone; every round has its own
    max_tokens: int = 128  # longest answer in tokens
    rounds: int = 5  # how many
    temperature: float = 0.0  # of all requests
    seed: int = 0  # request i of all samples with seed + i
    draft: str = "draft"  # which model drafts: "draft", "target" (itself), another role of the bundled pair, or a path
    draft_device: str = "cpu"  # where the parallel drafter runs
    knobs: dict[str, Any] = field(default_factory=dict)  # further ones of VidSpecConfig
    question: str = pairs.DEFAULT_QUESTION  # what is asked about each video

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}

    def workloads(self, family: str, report: Report) -> Iterable["Workload"]:
        """Return the pairs of a family to measure on."""
        return (Workload(family),)

    def variants(self, workload: "Workload") -> list["Variant"]:
        """Return what runs beside vanilla on a pair, in the order of the rows."""
        spec = {name: getattr(self, name) for name in ("pruner", "prune_ratio", "drafting", "scorer")}
        tokens = self.num_speculative_tokens or (WINDOW if self.drafting == "chain" else None)
        if tokens is not None:
            spec["num_speculative_tokens"] = tokens
        return [Variant("vidspec", PARALLEL if self.parallel else SEQUENTIAL, spec)]


@dataclass(frozen=True, eq=False)  # a key, each one itself
class Variant:
    """One engine of a benchmark; `spec` are knobs of VidSpecConfig, None for vanilla.

    `draft` is which model drafts, None: the one that is asked for.
    """

    method: str
    mode: str
    spec: dict[str, Any] | None = None
    draft: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.mode in (SEQUENTIAL, PARALLEL)

    def knobs(self, benchmark: Benchmark) -> dict[str, Any]:
        """Return the knobs of this engine; `parallel` names the drafter's place."""
        found = {"prune_ratio": benchmark.prune_ratio, "on_draft_error": "raise"} | (self.spec or {}) | benchmark.knobs
        if self.mode == PARALLEL:
            place = {"cpu_cores": str(cores()[1])} if benchmark.draft_device == "cpu" else {}
            found["parallel"] = {"device": benchmark.draft_device, **place}
        return found


VANILLA_VARIANT = Variant(VANILLA, VANILLA)


@dataclass(frozen=True)
class Workload:
    """The pair that a benchmark runs on: a family, and how results name it where it is not as it is bundled."""

    family: str
    ratio: float = 0.0  # target time to draft time that the pair was made for; 0: as it is
    target_layers: int = 0  # appended to the target
    draft_layers: int = 0  # appended to the draft

    @property
    def label(self) -> str:
        return ""

    def model(self, checkpoint: str, num_appended: int) -> str:
        """Return the checkpoint that runs in place of one of the family's."""
        return checkpoint

    def calibrated(self) -> dict[str, Any]:
        """Return the knobs that the family's pair is calibrated to."""
        return pairs.calibrated(self.family)

    def job(self, benchmark: Benchmark, variant: Variant, held_out: Sequence[int]) -> dict[str, Any]:
        """Return what `session_job` reads; the first of `held_out` is a warm-up, which is part of no figure."""
        target = self.model(benchmark.target or pairs.checkpoint(self.family, "target"), self.target_layers)
        draft = draft_model(self.family, variant.draft or benchmark.draft)
        if variant.spec is not None and draft != SELF_DRAFT:
            draft = self.model(draft, self.draft_layers)
        if variant.spec is None:
            llm = pairs.llm_kwargs(self.family, target=target)
        else:
            knobs = ({} if benchmark.target else self.calibrated()) | variant.knobs(benchmark)
            llm = pairs.llm_kwargs(self.family, draft, target=target, **knobs)
        warm_up, *videos = held_out
        prompts = {"family": self.family, "question": benchmark.question, "held_out": videos, "warm_up": warm_up}
        return {"llm": llm, "prompts": prompts, "cpus": [cores()[0]]}


def draft_model(family: str, draft: str) -> str:
    """Return the checkpoint of a draft, `SELF_DRAFT` for the target itself; a VidSpecError for one that is none."""
    pairs.check_draft(family, draft)
    return pairs.checkpoint(family, draft) if draft in ("draft", FAR) else draft


def cores() -> list[int]:
    """Return the cores that this process may use: the first is every target's, the second the parallel drafter's."""
    return sorted(os.sched_getaffinity(0))


# Engines beside vanilla that are alive at once.
_AT_ONCE = 2


def check(benchmark: Benchmark, ratios: Sequence[float] = (0.0,)) -> None:
    """Refuse a wrong value, in one line, before an engine starts; `ratios` are those of the workloads."""
    for name in benchmark.knobs:
        if name in OWN_OPTIONS:
            raise VidSpecError(f"--knob {name}: it has an option of its own, or is what is compared")
    if benchmark.target is not None:
        pairs.check_checkpoint("--target", benchmark.target)
    for family in benchmark.families:
        pairs.pair_for(family)
        draft_model(family, benchmark.draft)
        for variant in (one for ratio in ratios for one in benchmark.variants(Workload(family, ratio))):
            if variant.mode == PARALLEL and benchmark.draft_device == "cpu" and len(cores()) < 2:
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
    return {"rows": rows, "failures": failures, "provenance": provenance() | {"cores": cores()[:2]}}


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


# ---- rows ------------------------------------------------------------------------------------------------------------

# What drafting takes of a request, by our counters; the rest is the target's and the host's.
PHASES = ("guidance", "draft_prefill", "draft_decode", "relevance")
_SHARED = ("requests", "rounds", "max_tokens", "temperature", "seed", "knobs")  # fields of `Benchmark`


def make_rows(
    benchmark: Benchmark, workload: Workload, trials: Mapping[Variant, Sequence[Sequence[Trial]]]
) -> list[dict[str, Any]]:
    """Return a row for each variant, of its trials `[rounds][requests]`; the first is vanilla."""
    vanilla = next(iter(trials.values()))
    target_ms = 1e3 * statistics.median(seconds for one in flat(vanilla) for seconds in one.step_s)
    rows = []
    for variant, rounds in trials.items():
        spec = variant.spec or {}
        rows.append(
            {
                "family": workload.family,
                "inflate": workload.ratio,
                "label": workload.label,
                "mode": variant.mode,
                "method": variant.method,
                "drafting": spec.get("drafting", "chain") if spec else None,
                "pruner": spec.get("pruner"),
                "scorer": spec.get("scorer"),
                "prune_ratio": variant.knobs(benchmark)["prune_ratio"] if variant.is_ours else None,
                "num_speculative_tokens": _num_tokens(spec),
                **figures(rounds, vanilla),
                **speculation(rounds, variant),
                "t_target_ms": target_ms,
                **ratio_of(target_ms, rounds),
                **{name: getattr(benchmark, name) for name in _SHARED},
                **{name: getattr(workload, name) for name in ("target_layers", "draft_layers")},
                **phases(rounds),
            }
        )
    return rows


def _num_tokens(spec: Mapping[str, Any]) -> int | None:
    """Return K of a variant, None for vanilla."""
    if not spec:
        return None
    return spec.get("num_speculative_tokens") or pairs.num_speculative_tokens(spec.get("drafting", "chain"))


def flat(rounds: Sequence[Sequence[Trial]]) -> list[Trial]:
    return [trial for one in rounds for trial in one]


def figures(rounds: Sequence[Sequence[Trial]], vanilla: Sequence[Sequence[Trial]]) -> dict[str, Any]:
    """Return what any engine has: speed, beside vanilla in the same round, and whether the answers are vanilla's."""
    found: dict[str, Any] = {}
    by_round = {
        "speedup": [tokens_per_s(ours) / tokens_per_s(theirs) for ours, theirs in zip(rounds, vanilla, strict=True)],
        "tokens_per_s": [tokens_per_s(one) for one in rounds],
        "inter_token_ms": [1e3 / tokens_per_s(one) for one in rounds],
        "ttft_s": [statistics.median(trial.ttft_s for trial in one) for one in rounds],
    }
    for name, values in by_round.items():
        found |= middle(name, values)
    ours, theirs = flat(rounds), flat(vanilla)
    steps = sorted(1e3 * seconds for trial in ours for seconds in trial.step_s)
    return found | {
        "identical_frac": identical_frac([one.token_ids for one in ours], [one.token_ids for one in theirs]),
        "output_tokens": sum(len(trial.token_ids) for trial in ours),
        "forwards": statistics.mean(len(trial.step_s) for trial in ours),
        "t_step_ms": statistics.median(steps),
        "t_step_ms_p99": steps[round(0.99 * (len(steps) - 1))],
    }


def phases(rounds: Sequence[Sequence[Trial]]) -> dict[str, float | None]:
    """Return the mean time of a request, and what of it drafting took, in ms; None for vanilla."""
    trials, counters = flat(rounds), gained(rounds)
    return {
        "request_ms": 1e3 * statistics.mean(trial.ttft_s + trial.decode_s for trial in trials),
        **{f"{name}_ms": 1e-3 * counters[f"{name}_us"] / len(trials) if counters else None for name in PHASES},
    }


def tokens_per_s(trials: Sequence[Trial]) -> float:
    """Return the tokens per second of some trials, from each one's first token to its last."""
    seconds = sum(trial.decode_s for trial in trials)
    if not seconds:
        raise VidSpecError("no answer has a second token: there is no decode to measure")
    return sum(trial.num_decoded for trial in trials) / seconds


def middle(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the columns of a figure: its median under its name, and its 20th and 80th percentiles."""
    cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values
    return {name: statistics.median(values), f"{name}_p20": cuts[0], f"{name}_p80": cuts[-1]}


def gained(rounds: Sequence[Sequence[Trial]]) -> dict[str, int] | None:
    """Return our counters' gain over all trials, None for vanilla."""
    found = [trial.metrics for trial in flat(rounds) if trial.metrics is not None]
    return {name: sum(one[name] for one in found) for name in found[0]} if found else None


def speculation(rounds: Sequence[Sequence[Trial]], variant: Variant) -> dict[str, Any]:
    """Return what became of the drafts; None for vanilla, and where a mode has no such thing. `late_frac` is the share
    of decode steps whose stream was too short, `stream_length` tokens per stream: one ends where a draft is rejected,
    or with the answer.
    """
    names = ("late_drafts", "stale_streams", "stream_tokens", "drafter_restarts")
    empty = ("acceptance_length", "acceptance_rate", "late_frac", "stream_length", "num_drafts", *names)
    found: dict[str, Any] = dict.fromkeys(empty)
    counters = gained(rounds)
    if counters is None:
        return found
    trials = flat(rounds)
    num_decoded, num_steps = sum(trial.num_decoded for trial in trials), sum(len(trial.step_s) for trial in trials)
    summary = summarize(counters)
    found |= {name: summary[name] for name in ("acceptance_length", "acceptance_rate", "num_drafts")}
    if variant.mode == PARALLEL:
        found |= {name: counters[name] for name in names}
        found["late_frac"] = counters["late_drafts"] / num_steps if num_steps else None
    # No tree is accepted whole, and counters of others are not read at each step.
    if variant.is_ours and (variant.spec or {}).get("drafting", "chain") == "chain":
        found["stream_length"] = num_decoded / sum(trial.num_streams for trial in trials)
    return found


def ratio_of(target_ms: float, rounds: Sequence[Sequence[Trial]]) -> dict[str, float | None]:
    """Return the draft's time of a forward, the median of its requests', and the target's of a step divided by it."""
    times = [found for trial in flat(rounds) if trial.metrics and (found := draft_ms(trial.metrics)) is not None]
    if not times:
        return {"t_draft_ms": None, "ratio": None}
    draft = statistics.median(times)
    return {"t_draft_ms": draft, "ratio": target_ms / draft}


def draft_ms(counters: dict[str, int]) -> float | None:
    """Return the mean time of a draft forward in ms, what goes with one included; None where there was none."""
    return 1e-3 * counters["draft_decode_us"] / counters["draft_forwards"] if counters["draft_forwards"] else None
