"""`vidspec bench parallel`: vanilla, draft-then-verify and parallel drafting, in turns on the same requests.

Vanilla and two others are alive at once, each in a subprocess, and one of them generates at a time: request by
request, in an order that changes. A figure is a median over rounds of what a round's turns give, so that what the
machine does meanwhile meets all of them alike. The target of every mode has one core, the same one.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vidspec_tools import inflation
from vidspec_tools.bench import ratios
from vidspec_tools.bench.methods import (
    BASELINES,
    MODES,
    OURS,
    PARALLEL,
    SEQUENTIAL,
    STOCK,
    VANILLA,
    WINDOW,
    Method,
    parallel_window,
)
from vidspec_tools.bench.published import published
from vidspec_tools.bench.race_rows import Turn, make_rows
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

# Engines beside vanilla that are alive at once.
_AT_ONCE = 2
SELF_DRAFT = "target"  # what is a draft that is the target itself
# How many requests tell what a step takes, and how long their answers are.
_TIMED_REQUESTS, _TIMED_TOKENS = 6, 48


@dataclass(frozen=True)
class Race:
    """What to measure.

    Attributes:
        own_options: Knobs that are no `knobs`: they have an option of their own, or are what is compared.
        is_watched: Whether turns tell what target and drafter did when.
        families: Bundled pairs.
        inflate: Ratios of target time to draft time; 0 is the pair as it is.
        modes: Of MODES; vanilla is always run.
        pruner: Of our two modes; `prune_ratio` too.
        num_speculative_tokens: K of both; None: 5 sequentially; in parallel twice the ratio, 5 at least: the
            greatest window, as a step takes what the ratio that is measured online says.
        requests: Held-out videos of a round, each asked for alone; every round has its own.
        max_tokens: Longest answer in tokens.
        rounds: How many.
        temperature: Of all requests.
        seed: Request i of all samples with seed + i.
        table: Whether the baselines of the paper's Table 1 are run, too.
        draft: Which model drafts: "draft", "target" (itself), another role of the bundled pair, or a path.
        draft_device: Where the parallel drafter runs.
        knobs: Further knobs of VidSpecConfig; those named parallel_* are of the parallel mode alone.
        question: What is asked about each video.
    """

    own_options: ClassVar[tuple[str, ...]] = (
        *("pruner", "prune_ratio", "num_speculative_tokens", "parallel"),
        *("model", "draft", "drafting", "draft_shape"),
    )
    is_watched: ClassVar[bool] = False

    families: tuple[str, ...] = ("qwen2.5-vl",)
    inflate: tuple[float, ...] = (0.0,)
    modes: tuple[str, ...] = MODES
    pruner: str = "uv"
    prune_ratio: float = 0.9
    num_speculative_tokens: int | None = None
    requests: int = 4
    max_tokens: int = 128
    rounds: int = 5
    temperature: float = 0.0
    seed: int = 0
    table: bool = False
    draft: str = "draft"
    draft_device: str = "cpu"
    knobs: dict[str, Any] = field(default_factory=dict)
    question: str = pairs.DEFAULT_QUESTION

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}

    def contenders(self, ratio: float) -> list["Contender"]:
        """Return what runs beside vanilla at a ratio, in the order of the rows."""
        shared = {"pruner": self.pruner, "prune_ratio": self.prune_ratio}
        found = []
        for mode in (SEQUENTIAL, PARALLEL):
            if mode in self.modes:
                tokens = self.num_speculative_tokens or (parallel_window(ratio) if mode == PARALLEL else WINDOW)
                method = OURS if mode == PARALLEL else mode
                found.append(Contender(method, mode, shared | {"num_speculative_tokens": tokens}))
        if self.table:
            found += [Contender.of(name, method, ratio) for name, method in BASELINES.items()]
        return found

    def reference(self, ratio: float) -> "Contender":
        """Return whose forwards a ratio is of: the parallel drafter's where there is one, else the draft's."""
        own = [one for one in self.contenders(ratio) if one.draft is None and one.mode != STOCK]
        found = [one for one in own if one.mode == PARALLEL] or own
        return found[0] if found else Contender.of("SD", BASELINES["SD"], ratio)

    def further(self, course: "Course", contender: "Contender", rounds: Sequence[Sequence[Turn]]) -> dict[str, Any]:
        """Return the columns of a row that only this benchmark has: what is published of its method."""
        return published(course.family, course.ratio or 1.0, contender.method) if self.table else {}


@dataclass(frozen=True, eq=False)  # a key, each one itself
class Contender:
    """One engine of a comparison; `spec` are knobs of VidSpecConfig, None for vanilla.

    `draft` is as in `Method`.
    """

    method: str
    mode: str
    spec: dict[str, Any] | None = None
    draft: str | None = None

    @classmethod
    def of(cls, name: str, method: Method, ratio: float) -> "Contender":
        """Return the engine that runs a method of the papers at a ratio."""
        tokens = {"num_speculative_tokens": parallel_window(ratio)} if method.mode == PARALLEL else {}
        return cls(name, method.mode, method.spec | tokens, method.draft)

    def knobs(self, race: Race) -> dict[str, Any]:
        """Return the knobs of this engine; `parallel` names the drafter's place."""
        ours = {name: value for name, value in race.knobs.items() if not name.startswith("parallel_")}
        found = {"prune_ratio": race.prune_ratio, "on_draft_error": "raise"} | (self.spec or {}) | ours
        if self.mode == PARALLEL:
            place: dict[str, Any] = {"device": race.draft_device}
            if race.draft_device == "cpu":
                place["cpu_cores"] = str(cores()[1])
            more = {
                name.removeprefix("parallel_"): value
                for name, value in race.knobs.items()
                if name.startswith("parallel_")
            }
            found["parallel"] = place | more
        return found


