"""`vidspec show-relevance`: one caption, each token in the colour of its visual relevance; an engine subprocess."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import SKIP_REASONS, STRICT_REASONS, summarize
from vllm_vidspec.shapeworld.captions import kind_shares, relevance_auc
from vllm_vidspec.tools import pairs, relevance_views
from vllm_vidspec.tools.calibrate import Calibration, check_models
from vllm_vidspec.tools.engine_session import EngineSession, answer_command
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_output, check_video

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Show:
    """What to show.

    Attributes:
        video: A file; None: the bundled one.
        out: The .html or .png file to write.
        family: The bundled pair, unless `target` is given.
        target: A target of the user's own.
        draft: Its draft, or "self"; None: the bundled draft of `family`.
        question: What is asked about the video.
        lambda_loose: Share of a step's drafts whose mismatches stand; 0 measures relevance and loosens nothing.
        top_n: Video tokens that make a relevance.
        position_shift: Whether a mismatch stands where the target's token is among the drafts.
        relevance_rows: Whose state is compared, "token" or "prediction".
        num_speculative_tokens: Draft tokens per verify step.
        prune_ratio: Share of the video tokens that the draft does not see.
        temperature: Of the target and the draft.
        seed: Of the request.
        max_tokens: Longest answer in tokens.
        engine_args: `LLM` arguments that replace ours.
    """

    video: str | None = None
    out: str = "relevance.html"
    family: str = "qwen2.5-vl"
    target: str | None = None
    draft: str | None = None
    question: str = pairs.DEFAULT_QUESTION
    lambda_loose: float = 0.7
    top_n: int = 10
    position_shift: bool = True
    relevance_rows: str = "token"
    num_speculative_tokens: int = 10
    prune_ratio: float = 0.9
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The video's file."""
        return pairs.sample_video() if self.video is None else Path(self.video)

    @property
    def models(self) -> Calibration:
        """The pair, the video and the question, as `vidspec calibrate` names them."""
        return Calibration(
            family=self.family,
            target=self.target,
            draft=self.draft,
            videos=(str(self.path),),
            question=self.question,
            prune_ratio=self.prune_ratio,
            num_speculative_tokens=self.num_speculative_tokens,
            engine_args=self.engine_args,
        )

    @property
    def knobs(self) -> dict[str, Any]:
        """The scorer and its knobs."""
        names = ("lambda_loose", "top_n", "position_shift", "relevance_rows")
        return {"scorer": "loose"} | {name: getattr(self, name) for name in names}


def check(show: Show) -> None:
    """Refuse a wrong value before an engine starts.

    Raises:
        VidSpecError: One line naming it.
    """
    check_models(show.models)
    parse_config(show.models.llm_kwargs(**show.knobs)["speculative_config"])
    if show.max_tokens < 2:
        raise VidSpecError("--max-tokens must be at least 2")
    if not 0 <= show.temperature < float("inf"):
        raise VidSpecError(f"--temperature: {show.temperature:g} is no temperature")
    check_video(show.path)
    check_output(show.out)
    suffix = Path(show.out).suffix.lower()
    if suffix not in relevance_views.SUFFIXES:
        raise VidSpecError(f"--out: {show.out} must end in {' or '.join(relevance_views.SUFFIXES)}")
    if suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise VidSpecError("--out: a .png file needs matplotlib: pip install matplotlib")


def run(show: Show, report: Report = lambda _event, _fields: None) -> dict[str, Any]:
    """Write one caption and the picture of it.

    Args:
        show: What to show.
        report: Called with "plan" (`total` engines), then "loading" (`label`) before and "done" after each.

    Returns:
        `rows`, one: the pair, the setting, `words`, `relevance` and `kinds` of each token, and what `kind_shares` and
        `relevance_auc` say of them (the latter for bundled pairs, whose words are known); and `provenance`.

    Raises:
        VidSpecError: A wrong value, an engine that stopped, or a request that was verified strictly.
    """
    check(show)
    report("plan", {"total": 1})
    report("loading", {"label": "loading the engine"})
    with EngineSession(show.models.job(**show.knobs)) as session:
        report("loading", {"label": "asking"})
        command = answer_command(seed=show.seed, watch=True, temperature=show.temperature, max_tokens=show.max_tokens)
        answer = session.ask(command)
    report("done", {})
    row = make_row(show, answer)
    relevance_views.write(row, show.out)
    return {"rows": [row], "provenance": provenance()}


def make_row(show: Show, answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a picture shows.

    Args:
        show: What was asked for.
        answer: The engine's, as `session_job.Engine.answer` returns it.

    Raises:
        VidSpecError: The caption was verified strictly, or without drafts, so that there is nothing to show.
    """
    counters, (caption,) = answer["metrics"], answer["captions"]
    for what, prefix, reasons in (
        ("the request ran without speculation", "skipped", SKIP_REASONS),
        ("the caption was verified strictly", "strict", STRICT_REASONS),
    ):
        if found := [reason for reason in reasons if counters[f"{prefix}_{reason}"]]:
            raise VidSpecError(f"{what} ({', '.join(found)}): nothing was measured")
    if all(value is None for value in caption["relevance"]):
        raise VidSpecError("no relevance was measured: the answer is too short")
    is_bundled = show.target is None
    return {
        "family": show.family if is_bundled else None,
        **show.models.pair,
        "video": show.path.name,
        "question": show.question,
        **show.knobs,
        **{name: getattr(show, name) for name in ("num_speculative_tokens", "prune_ratio", "temperature", "seed")},
        "acceptance_length": summarize(counters)["acceptance_length"],
        **kind_shares([caption["kinds"]]),
        "relevance_auc": relevance_auc([caption["words"]], [caption["relevance"]]) if is_bundled else None,
        **caption,
    }
