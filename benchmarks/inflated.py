"""Pairs whose target takes as much longer than the draft as is asked for: layers appended to one of them.

How many give a ratio of target time to draft time follows from two measured points each, a straight line between them.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import inflation
from benchmarks.methods import METHODS, STOCK
from benchmarks.session import BenchSession
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench import speed
from vllm_vidspec.tools.bench.speed import (
    PARALLEL,
    SELF_DRAFT,
    VANILLA_VARIANT,
    Benchmark,
    Variant,
    Workload,
    draft_model,
    draft_ms,
)
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

# The second point of each line.
TARGET_LAYERS, DRAFT_LAYERS = 16, 8
MOST_LAYERS = 512
# Others that use the machine make steps longer, never shorter: a low percentile is nearest to what a step takes alone.
PERCENTILE = 20


@dataclass(frozen=True)
class StepTimes:
    """What a step takes, in ms, by the number of layers appended."""

    target: tuple[float, float]  # A decode step of vanilla vLLM with one request: without any, and with TARGET_LAYERS
    draft: tuple[float, float]  # A forward of the drafter with one request: without any, and with DRAFT_LAYERS

    @property
    def natural(self) -> float:
        """The ratio of the pair as it is."""
        return self.target[0] / self.draft[0]

    def layers_for(self, ratio: float) -> tuple[int, int]:
        """Return how many layers to append to target and draft for a ratio; only one of them is inflated."""
        if ratio >= self.natural:
            found = (_number(self.target, TARGET_LAYERS, ratio * self.draft[0]), 0)
        else:
            found = (0, _number(self.draft, DRAFT_LAYERS, self.target[0] / ratio))
        if max(found) > MOST_LAYERS:
            raise VidSpecError(f"--inflate {ratio:g}: that takes {max(found)} layers; the most is {MOST_LAYERS}")
        return found


def _number(points: tuple[float, float], num_layers: int, wanted_ms: float) -> int:
    per_layer = (points[1] - points[0]) / num_layers
    if per_layer <= 0:
        raise VidSpecError(
            f"--inflate: {num_layers} layers more took no longer ({points[0]:.2f} and {points[1]:.2f} ms): "
            "the machine is too busy to measure"
        )
    return max(0, round((wanted_ms - points[0]) / per_layer))


def key_of(checkpoints: Sequence[str], what: Any) -> str:
    """Return what measured times are kept under: the checkpoints, how they are run, and the machine."""
    here = provenance()
    machine = [here[name] for name in ("versions", "device", "cpu", "num_cpus", "omp_threads")]
    text = json.dumps([*map(inflation.digest, checkpoints), what, machine], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def step_times(
    job: Callable[[bool, int, int], dict[str, Any]],
    path: Path,
    sampling: dict[str, Any],
    num_prompts: int,
    report: Report = silent,
) -> StepTimes:
    """Return the step times of a pair: those that `path` keeps, or newly measured ones, which it then keeps.

    `job` takes whether speculation is on, and the layers to append to target and draft. All four engines answer
    each of its prompts in turn.
    """
    try:
        kept = json.loads(path.read_text())
        return StepTimes(tuple(kept["target"]), tuple(kept["draft"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    points = ((False, 0, 0), (False, TARGET_LAYERS, 0), (True, 0, 0), (True, 0, DRAFT_LAYERS))
    report("plan", {"total": num_prompts * len(points)})
    found_ms: list[list[float]] = [[] for _ in points]
    with ExitStack() as stack:
        sessions = []
        for point in points:
            report("loading", {"label": f"to measure step times: layers appended {point[1]} and {point[2]}"})
            sessions.append(stack.enter_context(BenchSession(job(*point))))
        report("measuring", {})
        for index in range(num_prompts):
            for session, (drafts, _, _), one in zip(sessions, points, found_ms, strict=True):
                command = {"command": "clock", "index": index, "sampling": sampling, "seed": 0}
                answer = session.ask(command)
                if not drafts:
                    one += [1e3 * seconds for seconds in answer["step_s"]]
                elif (found := draft_ms(answer["metrics"])) is not None:
                    one.append(found)
                report("measured", {})
    alone, inflated, draft, inflated_draft = (low(one) for one in found_ms)
    times = StepTimes((alone, inflated), (draft, inflated_draft))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(times)))
    return times


def low(times: Sequence[float]) -> float:
    if not times:
        raise VidSpecError("--inflate: nothing was drafted while step times were measured")
    return times[0] if len(times) == 1 else statistics.quantiles(times, n=100, method="inclusive")[PERCENTILE - 1]


# How many requests tell what a step takes, and how long their answers are.
_TIMED_REQUESTS, _TIMED_TOKENS = 6, 48


@dataclass(frozen=True)
class InflatedWorkload(Workload):
    """A family's pair, its checkpoints padded with no-op layers."""

    @property
    def label(self) -> str:
        """How results name the pair, "" where it is as it is."""
        parts = (("target", self.target_layers), ("draft", self.draft_layers))
        return "; ".join(f"{role} {words}" for role, number in parts if (words := inflation.label(number)))

    def model(self, checkpoint: str, num_appended: int) -> str:
        return str(inflation.inflate(checkpoint, num_appended))

    def job(self, benchmark: Benchmark, variant: Variant, held_out: Sequence[int]) -> dict[str, Any]:
        """Return what `session_job` reads; vLLM's own way to draft has vLLM's own configuration."""
        if variant.mode != STOCK:
            return super().job(benchmark, variant, held_out)
        made, draft = super().job(benchmark, VANILLA_VARIANT, held_out), draft_model(self.family, benchmark.draft)
        model = made["llm"]["model"] if draft == SELF_DRAFT else self.model(draft, self.draft_layers)
        made["llm"]["speculative_config"] = {**(variant.spec or {}), "model": model}
        return made

    def calibrated(self) -> dict[str, Any]:
        return inflation.guidance_knobs(pairs.checkpoint(self.family, "target"), super().calibrated())


