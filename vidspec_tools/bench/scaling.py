"""`vidspec bench scaling`: speed and acceptance over one axis, interleaved with vanilla; a run can be resumed."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from vidspec_tools import inflation
from vidspec_tools.bench import parallel, ratios, trials
from vidspec_tools.bench.acceptance import identical_frac
from vidspec_tools.bench.rows import added, middle, spec_tokens
from vidspec_tools.bench.session import BenchSession
from vidspec_tools.bench.speed import SpeedBenchmark
from vidspec_tools.bench.trials import SELF_DRAFT, VANILLA_VARIANT, Variant, Workload, draft_model
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_output, writing

VIDEO_TOKENS = 256  # of a whole video of the bundled pairs; LLaVA-OneVision's newline comes on top
MAX_POSITIONS = 16384  # of the bundled models
# What may be varied: a field of ScalingBenchmark -> the values where none are given.
AXES: dict[str, tuple[float, ...]] = {
    "video_tokens": (128, 256, 512, 1024, 2048, 4096, 8192),
    "batch_size": (1, 2, 4, 8, 16, 32),
    "num_speculative_tokens": (1, 2, 3, 5, 8, 10),
    "prune_ratio": (0.0, 0.5, 0.8, 0.9, 0.95, 1.0),
}
SPREADING = ("speedup", "tokens_per_s", "ttft_s", "inter_token_ms")
_FRACTIONS = ("prune_ratio",)  # the axes whose values are no whole numbers


@dataclasses.dataclass(frozen=True)
class ScalingBenchmark(SpeedBenchmark):
    """What to measure: a setting beside vanilla at each value of one axis.

    Attributes:
        axis: Of AXES.
        values: Its values; what has the axis' name otherwise is not used.
        batch_size: Requests that are handed in at once.
        video_tokens: Of each request: whole videos, one after another, or a part of one's frames.
        resume: A file of finished points, which a later run does not measure again.
    """

    is_watched: ClassVar[bool] = False

    axis: str = "batch_size"
    values: tuple[float, ...] = ()
    batch_size: int = 1
    video_tokens: int = VIDEO_TOKENS
    resume: str | None = None

    def at(self, value: float) -> "ScalingBenchmark":
        """Return what is measured at one value."""
        changed: dict[str, Any] = {self.axis: value if self.axis in _FRACTIONS else int(value)}
        return dataclasses.replace(self, **changed)

    @property
    def num_videos(self) -> int:
        """Videos of a request."""
        return max(1, self.video_tokens // VIDEO_TOKENS)

    def job(self, workload: Workload, variant: Variant) -> dict[str, Any]:
        """Return what `session_job` reads; every round has requests of its own, and the warm-up comes before them."""
        job = workload.job(self, variant, list(range(self.rounds * self.batch_size + 1)))
        # A request has text between its videos, and Qwen3-VL a time before every two frames.
        longest = 2 * self.video_tokens + self.max_tokens + 256
        job["llm"] |= {
            "max_model_len": min(MAX_POSITIONS, max(pairs.MAX_MODEL_LEN, longest)),
            "max_num_seqs": max(pairs.MAX_NUM_SEQS, self.batch_size),
            "limit_mm_per_prompt": {"video": self.num_videos},
        }
        job["prompts"] |= {"num_videos": self.num_videos, "video_frac": min(1.0, self.video_tokens / VIDEO_TOKENS)}
        return job


def check(benchmark: ScalingBenchmark) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    if benchmark.axis not in AXES:
        raise VidSpecError(f"--axis: {benchmark.axis!r} is none of {', '.join(AXES)}")
    if not benchmark.values:
        raise VidSpecError("--values: there is none")
    for value in benchmark.values:
        if benchmark.axis not in _FRACTIONS and (value != int(value) or value < 1):
            raise VidSpecError(f"--values: {value:g} is no {benchmark.axis.replace('_', ' ')}")
        point = benchmark.at(value)
        if point.video_tokens % VIDEO_TOKENS and point.video_tokens not in (64, 128):
            raise VidSpecError(f"--values: {value:g} video tokens: 64, 128 or a multiple of {VIDEO_TOKENS}")
        if point.video_tokens + benchmark.max_tokens > MAX_POSITIONS - 256:
            raise VidSpecError(f"--values: {value:g} video tokens: the bundled models have {MAX_POSITIONS} positions")
        parallel.check(point)
    if benchmark.resume is not None:
        check_output(benchmark.resume, "--resume")


def run(benchmark: ScalingBenchmark, report: Report = silent) -> dict[str, Any]:
    """Measure every value that the file of finished points does not have.

    Returns:
        `rows` (vanilla's and the setting's by value), `failures` (`family`, `value`, `reason`) and `provenance`.
    """
    check(benchmark)
    done = read_points(benchmark.resume)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for family in benchmark.families:
        (ratio,) = benchmark.inflate
        workload = parallel.workload_for(benchmark.at(benchmark.values[0]), family, ratio, report)
        for value in benchmark.values:
            point = benchmark.at(value)
            key = point_key(point, workload)
            if key not in done:
                try:
                    done[key] = measure(point, workload, value, report)
                except VidSpecError as error:  # the next value may do, as memory ends somewhere
                    failures.append({"family": family, "value": value, "reason": str(error)})
                    continue
                write_point(benchmark.resume, key, done[key])
            rows += done[key]
    return {"rows": rows, "failures": failures, "provenance": provenance() | {"cores": trials.cores()[:2]}}


def point_key(point: ScalingBenchmark, workload: Workload) -> str:
    """Return what a point is kept under: what is measured, on what, by which code."""
    draft = draft_model(workload.family, point.draft)
    models = [pairs.checkpoint(workload.family, role) for role in ("target", "draft")]
    fields = dataclasses.asdict(point) | {"values": None, "families": None, "resume": None}
    own = draft if draft == SELF_DRAFT else inflation.digest(draft)
    return ratios.key_of(models, [fields, dataclasses.asdict(workload), own, provenance()["git_sha"]])


def read_points(path: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of finished points by key; none where there is no file yet, or no name of one."""
    if path is None or not Path(path).exists():
        return {}
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return {line["key"]: line["rows"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        raise VidSpecError(f"--resume: {path} is not a file of `vidspec bench scaling`") from None


def write_point(path: str | None, key: str, rows: list[dict[str, Any]]) -> None:
    """Add a finished point."""
    if path is not None:
        with writing(path), open(path, "a") as file:
            file.write(json.dumps({"key": key, "rows": rows}) + "\n")


def measure(point: ScalingBenchmark, workload: Workload, value: float, report: Report) -> list[dict[str, Any]]:
    """Let vanilla and the setting answer each round's requests in turn; return a row of each."""
    variants = [VANILLA_VARIANT, *point.variants(workload.ratio)]
    answers: list[list[dict[str, Any]]] = [[] for _ in variants]
    with ExitStack() as stack:
        sessions = []
        for variant in variants:
            report("loading", {"label": f"{workload.family} {point.axis} {value:g} {variant.method}"})
            sessions.append(stack.enter_context(BenchSession(point.job(workload, variant))))
        report("plan", {"total": point.rounds * len(variants)})
        report("measuring", {})
        for number in range(point.rounds):
            indices = list(range(number * point.batch_size, (number + 1) * point.batch_size))
            command = {"command": "batch", "indices": indices, "sampling": point.sampling, "seed": point.seed}
            for place in (0, 1) if number % 2 == 0 else (1, 0):
                answers[place].append(sessions[place].ask(dict(command)))
                report("measured", {})
    return [
        make_row(point, workload, variant, value, found, answers[0])
        for variant, found in zip(variants, answers, strict=True)
    ]


def make_row(
    point: ScalingBenchmark,
    workload: Workload,
    variant: Variant,
    value: float,
    rounds: Sequence[dict[str, Any]],
    vanilla: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a row of what `session_job`'s `batch` answered, a round each."""
    found, theirs = [by_round(one) for one in rounds], [by_round(one) for one in vanilla]
    for ours, other in zip(found, theirs, strict=True):
        ours["speedup"] = ours["tokens_per_s"] / other["tokens_per_s"]
    figures: dict[str, Any] = {}
    for name in SPREADING:
        figures |= middle(name, [one[name] for one in found])
    spec = variant.spec or {}
    return {
        "family": workload.family,
        "axis": point.axis,
        "value": value,
        "method": variant.method,
        "mode": variant.mode,
        "inflate": workload.ratio,
        "label": workload.label,
        **{name: spec.get(name) for name in ("drafting", "pruner", "prune_ratio", "scorer")},
        "num_speculative_tokens": spec_tokens(spec),
        "batch_size": point.batch_size,
        "video_tokens": point.video_tokens,
        **figures,
        **seen(added([one["metrics"] for one in rounds])),
        "identical_frac": identical_frac(token_ids(rounds), token_ids(vanilla)),
        "output_tokens": sum(map(len, token_ids(rounds))),
        **{name: getattr(point, name) for name in ("rounds", "max_tokens", "temperature", "seed", "knobs")},
        **{name: getattr(workload, name) for name in ("target_layers", "draft_layers")},
    }


def seen(counters: dict[str, int] | None) -> dict[str, Any]:
    """Return what became of the drafts, and what the draft saw; None for vanilla."""
    told, counted = ("acceptance_length", "num_drafts"), ("visual_tokens_full", "visual_tokens_kept")
    if counters is None:
        return dict.fromkeys((*told, *counted, "requests_skipped"))
    summary = summarize(counters)
    skipped = sum(number for name, number in counters.items() if name.startswith("skipped_"))
    found: dict[str, Any] = {name: summary[name] for name in told}
    return found | {name: counters[name] for name in counted} | {"requests_skipped": skipped}


def token_ids(rounds: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of all rounds' answers."""
    return [answer["token_ids"] for one in rounds for answer in one["answers"]]


def by_round(one: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one round: decoded tokens over the span of its decode, and means of its requests."""
    answers = one["answers"]
    decoded = sum(len(answer["token_ids"]) - 1 for answer in answers)
    span = max(answer["last_s"] for answer in answers) - min(answer["first_s"] for answer in answers)
    if not decoded or not span:
        raise VidSpecError("no answer has a second token: there is no decode to measure")
    longer = [answer for answer in answers if len(answer["token_ids"]) > 1]
    each = [(answer["last_s"] - answer["first_s"]) / (len(answer["token_ids"]) - 1) for answer in longer]
    return {
        "tokens_per_s": decoded / span,
        "ttft_s": statistics.mean(answer["first_s"] for answer in answers),
        "inter_token_ms": 1e3 * statistics.mean(each),
    }
