"""Pairs whose target takes as much longer than the draft as is asked for: layers appended to one of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import inflation, ratios
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
)
from vllm_vidspec.tools.progress import Report, silent

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
    key = ratios.key_of(models, [ours.mode, knobs])
    sampling = {"temperature": 0.0, "max_tokens": _TIMED_TOKENS}
    path = inflation.cache_folder() / f"steps-{key}.json"
    times = ratios.step_times(job, path, sampling, _TIMED_REQUESTS, report)
    return InflatedWorkload(family, ratio, *times.layers_for(ratio))
