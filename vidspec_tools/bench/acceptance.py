"""`vidspec bench acceptance`: acceptance, identity with vanilla and draft KV over a sweep; engines are subprocesses."""

import contextlib
import itertools
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from vidspec_tools.bench.session import BenchSession
from vllm_vidspec.config import SELF, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GUIDANCE_FALLBACKS, SKIP_REASONS, summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import answer_command
from vllm_vidspec.tools.processes import end_group
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

# Axes that are knobs of VidSpecConfig (`drafting` is its `draft`).
SPEC_AXES = (
    *("pruner", "prune_ratio", "drafting", "num_speculative_tokens"),
    *("scorer", "draft_noise", "draft_positions"),
)
# Axis -> vLLM's value for "off": one left at it is not sent.
SAMPLING_AXES = {
    "temperature": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
AXES = ("family", "draft", *SPEC_AXES, *SAMPLING_AXES)
# Knobs that `Sweep.knobs` cannot hold, because they have a name of their own here.
_NOT_KNOBS = {"model": "draft", "draft": "drafting", "draft_shape": "drafting", **{name: name for name in SPEC_AXES}}

_SHOWN_COUNTERS = (
    *("text_tokens", "visual_tokens_full", "visual_tokens_kept"),
    *("draft_kv_bytes_per_token", "draft_load_bytes"),
)
# What every pruner is at ratio 0 and at ratio 1; see `canonical`.
UNPRUNED: dict[str, Any] = {"pruner": "none", "prune_ratio": 0.0}
TEXT_ONLY: dict[str, Any] = {"pruner": "uniform", "prune_ratio": 1.0}


def canonical(pruner: str, prune_ratio: float) -> dict[str, Any]:
    """Return the `pruner` and `prune_ratio` that name what the draft sees; equal ones are one measurement.

    Where a pruner has nothing to choose, all of them keep the same tokens: UNPRUNED is every pruner at ratio 0, and
    `none`, which ignores the ratio; TEXT_ONLY is every other pruner at ratio 1 (1 itself: 0.999 still keeps a token of
    a video). Everything else is itself, an alias under its full name. Of equal configurations a sweep runs the one that
    was asked for first.
    """
    spec = {"model": SELF, "num_speculative_tokens": 1, "pruner": pruner, "prune_ratio": prune_ratio}
    config, _ = parse_config(spec)
    ratio = config.prune.ratio_for("video")
    if ratio == 0:
        return dict(UNPRUNED)
    return dict(TEXT_ONLY) if ratio == 1 else {"pruner": config.prune.pruner, "prune_ratio": ratio}


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        axes: For each of AXES its values; rows are their Cartesian product. None for `num_speculative_tokens` is what
            the row's shape has by default.
        requests: Held-out videos, one request each, in one batch queue.
        max_tokens: Longest answer in tokens.
        batch_size: vLLM's max_num_seqs.
        seed: Request i samples with seed + i; None: unseeded.
        ignore_eos: Go on to `max_tokens` whatever is generated.
        target: A checkpoint in place of the bundled target.
        question: What is asked about each video.
        jobs: Engines that run at once; the times of more than one are not comparable.
        knobs: Further knobs of VidSpecConfig, of all rows.
        sync_scheduling: Without vLLM's async scheduling, under which trees that may be smaller than K are filled up.
    """

    axes: dict[str, list[Any]]
    requests: int = 8
    max_tokens: int = 256
    batch_size: int = pairs.MAX_NUM_SEQS
    seed: int | None = 0
    ignore_eos: bool = False
    target: str | None = None
    question: str = pairs.DEFAULT_QUESTION
    jobs: int = 1
    knobs: dict[str, Any] = field(default_factory=dict)
    sync_scheduling: bool = False

    def samplings(self) -> list[dict[str, Any]]:
        """Return every combination of the sampling axes."""
        names = list(SAMPLING_AXES)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*(self.axes[n] for n in names))]

    def configurations(self, family: str) -> Iterator["Configuration"]:
        """Yield every combination of the draft's axes, as asked for."""
        for draft, *values in itertools.product(self.axes["draft"], *(self.axes[name] for name in SPEC_AXES)):
            spec = dict(zip(SPEC_AXES, values, strict=True))
            if spec["num_speculative_tokens"] is None:
                spec["num_speculative_tokens"] = pairs.num_speculative_tokens(spec["drafting"])
            yield Configuration(family, draft, spec)

    def engines(self) -> dict[tuple[Any, ...], "Configuration"]:
        """Return what is run, by `Configuration.key`: family by family vanilla, then in the order asked for."""
        engines: dict[tuple[Any, ...], Configuration] = {}
        for family in self.axes["family"]:
            for configuration in (Configuration(family), *self.configurations(family)):
                engines.setdefault(configuration.key(), configuration)
        return engines


@dataclass(frozen=True)
class Configuration:
    """One engine of the sweep; `draft` None is vanilla."""

    family: str
    draft: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)

    def key(self) -> tuple[Any, ...]:
        """Return a dictionary's key that is equal for configurations which are one measurement."""
        if self.draft is None:
            return (self.family, None)
        spec = self.spec | canonical(self.spec["pruner"], self.spec["prune_ratio"])
        return (self.family, self.draft, *spec.values())

    def label(self) -> str:
        """Return a few words for a progress bar."""
        if self.draft is None:
            return f"{self.family} vanilla"
        spec = self.spec
        what = (self.family, self.draft, spec["pruner"], spec["prune_ratio"], spec["drafting"])
        return f"{' '.join(map(str, what))} K={spec['num_speculative_tokens']}"

    def job(self, sweep: Sweep) -> dict[str, Any]:
        """Return what `run_job` reads."""
        overrides = {"max_num_seqs": sweep.batch_size} | ({"async_scheduling": False} if sweep.sync_scheduling else {})
        spec = {} if self.draft is None else self.spec | sweep.knobs
        llm = pairs.llm_kwargs(self.family, self.draft, target=sweep.target, overrides=overrides, **spec)
        shared = {"max_tokens": sweep.max_tokens, "ignore_eos": sweep.ignore_eos}
        samplings = [
            shared | {name: value for name, value in sampling.items() if value != SAMPLING_AXES[name]}
            for sampling in sweep.samplings()
        ]
        # The warm-up is one video outside the measured ones: what happens once is not part of any figure.
        videos = {"held_out": list(range(sweep.requests)), "warm_up": sweep.requests}
        prompts = {"family": self.family, "question": sweep.question, **videos}
        return {"llm": llm, "prompts": prompts, "samplings": samplings, "seed": sweep.seed}


