"""`vidspec show-pruning`: what each pruner leaves of one video, as a picture; scores come from engine subprocesses."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import contact_sheet, pairs
from vllm_vidspec.tools.calibrate import Subject
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.user_files import check_output, read_video

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_vidspec.pruning import TokenGrid

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
        return super().llm_kwargs(**({"calibration": self.calibration} if self.calibration else {}), **spec)


@dataclass(frozen=True)
class Record:
    """How an engine pruned the video: what it measured, and what its own pruner kept."""

    pruner: str
    grid: "TokenGrid"
    kept_indices: "Tensor"
    scores: "Tensor | None"
    features: "Tensor | None"


def check(show: Show) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    show.check()
    check_output(show.out, suffixes=(".png",), drawn=(".png",))
    if not show.pruners:
        raise VidSpecError("--pruner: no value given")
    for pruner in show.pruners:
        show.config(pruner=pruner)


def run(show: Show, report: Report = silent) -> dict[str, Any]:
    """Prune one video in every way asked for and draw the picture; return `rows`, one per pruner, and `out`."""
    check(show)
    frames = read_video(show.path, show.num_frames)
    configs = {config.pruner: config for config in (show.config(pruner=name) for name in show.pruners)}
    records = _look(show, _engines(list(configs.values())), report)
    grid = records[0].grid
    if any(record.grid != grid for record in records):
        raise VidSpecError("the engines saw different token grids; please report this")
    if grid.tokens_per_frame * grid.num_frames == 0 or (grid.num_frames == grid.height == 1 < grid.width):
        raise VidSpecError(f"the layout of the video's {grid.num_tokens} tokens is unknown: nothing can be drawn")
    rows = [contact_sheet.Row(config.pruner, choose(config, records), grid) for config in configs.values()]
    what = f"{show.path.name}: {show.target or show.family}, prune ratio {show.prune_ratio:g}"
    contact_sheet.draw(show.out, frames, grid, rows, f"What the draft sees of {what}", show.columns)
    shape = [grid.num_frames, grid.height, grid.width, grid.num_trailing]
    return {"rows": [row.figures() for row in rows], "grid": shape, "out": show.out}


def _engines(configs: list[VidSpecConfig]) -> list[str]:
    """Return the pruners to run engines with: one for each thing that has to be measured, else just the first."""
    from vllm_vidspec.pruning import get_pruner

    first: dict[frozenset[str], str] = {}
    for config in configs:
        first.setdefault(get_pruner(config.pruner).needs, config.pruner)
    return [pruner for needs, pruner in first.items() if needs] or [configs[0].pruner]


def _look(show: Show, pruners: list[str], report: Report) -> list[Record]:
    import torch

    from vllm_vidspec.pruning import TokenGrid

    records = []
    report("plan", {"total": len(pruners)})
    for pruner in pruners:
        report("loading", {"label": f"engine with pruner {pruner}"})
        with EngineSession(show.job(pruner=pruner)) as session:
            path = session.folder / "records.pt"
            session.ask({"command": "look", "path": str(path)})
            found = torch.load(path, weights_only=True)  # noqa: TID251 - written by our own engine a moment ago
        if not found:
            raise VidSpecError(f"the engine with pruner {pruner} did not prune the video: nothing was drafted")
        records.append(Record(pruner, TokenGrid(*found[0].pop("grid")), **found[0]))
        report("measured", {})
    return records


def choose(config: VidSpecConfig, records: list[Record]) -> "Tensor":
    """Prune as the engine would, from what the engines measured; int64 `[num_keep]`, ascending."""
    import torch

    from vllm_vidspec.pruning import SCORE_NEEDS, budget, get_pruner
    from vllm_vidspec.pruning.frames import PruneUnit
    from vllm_vidspec.pruning.prompt import choose_kept

    pruner, grid = get_pruner(config.pruner), records[0].grid
    unit = PruneUnit(range(1), grid, budget(grid.num_tokens, config.ratio_for("video")))
    measured = next((r for r in records if pruner.needs and get_pruner(r.pruner).needs == pruner.needs), None)
    scores, features = (measured.scores, measured.features) if measured else (None, None)
    # The engine would make do without; what is shown would then not be what was asked for.
    if unit.is_choice and (
        (pruner.needs & SCORE_NEEDS and scores is None) or ("features" in pruner.needs and features is None)
    ):
        raise VidSpecError(f"pruner {pruner.name}: the engine measured nothing for it (see vidspec's log lines)")
    kept = choose_kept(unit, config, scores, features)
    for record in records:
        if record.pruner == config.pruner and not torch.equal(record.kept_indices, kept):
            raise VidSpecError(f"pruner {pruner.name}: the engine kept other tokens than shown; please report this")
    return kept
