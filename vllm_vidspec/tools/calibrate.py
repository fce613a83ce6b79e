"""`vidspec calibrate`: the pruning knobs of a pair, chosen by measured acceptance length; engines are subprocesses."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_vidspec.config import METHOD, SELF, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GUIDANCE_FALLBACKS, summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession, answer_command
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_output, check_video

PRUNERS = ("specvlm", "uv")
LAMBDAS = tuple(i / 10 for i in range(11))
FIRST_VIDEO = 1000  # of the held-out shape-world videos; the benchmark's are the first ones
PLOT_SUFFIXES = (".pdf", ".png", ".svg")
_FEW_LAYERS = 6

LayerSet = Literal["all"] | tuple[int, ...]
Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Calibration:
    """What to calibrate, and on what.

    Attributes:
        pruner: "specvlm" (`lambda_r`, `guidance_layers`) or "uv" (`uv_layer`).
        family: The bundled pair, unless `target` is given.
        target: A target of the user's own.
        draft: Its draft, or "self"; None: the bundled draft of `family`.
        videos: Files to ask about; none: shape-world videos.
        question: What is asked about each video.
        prompts: Shape-world videos to ask about.
        prune_ratio: Share of the video tokens that the draft does not see.
        num_speculative_tokens: Draft tokens per verify step.
        max_tokens: Longest answer in tokens.
        engine_args: `LLM` arguments that replace ours.
        whole_grid: Measure every layer set at every `lambda_r`.
        lambdas: Values of `lambda_r` to try, ascending.
        layer_sets: Values of `guidance_layers` to try, the preferred ones first; None: `layer_sets` of the depth.
    """

    pruner: str = "specvlm"
    family: str = "qwen2.5-vl"
    target: str | None = None
    draft: str | None = None
    videos: tuple[str, ...] = ()
    question: str = pairs.DEFAULT_QUESTION
    prompts: int = 4
    prune_ratio: float = 0.9
    num_speculative_tokens: int = 5
    max_tokens: int = 256
    engine_args: dict[str, Any] = field(default_factory=dict)
    whole_grid: bool = False
    lambdas: tuple[float, ...] = LAMBDAS
    layer_sets: tuple[LayerSet, ...] | None = None

    def llm_kwargs(self, **spec: Any) -> dict[str, Any]:
        """Return the arguments of the engine; `spec` adds knobs of VidSpecConfig."""
        spec = {
            "pruner": self.pruner,
            "prune_ratio": self.prune_ratio,
            "num_speculative_tokens": self.num_speculative_tokens,
            "on_draft_error": "raise",  # a measurement without drafts would say nothing
            **spec,
        }
        if self.target is None:
            draft = {None: "draft", SELF: "target"}.get(self.draft, self.draft)
            return pairs.llm_kwargs(self.family, draft, overrides=self.engine_args, **spec)
        return {
            "model": self.target,
            "limit_mm_per_prompt": {"video": 1},
            "seed": 0,
            "speculative_config": {"method": METHOD, "model": self.draft, **spec},
            **self.engine_args,
        }

    @property
    def pair(self) -> dict[str, str | None]:
        """The target and the draft as a calibration file names them."""
        bundled = self.target is None
        return {
            "target": f"{self.family}/target" if bundled else self.target,
            "draft": f"{self.family}/draft" if self.draft is None else self.draft,
        }

    def job(self, **spec: Any) -> dict[str, Any]:
        """Return what `session_job` reads."""
        prompts: dict[str, Any] = {"family": None if self.target else self.family, "question": self.question}
        if self.videos:
            prompts["videos"] = list(self.videos)
        else:
            prompts["held_out"] = list(range(FIRST_VIDEO, FIRST_VIDEO + self.prompts))
        return {"llm": self.llm_kwargs(**spec), "prompts": prompts}


@dataclass(frozen=True)
class Measurement:
    """The acceptance at one setting; what does not belong to the pruner is None."""

    lambda_r: float | None
    guidance_layers: LayerSet | None
    uv_layer: int | None
    acceptance_length: float
    acceptance_rate: float
    num_drafts: int
    output_tokens: int
    seconds: float

    @property
    def knobs(self) -> dict[str, Any]:
        """The setting as keys of a calibration file."""
        knobs = {"lambda_r": self.lambda_r, "guidance_layers": self.guidance_layers, "uv_layer": self.uv_layer}
        return {name: value for name, value in knobs.items() if value is not None}


def check(calibration: Calibration, out: str | None = None, plot: str | None = None) -> None:
    """Refuse a wrong value before an engine starts.

    Raises:
        VidSpecError: One line naming it.
    """
    if calibration.pruner not in PRUNERS:
        raise VidSpecError(f"--pruner: {calibration.pruner!r} has nothing to calibrate; known: {', '.join(PRUNERS)}")
    check_models(calibration)
    if calibration.prompts < 1 or calibration.max_tokens < 2:
        raise VidSpecError("--prompts must be at least 1, --max-tokens at least 2")
    if calibration.prune_ratio in (0.0, 1.0):
        raise VidSpecError(f"--prune-ratio {calibration.prune_ratio:g} leaves nothing to choose")
    parse_config(calibration.llm_kwargs()["speculative_config"])
    for video in calibration.videos:
        check_video(video)
    for path in (out, plot):
        if path is not None:
            check_output(path)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise VidSpecError("--plot needs matplotlib: pip install matplotlib")
    if plot is not None and Path(plot).suffix.lower() not in PLOT_SUFFIXES:
        raise VidSpecError(f"--plot: {plot} must end in {', '.join(PLOT_SUFFIXES)}")


def check_models(calibration: Calibration) -> None:
    """Refuse a pair that is not there, or arguments of its engine that have options of their own.

    Raises:
        VidSpecError: One line naming what is wrong.
    """
    if calibration.target is not None and calibration.draft is None:
        raise VidSpecError("--target needs --draft, a checkpoint or 'self'")
    if calibration.target is None:
        pairs.pair_for(calibration.family)
    for role, path in (("target", calibration.target), ("draft", calibration.draft)):
        if path is not None and path.startswith(("/", ".")) and not Path(path).exists():
            raise VidSpecError(f"--{role}: no such checkpoint: {path}")
    if fixed := sorted({"model", "speculative_config"} & set(calibration.engine_args)):
        raise VidSpecError(f"--engine-args: {fixed[0]} has options of its own")


def run(calibration: Calibration, report: Report = lambda _event, _fields: None) -> dict[str, Any]:
    """Measure the candidates and choose.

    Args:
        calibration: What to measure.
        report: Called with "loading" (`label`), "plan" (`total` measurements) and "measured" (`measurement`).

    Returns:
        What the calibration file holds: `config` (the chosen knobs), what was measured on what, `measurements` and
        `provenance`.

    Raises:
        VidSpecError: A wrong value, an engine that stopped, or prompts that could not be guided or drafted for.
    """
    check(calibration)
    measure = _measure_specvlm if calibration.pruner == "specvlm" else _measure_uv
    measurements, chosen = measure(calibration, report)
    return {
        "config": chosen.knobs,
        "pruner": calibration.pruner,
        "prune_ratio": calibration.prune_ratio,
        "num_speculative_tokens": calibration.num_speculative_tokens,
        **calibration.pair,
        "prompts": len(calibration.videos) or calibration.prompts,
        "videos": [Path(video).name for video in calibration.videos] or "shape world",
        "question": calibration.question,
        "max_tokens": calibration.max_tokens,
        "acceptance_length": chosen.acceptance_length,
        "measurements": [asdict(row) | {"chosen": row is chosen} for row in measurements],
        "provenance": provenance(),
    }


def _measure_specvlm(calibration: Calibration, report: Report) -> tuple[list[Measurement], Measurement]:
    """One engine, retuned: the layer sets at the largest `lambda_r`, then `lambda_r` with the best set; or the grid."""
    report("loading", {"label": "loading the engine"})
    with EngineSession(calibration.job()) as session:
        candidates = calibration.layer_sets or layer_sets(session.ready["num_layers"])
        *lower, top = calibration.lambdas
        # lambda_r 0 ignores the scores (it is `uniform`), so one measurement of it holds for every set.
        shared = [value for value in lower if value == 0.0]
        lower = [value for value in lower if value != 0.0]
        num_scans = len(candidates) if calibration.whole_grid else 1
        report("plan", {"total": len(candidates) + len(shared) + num_scans * len(lower)})
        measurements: list[Measurement] = []

        def measure(layers: LayerSet, lambda_r: float) -> Measurement:
            knobs = {"lambda_r": lambda_r, "guidance_layers": layers}
            measurements.append(_ask(session, calibration, knobs, lambda_r=lambda_r, guidance_layers=layers))
            report("measured", {"measurement": measurements[-1]})
            return measurements[-1]

        tops = [measure(layers, top) for layers in candidates]
        best_set = choose(tops).guidance_layers
        assert best_set is not None
        for lambda_r in shared:
            measure(best_set, lambda_r)
        for layers in candidates if calibration.whole_grid else [best_set]:
            for lambda_r in lower:
                measure(layers, lambda_r)
    # Of equal ones the smaller lambda_r, then the earlier candidate.
    considered = [row for row in measurements if calibration.whole_grid or row.guidance_layers == best_set]
    return measurements, choose(sorted(considered, key=lambda row: row.lambda_r or 0.0))


def _measure_uv(calibration: Calibration, report: Report) -> tuple[list[Measurement], Measurement]:
    """One engine per layer, since the target is read at a layer that is fixed when it loads."""
    measurements: list[Measurement] = []
    pending: list[int | None] = [None]  # the default, which the first engine names
    while pending:
        layer = pending.pop(0)
        report("loading", {"label": "loading the engine" + ("" if layer is None else f" (uv_layer {layer})")})
        with EngineSession(calibration.job(**({} if layer is None else {"uv_layer": layer}))) as session:
            if layer is None:
                layer = session.ready["default_uv_layer"]
                pending = [other for other in uv_layers(session.ready["num_layers"]) if other != layer]
                report("plan", {"total": 1 + len(pending)})
            measurements.append(_ask(session, calibration, {}, uv_layer=layer))
        report("measured", {"measurement": measurements[-1]})
    return measurements, choose(measurements)


def _ask(session: EngineSession, calibration: Calibration, knobs: dict[str, Any], **setting: Any) -> Measurement:
    """Measure one setting.

    Raises:
        VidSpecError: Not every prompt was guided, or nothing was drafted.
    """
    answer = session.ask(answer_command(knobs, max_tokens=calibration.max_tokens))
    counters, num_prompts = answer["metrics"], len(answer["token_ids"])
    if counters["guided_prompts"] < num_prompts:
        reasons = ", ".join(reason for reason in GUIDANCE_FALLBACKS if counters[f"unguided_{reason}"])
        raise VidSpecError(
            f"{num_prompts - counters['guided_prompts']} of {num_prompts} prompts were pruned "
            f"without guidance ({reasons or 'too few video tokens to choose from'})"
        )
    figures = summarize(counters)
    if not figures["num_drafts"]:
        raise VidSpecError("nothing was drafted: the answers are too short, or the draft's KV pool too small")
    return Measurement(
        **{"lambda_r": None, "guidance_layers": None, "uv_layer": None, **setting},
        acceptance_length=float(figures["acceptance_length"] or 0),
        acceptance_rate=float(figures["acceptance_rate"] or 0),
        num_drafts=int(figures["num_drafts"]),
        output_tokens=sum(map(len, answer["token_ids"])),
        seconds=answer["seconds"],
    )


def choose(measurements: Sequence[Measurement]) -> Measurement:
    """Return the first measurement that is as good as the best one.

    As good: its acceptance length is at least what the best one's would be with one more verify step for the same
    tokens. Greedy answers do not depend on the draft, so a difference of one step in all is no reason to leave an
    earlier candidate.

    Args:
        measurements: At least one, the preferred ones first.
    """
    best = max(measurements, key=lambda row: row.acceptance_length)
    good_enough = best.acceptance_length * best.num_drafts / (best.num_drafts + 1)
    return next(row for row in measurements if row.acceptance_length >= good_enough)


def layer_sets(num_layers: int) -> tuple[LayerSet, ...]:
    """Return the candidates for `guidance_layers`, at most ten: the paper's choice first.

    All, the first half, the second half and the last quarter; then every single layer where there are at most six,
    otherwise the other quarters.
    """
    layers, half = tuple(range(num_layers)), num_layers // 2
    quarters = [layers[i * num_layers // 4 : (i + 1) * num_layers // 4] for i in range(4)]
    rest = [(layer,) for layer in layers] if num_layers <= _FEW_LAYERS else quarters[:3]
    found: dict[tuple[int, ...], LayerSet] = {layers: "all"}
    for candidate in (layers[:half], layers[half:], quarters[3], *rest):
        if candidate:
            found.setdefault(candidate, candidate)
    return tuple(found.values())


def uv_layers(num_layers: int) -> tuple[int, ...]:
    """Return the candidates for `uv_layer` besides the default: every layer up to six, else quarters of the depth."""
    if num_layers <= _FEW_LAYERS:
        return tuple(range(1, num_layers + 1))
    return tuple(i * num_layers // 4 for i in range(1, 5))