@dataclass(frozen=True)
class InflatedBenchmark(Benchmark):
    session = BenchSession

    inflate: tuple[float, ...] = (0.0,)  # ratios of target time to draft time; 0 is the pair as it is

    def workloads(self, family: str, report: Report) -> Iterator[Workload]:
        return (workload_for(self, family, ratio, report) for ratio in self.inflate)

    def reference(self, workload: Workload) -> Variant:
        """Return whose forwards a ratio is of: the parallel drafter's where there is one, else the draft's."""
        own = [one for one in self.variants(workload) if one.draft is None and one.is_ours]
        own.sort(key=lambda one: one.mode != PARALLEL)
        return own[0] if own else METHODS["SD-chain"].variant("SD-chain", workload.ratio)

    def check(self) -> None:
        """Refuse a wrong value, in one line, before an engine starts."""
        if wrong := [ratio for ratio in self.inflate if ratio and ratio < 1]:
            raise VidSpecError(
                f"--inflate {wrong[0]:g}: a ratio of target time to draft time is at least 1 (0: as it is)"
            )
        speed.check(self, self.inflate)
        if any(self.inflate) and any(draft_model(one, self.draft) == SELF_DRAFT for one in self.families):
            raise VidSpecError(f"--inflate: with --draft {SELF_DRAFT} there is no ratio to reach: layers slow both")


def workload_for(benchmark: InflatedBenchmark, family: str, ratio: float, report: Report = silent) -> Workload:
    """Return the pair of a family at a ratio; how many layers that takes is measured, and known from then on."""
    if not ratio:
        return InflatedWorkload(family)
    ours = benchmark.reference(Workload(family, ratio))
    videos = list(range(_TIMED_REQUESTS + 1))

    def job(drafts: bool, target_layers: int, draft_layers: int) -> dict[str, Any]:
        pair = InflatedWorkload(family, ratio, target_layers, draft_layers)
        return pair.job(benchmark, ours if drafts else VANILLA_VARIANT, videos)

    knobs = {name: value for name, value in ours.knobs(benchmark).items() if name != "num_speculative_tokens"}
    models = [pairs.checkpoint(family, "target"), draft_model(family, ours.draft or benchmark.draft)]
    models = [models[0] if model == SELF_DRAFT else model for model in models]
    key = key_of(models, [ours.mode, knobs])
    sampling = {"temperature": 0.0, "max_tokens": _TIMED_TOKENS}
    path = inflation.cache_folder() / f"steps-{key}.json"
    times = step_times(job, path, sampling, _TIMED_REQUESTS, report)
    return InflatedWorkload(family, ratio, *times.layers_for(ratio))