def check(sweep: Sweep) -> None:
    """Refuse a wrong value, in one line, before anything runs."""
    if min(sweep.requests, sweep.max_tokens, sweep.batch_size, sweep.jobs) < 1:
        raise VidSpecError("--requests, --max-tokens, --batch-size and --jobs must be at least 1")
    for name in sweep.knobs:
        if name in _NOT_KNOBS:
            raise VidSpecError(f"--knob {name}: it has an option of its own, --{_NOT_KNOBS[name].replace('_', '-')}")
    for family in sweep.axes["family"]:
        pairs.pair_for(family)
        for configuration in sweep.configurations(family):
            # The bundled checkpoints are not looked at: a wrong knob is refused without them.
            parse_config(pairs.speculative_config(family, "target", **configuration.spec, **sweep.knobs))


def run(sweep: Sweep, report: Report = silent) -> dict[str, Any]:
    """Measure the whole sweep, `sweep.jobs` engines at a time, each distinct configuration once.

    Args:
        sweep: What to measure.
        report: Called, never twice at once, with "start" (`label`, `total` requests, `engines` of the sweep), then
            "ready", "progress" and "result" of each engine, then "done" or "failed" (`label`, `reason`); `engine` is
            always its number in the order of the sweep.

    Returns:
        `rows` (one per requested configuration and sampling, in the order asked for), `failures` (one per requested
        configuration, with the reason; one per family where vanilla failed) and `provenance` (with `jobs`).
    """
    check(sweep)
    engines, outcomes = sweep.engines(), _run_engines(sweep, report)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for family in sweep.axes["family"]:
        vanilla = outcomes[Configuration(family).key()]
        if isinstance(vanilla, VidSpecError):  # nothing to compare with
            failures.append({"family": family, "draft": None, "reason": str(vanilla)})
            continue
        for asked in sweep.configurations(family):
            outcome = outcomes[asked.key()]
            if isinstance(outcome, VidSpecError):
                failures.append({"family": family, "draft": asked.draft, **asked.spec, "reason": str(outcome)})
            else:
                rows += make_rows(sweep, asked, engines[asked.key()], outcome, vanilla)
    return {"rows": rows, "failures": failures, "provenance": provenance() | {"jobs": sweep.jobs}}


def _run_engines(sweep: Sweep, report: Report) -> dict[tuple[Any, ...], list[dict[str, Any]] | VidSpecError]:
    """Run every engine of the sweep; return, by `Configuration.key`, its results or why it failed.

    Once a family's vanilla has failed, none of its other engines is started; those have no entry.
    """
    outcomes: dict[tuple[Any, ...], list[dict[str, Any]] | VidSpecError] = {}
    engines, running, lock = list(sweep.engines().values()), Running(), threading.Lock()
    num_requests = sweep.requests * len(sweep.samplings())

    def measure(number: int, engine: Configuration) -> None:
        def tell(event: str, fields: dict[str, Any]) -> None:
            with lock:
                if not running.stopped:
                    report(event, fields | {"engine": number})

        if running.stopped or isinstance(outcomes.get(Configuration(engine.family).key()), VidSpecError):
            return
        label = engine.label()
        tell("start", {"label": label, "total": num_requests, "engines": len(engines)})
        try:
            outcomes[engine.key()] = run_job(engine.job(sweep), tell, running)
        except VidSpecError as error:
            outcomes[engine.key()] = error
            tell("failed", {"label": label, "reason": str(error)})
        else:
            tell("done", {"label": label})

    with ThreadPoolExecutor(sweep.jobs) as pool:
        try:
            for future in as_completed([pool.submit(measure, *numbered) for numbered in enumerate(engines)]):
                future.result()
        except BaseException:
            running.stop()
            raise
    return outcomes


