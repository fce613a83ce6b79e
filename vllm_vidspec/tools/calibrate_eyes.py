"""`vidspec calibrate --eyes`: a map from the target's vision embeddings to the draft's, and what it does to acceptance.

One engine whose draft has its own tower is shown every video, and answers about those that are held out from the fit;
a second one, whose draft sees through the map, answers about these again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.families import tower_of
from vllm_vidspec.metrics import summarize
from vllm_vidspec.tools.calibrate import OnVideos
from vllm_vidspec.tools.engine_session import EngineSession, answer_command
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_output

LEAST_SHARE = 0.95  # of the acceptance with the draft's own tower, from which on the map is the default
_EVERY = 5  # one video in so many is held out
_MOST_ASKED = 12  # of these, about which answers are compared


@dataclass(frozen=True)
class Eyes(OnVideos):
    """What to fit, and on what."""

    prompts: int = 64
    out: str = "calibration.json"  # The calibration file to write, or to add to; the map lies beside it

    @property
    def num_videos(self) -> int:
        return len(self.videos) or self.prompts

    @property
    def held_out(self) -> list[int]:
        """Which of the videos are not fitted to."""
        return list(range(0, self.num_videos, _EVERY))

    @property
    def map_path(self) -> Path:
        return Path(self.out).with_suffix(".safetensors")

    def towers(self) -> list[str]:
        """Return the fingerprints of the target's tower and the draft's."""
        spec = self.llm_kwargs()
        names = {"target": spec["model"], "draft": spec["speculative_config"]["model"]}
        found = {role: tower_of(name) for role, name in names.items()}
        if missing := next((role for role, tower in found.items() if tower is None), None):
            raise VidSpecError(f"the {missing}'s weights are not here as safetensors: {names[missing]}")
        return [str(tower) for tower in found.values()]


def check(eyes: Eyes) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    eyes.check()
    if eyes.draft == "self":
        raise VidSpecError("--eyes: a target that drafts for itself has no other tower")
    if eyes.num_videos < _EVERY:
        raise VidSpecError(f"--eyes needs {_EVERY} videos or more, got {eyes.num_videos}; 64 are better")
    target, draft = eyes.towers()
    if target == draft:
        raise VidSpecError("--eyes: both vision towers are the same; the draft sees through the target's by default")
    check_output(eyes.out)
    eyes.config()
    _before(eyes)


def run(eyes: Eyes, report: Report = silent) -> dict[str, Any]:
    """Fit, compare and write the map; return what the calibration file holds."""
    check(eyes)
    held_out = eyes.held_out
    asked = held_out[:_MOST_ASKED]
    report("loading", {"label": "the engine"})
    with EngineSession(eyes.job(draft_vision="own")) as session:
        report("plan", {"total": 3})
        report("measuring", {})
        about = {"towers": eyes.towers(), **eyes.pair, "videos": eyes.num_videos - len(held_out)}
        fitted = session.ask({"command": "fit", "path": str(eyes.map_path), "about": about, "held_out": held_out})
        report("measured", {"note": f"R2 {max(fitted['r2'].values()):.3f}"})
        own = _measure(session, asked, eyes)
        report("measured", {"note": f"own tower: {own['acceptance_length']:.3f}"})
    report("loading", {"label": "the engine with the map"})
    with EngineSession(eyes.job(draft_vision=str(eyes.map_path))) as session:
        report("measuring", {})
        mapped = _measure(session, asked, eyes)
        report("measured", {"note": f"map: {mapped['acceptance_length']:.3f}"})
    share = mapped["acceptance_length"] / own["acceptance_length"]
    before = _before(eyes)
    config = {key: value for key, value in before.get("config", {}).items() if key != "draft_vision"}
    if share >= LEAST_SHARE:
        config["draft_vision"] = eyes.map_path.name
    return {
        **(before or {"prune_ratio": eyes.prune_ratio, **eyes.pair}),
        "config": config,
        "eyes": {
            **about,
            "held_out": len(held_out),
            "asked": len(asked),
            **{key: fitted[key] for key in ("r2", "tokens")},
            "own": own,
            "mapped": mapped,
            "share": share,
            "provenance": provenance(),
        },
    }


def _measure(session: EngineSession, asked: list[int], eyes: Eyes) -> dict[str, Any]:
    answer = session.ask(answer_command(max_tokens=eyes.max_tokens) | {"indices": asked})
    figures = summarize(answer["metrics"])
    if not figures["num_drafts"]:
        raise VidSpecError("nothing was drafted: the answers are too short, or the draft's KV pool too small")
    return {name: figures[name] for name in ("acceptance_length", "num_drafts")}


def with_map(result: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return a calibration's result with the map of an earlier file of the same pair, if that is at `path`."""
    before = _read(Path(path), {name: result[name] for name in ("target", "draft")}) or {}
    if "eyes" not in before:
        return result
    named = {key: value for key, value in before["config"].items() if key == "draft_vision"}
    return {**result, "config": {**result["config"], **named}, "eyes": before["eyes"]}


def _before(eyes: Eyes) -> dict[str, Any]:
    """Return what a calibration file of the same pair holds already; a VidSpecError for one of another."""
    found = _read(Path(eyes.out), eyes.pair)
    if found is None and Path(eyes.out).exists():
        raise VidSpecError(f"--out: {eyes.out} is no calibration of this pair; name another file")
    return found or {}


def _read(path: Path, pair: dict[str, Any]) -> dict[str, Any] | None:
    """Return a calibration file of a pair; None where it is none, or of another."""
    try:
        found = json.loads(path.read_text())
        return found if {name: found[name] for name in pair} == pair else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