VANILLA_ENGINE = Contender(VANILLA, VANILLA)


@dataclass(frozen=True)
class Course:
    """The pair that a comparison is run on: a family with so many layers appended to its checkpoints."""

    family: str
    ratio: float = 0.0
    target_layers: int = 0
    draft_layers: int = 0

    def job(self, race: Race, contender: Contender, held_out: Sequence[int]) -> dict[str, Any]:
        """Return what `session_job` reads; the first of `held_out` is a warm-up, which is part of no figure."""
        original = pairs.checkpoint(self.family, "target")
        target = str(inflation.inflate(original, self.target_layers))
        draft = draft_model(self.family, contender.draft or race.draft)
        if contender.spec is not None and draft != SELF_DRAFT:
            draft = str(inflation.inflate(draft, self.draft_layers))
        if contender.spec is None:
            llm = pairs.llm_kwargs(self.family, target=target)
        elif contender.mode == STOCK:
            model = {"model": target if draft == SELF_DRAFT else draft}
            llm = pairs.llm_kwargs(self.family, target=target, overrides={"speculative_config": contender.spec | model})
        else:
            knobs = inflation.guidance_knobs(original, pairs.calibrated(self.family)) | contender.knobs(race)
            llm = pairs.llm_kwargs(self.family, draft, target=target, **knobs)
        warm_up, *videos = held_out
        prompts = {"family": self.family, "question": race.question, "held_out": videos, "warm_up": warm_up}
        return {"llm": llm, "prompts": prompts, "cpus": [cores()[0]]}

    @property
    def label(self) -> str:
        """How results name the pair, "" where it is as it is."""
        parts = (("target", self.target_layers), ("draft", self.draft_layers))
        return "; ".join(f"{role} {words}" for role, number in parts if (words := inflation.label(number)))


def draft_model(family: str, draft: str) -> str:
    """Return the path of a draft, or SELF_DRAFT.

    Args:
        family: Whose bundled checkpoints are meant.
        draft: SELF_DRAFT, a role of the bundled pair, or a path.

    Raises:
        VidSpecError: None of these.
    """
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


def check(race: Race) -> None:
    """Refuse a wrong value before an engine starts.

    Raises:
        VidSpecError: One line naming it.
    """
    if min(race.requests, race.rounds) < 1 or race.max_tokens < 2:
        raise VidSpecError("--requests and --rounds must be at least 1, --max-tokens at least 2")
    if unknown := [mode for mode in race.modes if mode not in MODES]:
        raise VidSpecError(f"--modes: {unknown[0]!r} is none of {', '.join(MODES)}")
    if wrong := [ratio for ratio in race.inflate if ratio and ratio < 1]:
        raise VidSpecError(f"--inflate {wrong[0]:g}: a ratio of target time to draft time is at least 1 (0: as it is)")
    for name in race.knobs:
        if name in race.own_options:
            raise VidSpecError(f"--knob {name}: it has an option of its own, or is what is compared")
    contenders = [one for ratio in race.inflate for one in race.contenders(ratio)]
    is_parallel = any(one.mode == PARALLEL for one in contenders)
    if is_parallel and race.draft_device == "cpu" and len(cores()) < 2:
        raise VidSpecError("the parallel drafter needs a core of its own: this process may use one only")
    for family in race.families:
        pairs.pair_for(family)
        if draft_model(family, race.draft) == SELF_DRAFT and any(race.inflate):
            raise VidSpecError(f"--inflate: with --draft {SELF_DRAFT} there is no ratio to reach: layers slow both")
        for contender in contenders:
            if contender.mode != STOCK:
                parse_config(pairs.speculative_config(family, "target", **contender.knobs(race)))


