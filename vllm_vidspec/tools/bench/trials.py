"""What a benchmark interleaved with vanilla is made of: its workload, its variants, their trials; no engine."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report

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
    # Further knobs of VidSpecConfig; those named parallel_* are of parallel variants alone
    knobs: dict[str, Any] = field(default_factory=dict)
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
    """One engine of a benchmark; `spec` are knobs of VidSpecConfig , None for vanilla.

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
        prefix = "parallel_"
        ours = {name: value for name, value in benchmark.knobs.items() if not name.startswith(prefix)}
        found = {"prune_ratio": benchmark.prune_ratio, "on_draft_error": "raise"} | (self.spec or {}) | ours
        if self.mode == PARALLEL:
            place: dict[str, Any] = {"device": benchmark.draft_device}
            if benchmark.draft_device == "cpu":
                place["cpu_cores"] = str(cores()[1])
            more = benchmark.knobs.keys() - ours.keys()
            found["parallel"] = place | {name.removeprefix(prefix): benchmark.knobs[name] for name in more}
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
        target = self.model(pairs.checkpoint(self.family, "target"), self.target_layers)
        draft = draft_model(self.family, variant.draft or benchmark.draft)
        if variant.spec is not None and draft != SELF_DRAFT:
            draft = self.model(draft, self.draft_layers)
        if variant.spec is None:
            llm = pairs.llm_kwargs(self.family, target=target)
        else:
            knobs = self.calibrated() | variant.knobs(benchmark)
            llm = pairs.llm_kwargs(self.family, draft, target=target, **knobs)
        warm_up, *videos = held_out
        prompts = {"family": self.family, "question": benchmark.question, "held_out": videos, "warm_up": warm_up}
        return {"llm": llm, "prompts": prompts, "cpus": [cores()[0]]}


def draft_model(family: str, draft: str) -> str:
    if draft == SELF_DRAFT:
        return draft
    try:
        return pairs.checkpoint(family, draft)
    except ValueError:
        if not Path(draft, "config.json").is_file():
            raise VidSpecError(f"--draft: {draft!r} is neither a role of the bundled pair nor a checkpoint") from None
        return draft


def cores() -> list[int]:
    """Return the cores that this process may use: the first is every target's, the second the parallel drafter's."""
    return sorted(os.sched_getaffinity(0))