class Running:
    """The engine processes that run now; the threads that wait for them are woken by `stop`."""

    def __init__(self) -> None:
        """Start with none."""
        self.stopped = False
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()

    @contextlib.contextmanager
    def holding(self, process: subprocess.Popen) -> Iterator[None]:
        """Own a process until it has ended, and everything it has started with it."""
        with self._lock:
            self._processes.add(process)
            stopped = self.stopped
        try:
            if stopped:
                raise VidSpecError("stopped")
            yield
        finally:
            with self._lock:
                self._processes.discard(process)
            end_group(process)

    def stop(self) -> None:
        """End every process and let no other go on."""
        with self._lock:
            self.stopped = True
            processes = list(self._processes)
        for process in processes:
            end_group(process, grace_s=2.0)


def run_job(job: dict[str, Any], report: Report, running: Running) -> list[dict[str, Any]]:
    """Run one engine in a subprocess.

    Returns:
        For each sampling: `seconds`, `token_ids` per request, `metrics` (our counters' gain; None for vanilla) and
        `scheduling` ("async" or "sync").
    """
    results: list[dict[str, Any]] = []
    with BenchSession(job, running.holding) as session:
        report("ready", {})
        for sampling in job["samplings"]:
            answer = session.ask(answer_command(seed=job["seed"], **sampling), report)
            report("result", answer)
            results.append(answer | {"scheduling": session.ready["scheduling"]})
    return results


def make_rows(
    sweep: Sweep,
    asked: Configuration,
    engine: Configuration,
    results: Sequence[dict[str, Any]],
    vanilla: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Turn one engine's results into rows, one per sampling.

    Args:
        sweep: What was measured.
        asked: What the rows are about.
        engine: What was run for it: itself, or an earlier configuration that shows the draft the same tokens.
        results: The engine's, as `run_job` returns them.
        vanilla: The same for the engine without speculation.
    """
    rows = []
    for sampling, result, reference in zip(sweep.samplings(), results, vanilla, strict=True):
        counters = result["metrics"]
        comparable = sweep.seed is not None or sampling["temperature"] == 0
        rows.append(
            {
                "family": asked.family,
                "draft": asked.draft,
                **asked.spec,
                **sampling,
                "knobs": sweep.knobs,
                "scheduling": result["scheduling"],
                "measured_as": {name: engine.spec[name] for name in UNPRUNED},
                **{name: getattr(sweep, name) for name in ("requests", "max_tokens", "batch_size", "seed", "jobs")},
                **summarize(counters),
                **shape_figures(counters),
                "identical_frac": identical_frac(result["token_ids"], reference["token_ids"]) if comparable else None,
                "output_tokens": sum(map(len, result["token_ids"])),
                **{name: counters[name] for name in _SHOWN_COUNTERS},
                "skipped": {reason: counters[f"skipped_{reason}"] for reason in SKIP_REASONS},
                "unguided": {reason: counters[f"unguided_{reason}"] for reason in GUIDANCE_FALLBACKS},
                "decode_s": result["seconds"],
                "vanilla_decode_s": reference["seconds"],
            }
        )
    return rows


def shape_figures(counters: dict[str, int]) -> dict[str, float | None]:
    """Return what the drafts looked like, per verify step of a request; None where nothing was drafted.

    Returns:
        `nodes_per_step`; `depth_per_step`; `max_acceptance_length`, which that depth allows; and
        `draft_forwards_per_step` of a batch, since the draft runs for all its requests at once.
    """
    drafts, steps = counters["drafts"], counters["draft_steps"]
    depth = counters["draft_depth"] / drafts if drafts else None
    return {
        "nodes_per_step": counters["draft_tokens"] / drafts if drafts else None,
        "depth_per_step": depth,
        "draft_forwards_per_step": counters["draft_forwards"] / steps if steps else None,
        "max_acceptance_length": None if depth is None else 1 + depth,
    }


def measured_itself(row: dict[str, Any]) -> bool:
    """Return whether a row's own configuration was run, not one that shows the draft the same tokens."""
    return all(row[name] == value for name, value in row["measured_as"].items())


def identical_frac(token_ids: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Return the share of requests whose token ids equal the reference's, ids and lengths."""
    same = [list(ours) == list(theirs) for ours, theirs in zip(token_ids, reference, strict=True)]
    return sum(same) / len(same)