def run(race: Race, report: Report = silent) -> dict[str, Any]:
    """Measure everything.

    Args:
        race: What.
        report: Called with "plan", "loading", "measuring" and "measured", as `progress.View` takes them.

    Returns:
        `rows` (vanilla's and one a contender, by family and ratio), `failures` (`family`, `inflate`, `method`,
        `reason`) and `provenance`.

    Raises:
        VidSpecError: A wrong value, or a vanilla engine that stopped.
    """
    check(race)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for family in race.families:
        for ratio in race.inflate:
            course = course_for(race, family, ratio, report)
            contenders = race.contenders(ratio)
            with ExitStack() as stack:
                vanilla = stack.enter_context(_load(race, course, VANILLA_ENGINE, report))
                for number in range(0, max(1, len(contenders)), _AT_ONCE):
                    turns, failed = _compete(race, course, vanilla, contenders[number : number + _AT_ONCE], report)
                    failures += [{"family": family, "inflate": ratio, **one} for one in failed]
                    found = make_rows(race, course, turns)
                    # Vanilla answers again beside each two of the others; its row is that beside the first.
                    rows += found if number == 0 else found[1:]
    return {"rows": rows, "failures": failures, "provenance": provenance() | {"cores": cores()[:2]}}


def course_for(race: Race, family: str, ratio: float, report: Report = silent) -> Course:
    """Return the pair of a family at a ratio; how many layers that takes is measured, and known from then on."""
    if not ratio:
        return Course(family)
    ours = race.reference(ratio)
    videos = list(range(_TIMED_REQUESTS + 1))

    def job(drafts: bool, target_layers: int, draft_layers: int) -> dict[str, Any]:
        pair = Course(family, ratio, target_layers, draft_layers)
        return pair.job(race, ours if drafts else VANILLA_ENGINE, videos)

    knobs = {name: value for name, value in ours.knobs(race).items() if name != "num_speculative_tokens"}
    models = [pairs.checkpoint(family, "target"), draft_model(family, ours.draft or race.draft)]
    models = [models[0] if model == SELF_DRAFT else model for model in models]
    key = ratios.key_of(models, [ours.mode, knobs])
    sampling = {"temperature": 0.0, "max_tokens": _TIMED_TOKENS}
    path = inflation.cache_folder() / f"steps-{key}.json"
    times = ratios.step_times(job, path, sampling, _TIMED_REQUESTS, report)
    return Course(family, ratio, *times.layers_for(ratio))


def _load(race: Race, course: Course, contender: Contender, report: Report) -> EngineSession:
    """Return an engine that has every request of a comparison before it; it starts when it is entered."""
    report("loading", {"label": f"{course.family} {contender.method} {course.label}".rstrip()})
    return EngineSession(course.job(race, contender, list(range(race.rounds * race.requests + 1))))


def _compete(
    race: Race, course: Course, vanilla: EngineSession, contenders: Sequence[Contender], report: Report
) -> tuple[dict[Contender, list[list[Turn]]], list[dict[str, Any]]]:
    """Let vanilla and some others answer every request in turn.

    Returns:
        The turns of each that went through, `[rounds][requests]`, and of each that did not `method` and `reason`.

    Raises:
        VidSpecError: Vanilla stopped.
    """
    failures = []
    with ExitStack() as stack:
        sessions = {VANILLA_ENGINE: vanilla}
        for contender in contenders:
            try:
                sessions[contender] = stack.enter_context(_load(race, course, contender, report))
            except VidSpecError as error:
                failures.append({"method": contender.method, "reason": str(error)})
        turns: dict[Contender, list[list[Turn]]] = {one: [[] for _ in range(race.rounds)] for one in sessions}
        report("plan", {"total": race.rounds * race.requests * len(sessions)})
        report("measuring", {})
        for number, index, contender in order(race, list(sessions)):
            if contender not in sessions:
                continue
            try:
                turns[contender][number].append(take_turn(race, contender, sessions[contender], index))
            except VidSpecError as error:
                if contender is VANILLA_ENGINE:
                    raise
                failures.append({"method": contender.method, "reason": str(error)})
                del sessions[contender], turns[contender]
            report("measured", {})
    return turns, failures


def take_turn(race: Race, contender: Contender, session: EngineSession, index: int) -> Turn:
    """Let an engine answer a request alone; vanilla's is never watched, as nobody there notes what it does.

    Raises:
        VidSpecError: The engine stopped.
    """
    command = {"command": "clock", "index": index, "sampling": race.sampling, "seed": race.seed + index}
    if not race.is_watched or contender.spec is None:
        return Turn(**session.ask(command))
    session.ask({"command": "timeline", "on": True})
    answer = session.ask(command)
    return Turn(**answer, events=session.ask({"command": "timeline", "on": False})["events"])


def order(race: Race, contenders: Sequence[Contender]) -> Iterator[tuple[int, int, Contender]]:
    """Yield round, request and whose turn it is; who comes first changes with every request."""
    for index in range(race.rounds * race.requests):
        first = index % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            yield index // race.requests, index, contender
