"""`vidspec calibrate`: the pruning knobs of a pair, chosen by measured acceptance length; engines are subprocesses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_vidspec.config import METHOD, SELF, VidSpecConfig, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession, answer_command
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_output, check_video

PRUNERS = ("specvlm", "uv")
LAMBDAS = tuple(i / 10 for i in range(10))  # of `lambda_r`, besides 1
FIRST_VIDEO = 1000  # of the held-out shape-world videos; the benchmark's are the first ones
_FEW_LAYERS = 6

LayerSet = Literal["all"] | tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """What tools ask an engine: a pair of models, videos and a question; the same words for all of them."""

    family: str = "qwen2.5-vl"  # The bundled pair, unless `target` is given
    target: str | None = None  # A target of the user's own
    draft: str | None = None  # Its draft, or "self"; None: the bundled draft of `family`
    question: str = pairs.DEFAULT_QUESTION  # What is asked about each video; guidance depends on it
    prune_ratio: float = 0.9  # Share of the video tokens that the draft does not see
    num_speculative_tokens: int = 5  # Draft tokens per verify step
    engine_args: dict[str, Any] = field(default_factory=dict)  # `LLM` arguments that replace ours

    @property
    def source(self) -> dict[str, Any]:
        """The videos: `videos` (files) or `held_out` (indices of shape-world videos)."""
        raise NotImplementedError

    @property
    def pair(self) -> dict[str, str | None]:
        """The target and the draft as results name them."""
        if self.target is not None:
            return {"target": self.target, "draft": self.draft}
        return {"target": f"{self.family}/target", "draft": self.draft or f"{self.family}/draft"}

    def llm_kwargs(self, **spec: Any) -> dict[str, Any]:
        """Return the arguments of the engine; `spec` adds knobs of VidSpecConfig."""
        spec = {"prune_ratio": self.prune_ratio, "num_speculative_tokens": self.num_speculative_tokens} | spec
        # A measurement without drafts would say nothing, and what is measured is one setting.
        fixed: dict[str, Any] = {"on_draft_error": "raise", "adaptive_tokens": False}
        spec = fixed | spec
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

    def job(self, **spec: Any) -> dict[str, Any]:
        """Return what `session_job` reads first; `spec` as in `llm_kwargs`."""
        prompts = {"family": None if self.target else self.family, "question": self.question}
        return {"llm": self.llm_kwargs(**spec), "prompts": prompts | self.source}

    def config(self, **spec: Any) -> VidSpecConfig:
        """Return the validated knobs of the engine."""
        return parse_config(self.llm_kwargs(**spec)["speculative_config"])[0]

    def check(self) -> None:
        """Refuse a pair or videos that are not there, or engine arguments that have options of their own."""
        if self.target is not None and self.draft is None:
            raise VidSpecError("--target needs --draft, a checkpoint or 'self'")
        if self.target is None:
            pairs.pair_for(self.family)
        for role, path in (("target", self.target), ("draft", self.draft)):
            if path not in (None, SELF):
                pairs.check_checkpoint(f"--{role}", path)
        if fixed := sorted({"model", "speculative_config"} & set(self.engine_args)):
            raise VidSpecError(f"--engine-args: {fixed[0]} has options of its own")
        for video in self.source.get("videos", ()):
            check_video(video)


@dataclass(frozen=True)
class OnVideos(Subject):
    """A subject that is asked about videos of the user's, or about synthetic ones that no benchmark measures."""

    videos: tuple[str, ...] = ()  # Files to ask about; none: `prompts` shape-world videos
    prompts: int = 4
    max_tokens: int = 256  # Longest answer in tokens

    @property
    def source(self) -> dict[str, Any]:
        """The videos: files, or shape-world videos."""
        if self.videos:
            return {"videos": list(self.videos)}
        return {"held_out": list(range(FIRST_VIDEO, FIRST_VIDEO + self.prompts))}


@dataclass(frozen=True)
class Calibration(OnVideos):
    """What to calibrate, and on what."""

    pruner: str = "specvlm"  # "specvlm" (`lambda_r`, `guidance_layers`) or "uv" (`uv_layer`)

    def llm_kwargs(self, **spec: Any) -> dict[str, Any]:
        return super().llm_kwargs(**{"pruner": self.pruner} | spec)


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
        knobs = {name: getattr(self, name) for name in ("lambda_r", "guidance_layers", "uv_layer")}
        return {name: value for name, value in knobs.items() if value is not None}

    @property
    def note(self) -> str:
        """What came out, in a few words."""
        return " ".join(f"{name} {value}" for name, value in self.knobs.items()) + f": {self.acceptance_length:.3f}"


