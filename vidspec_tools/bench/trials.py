"""What a benchmark interleaved with vanilla is made of: its workload, its variants, their trials; no engine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vidspec_tools import inflation
from vidspec_tools.bench.methods import METHODS, PARALLEL, SEQUENTIAL, STOCK, VANILLA, WINDOW, Method, parallel_window
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs

SELF_DRAFT = "target"  # what is a draft that is the target itself
# Knobs that have an option of their own, or are what is compared.
OWN_OPTIONS = (
    *("pruner", "prune_ratio", "num_speculative_tokens", "parallel", "scorer"),
    *("model", "draft_shape"),
)


@dataclass(frozen=True)
class Trial:
    """One request that one engine answered alone; see `BenchEngine.clock`."""

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

    families: tuple[str, ...] = ("qwen2.5-vl",)  # bundled pairs
    inflate: tuple[float, ...] = (0.0,)  # ratios of target time to draft time; 0 is the pair as it is
    # Of the setting; `prune_ratio`, `drafting` (the draft's shape), `scorer`, `parallel` and `num_speculative_tokens`
    # (K; None: `parallel_window` in parallel, else 5 or what the tree's shape has) too
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

    def variants(self, ratio: float) -> list["Variant"]:
        """Return what runs beside vanilla at a ratio, in the order of the rows."""
        spec = {name: getattr(self, name) for name in ("pruner", "prune_ratio", "drafting", "scorer")}
        tokens = self.num_speculative_tokens
        if tokens is None and self.drafting == "chain":
            tokens = parallel_window(ratio) if self.parallel else WINDOW
        if tokens is not None:
            spec["num_speculative_tokens"] = tokens
        return [Variant("vidspec", PARALLEL if self.parallel else SEQUENTIAL, spec)]

    def reference(self, ratio: float) -> "Variant":
        """Return whose forwards a ratio is of: the parallel drafter's where there is one, else the draft's."""
        own = [one for one in self.variants(ratio) if one.draft is None and one.mode != STOCK]
        own.sort(key=lambda one: one.mode != PARALLEL)
        return own[0] if own else Variant.of("SD-chain", METHODS["SD-chain"], ratio)


@dataclass(frozen=True, eq=False)  # a key, each one itself
class Variant:
    """One engine of a benchmark; `spec` are knobs of VidSpecConfig, None for vanilla; `draft` is as in `Method`."""

    method: str
    mode: str
    spec: dict[str, Any] | None = None
    draft: str | None = None

    @classmethod
    def of(cls, name: str, method: Method, ratio: float) -> "Variant":
        """Return the engine that runs a method of the papers at a ratio."""
        tokens = {"num_speculative_tokens": parallel_window(ratio)} if method.mode == PARALLEL else {}
        return cls(name, method.mode, method.spec | tokens, method.draft)

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
    """The pair that a benchmark runs on: a family, its checkpoints padded with no-op layers."""

    family: str
    ratio: float = 0.0
    target_layers: int = 0
    draft_layers: int = 0

    def job(self, benchmark: Benchmark, variant: Variant, held_out: Sequence[int]) -> dict[str, Any]:
        """Return what `session_job` reads; the first of `held_out` is a warm-up, which is part of no figure."""
        original = pairs.checkpoint(self.family, "target")
        target = str(inflation.inflate(original, self.target_layers))
        draft = draft_model(self.family, variant.draft or benchmark.draft)
        if variant.spec is not None and draft != SELF_DRAFT:
            draft = str(inflation.inflate(draft, self.draft_layers))
        if variant.spec is None:
            llm = pairs.llm_kwargs(self.family, target=target)
        elif variant.mode == STOCK:
            model = {"model": target if draft == SELF_DRAFT else draft}
            llm = pairs.llm_kwargs(self.family, target=target, overrides={"speculative_config": variant.spec | model})
        else:
            knobs = inflation.guidance_knobs(original, pairs.calibrated(self.family)) | variant.knobs(benchmark)
            llm = pairs.llm_kwargs(self.family, draft, target=target, **knobs)
        warm_up, *videos = held_out
        prompts = {"family": self.family, "question": benchmark.question, "held_out": videos, "warm_up": warm_up}
        return {"llm": llm, "prompts": prompts, "cpus": [cores()[0]]}

    @property
    def label(self) -> str:
        """How results name the pair, "" where it is as it is."""
        parts = (("target", self.target_layers), ("draft", self.draft_layers))
        return "; ".join(f"{role} {words}" for role, number in parts if (words := inflation.label(number)))


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
