"""`vidspec show-pruning`: what each pruner leaves of one video, as a picture; an engine in a subprocess prunes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_vidspec.config import AUTO
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import contact_sheet, pairs
from vllm_vidspec.tools.calibrate import Subject
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.plots import check_plot
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.user_files import read_video

NUM_FRAMES = 32  # what vLLM samples a video to unless it is told otherwise
PRUNERS = ("uniform", "random", "specvlm", "attention", "uv", "dycoke")


@dataclass(frozen=True)
class Show(Subject):
    video: str | None = None  # a file; None: the bundled one
    out: str = "pruning.png"  # the file to write
    pruners: tuple[str, ...] = PRUNERS  # one row each
    columns: int = 16  # most frames in a row
    frames: int | None = None  # that a bundled pair's video is sampled to; None: as many as it was trained on
    calibration: str | None = None  # a file of `vidspec calibrate`; None: the bundled pair's own

    @property
    def path(self) -> Path:
        return pairs.sample_video() if self.video is None else Path(self.video)

    @property
    def num_frames(self) -> int:
        """How many frames of the video the models see at most."""
        if self.target is not None:
            return NUM_FRAMES
        return self.frames or pairs.pair_for(self.family).num_frames

    @property
    def source(self) -> dict[str, Any]:
        """The video, and its frames."""
        return {"videos": [str(self.path)], "num_frames": self.num_frames}

    def llm_kwargs(self, **spec: Any) -> dict[str, Any]:
        """Return the arguments of an engine that observes what any of the pruners needs."""
        spec = {"pruner": AUTO, "auto_pruners": self.pruners} | spec
        return super().llm_kwargs(**({"calibration": self.calibration} if self.calibration else {}), **spec)


def check(show: Show) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    show.check()
    check_plot(show.out, "--out", (".png",))
    show.config()


def run(show: Show, report: Report = silent) -> dict[str, Any]:
    """Prune one video in every way asked for and draw the picture; return `rows`, one per pruner, and `out`."""
    check(show)
    frames = read_video(show.path, show.num_frames)
    rows = _look(show, report)
    grid = rows[0].grid
    if grid.tokens_per_frame * grid.num_frames == 0 or (grid.num_frames == grid.height == 1 < grid.width):
        raise VidSpecError(f"the layout of the video's {grid.num_tokens} tokens is unknown: nothing can be drawn")
    what = f"{show.path.name}: {show.target or show.family}, prune ratio {show.prune_ratio:g}"
    contact_sheet.draw(show.out, frames, rows, f"What the draft sees of {what}", show.columns)
    shape = [grid.num_frames, grid.height, grid.width, grid.num_trailing]
    return {"rows": [row.figures() for row in rows], "grid": shape, "out": show.out}


def _look(show: Show, report: Report) -> list[contact_sheet.Row]:
    """Return what each pruner keeps: one engine, retuned from one to the next."""
    from vllm_vidspec.pruning import SCORE_NEEDS, TokenGrid, get_pruner

    pruners, rows = show.config().auto_pruners, []
    report("loading", {"label": "the engine"})
    with EngineSession(show.job()) as session:
        report("plan", {"total": len(pruners)})
        report("measuring", {})
        for pruner in pruners:
            items = session.ask({"command": "look", "knobs": {"pruner": pruner}})["items"]
            if not items:
                raise VidSpecError("the engine did not prune the video: nothing was drafted")
            grid, kept = TokenGrid(*items[0]["grid"]), items[0]["kept_indices"]
            # An engine makes do without guidance; what is shown would then not be what was asked for.
            is_unguided = get_pruner(pruner).needs & SCORE_NEEDS and items[0]["scores"] is None
            if is_unguided and 0 < len(kept) < grid.num_tokens:
                raise VidSpecError(f"pruner {pruner}: the engine measured nothing for it (see vidspec's log lines)")
            rows.append(contact_sheet.Row(pruner, np.array(kept, dtype=np.int64), grid))
            report("measured", {"note": pruner})
    return rows