def check(calibration: Calibration, out: str | None = None) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    if calibration.pruner not in PRUNERS:
        raise VidSpecError(f"--pruner: {calibration.pruner!r} has nothing to calibrate; known: {', '.join(PRUNERS)}")
    calibration.check()
    if calibration.prompts < 1 or calibration.max_tokens < 2:
        raise VidSpecError("--prompts must be at least 1, --max-tokens at least 2")
    if calibration.prune_ratio in (0.0, 1.0):
        raise VidSpecError(f"--prune-ratio {calibration.prune_ratio:g} leaves nothing to choose")
    calibration.config()
    if out is not None:
        check_output(out)


def run(calibration: Calibration, report: Report = silent) -> dict[str, Any]:
    """Measure the candidates and choose; return what the calibration file holds."""
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
    """One engine, retuned: the layer sets at the largest `lambda_r`, then `lambda_r` with the best set."""
    report("loading", {"label": "the engine"})
    with EngineSession(calibration.job()) as session:
        candidates = layer_sets(session.ready["num_layers"])
        report("plan", {"total": len(candidates) + len(LAMBDAS)})
        report("measuring", {})
        measurements: list[Measurement] = []

        def measure(layers: LayerSet, lambda_r: float) -> Measurement:
            knobs = {"lambda_r": lambda_r, "guidance_layers": layers}
            measurements.append(_ask(session, calibration, knobs, lambda_r=lambda_r, guidance_layers=layers))
            report("measured", {"note": measurements[-1].note})
            return measurements[-1]

        best_set = choose([measure(layers, 1.0) for layers in candidates]).guidance_layers
        assert best_set is not None
        for lambda_r in LAMBDAS:
            measure(best_set, lambda_r)
    # Of equal ones the smaller lambda_r.
    considered = [row for row in measurements if row.guidance_layers == best_set]
    return measurements, choose(sorted(considered, key=lambda row: row.lambda_r or 0.0))


def _measure_uv(calibration: Calibration, report: Report) -> tuple[list[Measurement], Measurement]:
    """One engine per layer, since the target is read at a layer that is fixed when it loads."""
    measurements: list[Measurement] = []
    pending: list[int | None] = [None]  # the default, which the first engine names
    while pending:
        layer = pending.pop(0)
        report("loading", {"label": "the engine" + ("" if layer is None else f" (uv_layer {layer})")})
        with EngineSession(calibration.job(**({} if layer is None else {"uv_layer": layer}))) as session:
            if layer is None:
                layer = session.ready["default_uv_layer"]
                pending = [other for other in uv_layers(session.ready["num_layers"]) if other != layer]
                report("plan", {"total": 1 + len(pending)})
            report("measuring", {})
            measurements.append(_ask(session, calibration, {}, uv_layer=layer))
        report("measured", {"note": measurements[-1].note})
    return measurements, choose(measurements)


def _ask(session: EngineSession, calibration: Calibration, knobs: dict[str, Any], **setting: Any) -> Measurement:
    answer = session.ask(answer_command(knobs, max_tokens=calibration.max_tokens))
    counters, num_prompts = answer["metrics"], len(answer["token_ids"])
    if counters["guided_prompts"] < num_prompts:
        raise VidSpecError(
            f"{num_prompts - counters['guided_prompts']} of {num_prompts} prompts were pruned "
            f"without guidance ({reasons(counters, 'unguided_') or 'too few video tokens to choose from'})"
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


def reasons(counters: dict[str, int], prefix: str) -> str:
    """Return which of the counters that begin with `prefix` have counted, by the rest of their names: "pool_full"."""
    return ", ".join(name.removeprefix(prefix) for name, value in counters.items() if name.startswith(prefix) and value)


def choose(measurements: Sequence[Measurement]) -> Measurement:
    """Return the first measurement that is as good as the best one: that would be with one more verify step in all."""
    best = max(measurements, key=lambda row: row.acceptance_length)
    good_enough = best.acceptance_length * best.num_drafts / (best.num_drafts + 1)
    return next(row for row in measurements if row.acceptance_length >= good_enough)


def layer_sets(num_layers: int) -> tuple[LayerSet, ...]:
    """Return the candidates for `guidance_layers`, the paper's first: all, each half and the last quarter; then every
    single layer where there are at most six, otherwise the other quarters.
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
