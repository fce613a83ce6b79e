"""`vidspec show-pruning`: what each pruner leaves of one video, as a picture; scores come from engine subprocesses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_vidspec.config import VidSpecConfig, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import contact_sheet, pairs
from vllm_vidspec.tools.calibrate import Calibration, check_models
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.user_files import check_output, check_video, read_video

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_vidspec.pruning import TokenGrid

NUM_FRAMES = 32  # what vLLM samples a video to unless it is told otherwise
PRUNERS = ("uniform", "random", "specvlm", "attention", "uv", "dycoke")

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Show:
    """What to show.

    Attributes:
        video: A file; None: the bundled one.
        out: The picture to write.
        pruners: One row each.
        family: The bundled pair, unless `target` is given; its target guides the pruning.
        target: A target of the user's own.
        draft: Its draft, or "self"; None: the bundled draft of `family`.
        prune_ratio: Share of the video tokens that is dropped.
        question: What is asked about the video; `specvlm`, `attention` and `uv` depend on it.
        columns: Most frames in a row.
        calibration: A file of `vidspec calibrate`; None: the bundled pair's own.
        engine_args: `LLM` arguments that replace ours.
    """

    video: str | None = None
    out: str = "pruning.png"
    pruners: tuple[str, ...] = PRUNERS
    family: str = "qwen2.5-vl"
    target: str | None = None
    draft: str | None = None
    prune_ratio: float = 0.9
    question: str = pairs.DEFAULT_QUESTION
    columns: int = 16
    calibration: str | None = None
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
            engine_args=self.engine_args,
        )

    @property
    def num_frames(self) -> int:
        """How many frames of the video the models see at most."""
        return pairs.pair_for(self.family).num_frames if self.target is None else NUM_FRAMES

    def job(self, pruner: str) -> dict[str, Any]:
        """Return what `session_job` reads to prune the video with one pruner."""
        return self.models.job(pruner=pruner, **({"calibration": self.calibration} if self.calibration else {}))

    def config(self, pruner: str) -> VidSpecConfig:
        """Return the validated knobs of one pruner, which are the engine's."""
        return parse_config(self.job(pruner)["llm"]["speculative_config"])[0]


@dataclass(frozen=True)
class Record:
    """How an engine pruned the video: what it measured, and what its own pruner kept."""

    pruner: str
    grid: "TokenGrid"
    kept_indices: "Tensor"
    scores: "Tensor | None"
    features: "Tensor | None"


def check(show: Show) -> None:
    """Refuse a wrong value before an engine starts.

    Raises:
        VidSpecError: One line naming it.
    """
    check_models(show.models)
    if not show.pruners:
        raise VidSpecError("--pruner: no value given")
    for pruner in show.pruners:
        show.config(pruner)
    if show.columns < 1:
        raise VidSpecError("--columns must be at least 1")
    check_video(show.path)
    check_output(show.out)
    if Path(show.out).suffix.lower() != ".png":
        raise VidSpecError(f"--out: {show.out} must end in .png")


def run(show: Show, report: Report = lambda _event, _fields: None) -> dict[str, Any]:
    """Prune one video in every way asked for and draw the picture.

    Args:
        show: What to show.
        report: Called with "plan" (`total` engines), then "loading" (`label`) before and "done" after each.

    Returns:
        `rows`, one per pruner (`pruner`, `kept`, `total`, `ends_frac`, `even_frac`), and `out`.

    Raises:
        VidSpecError: A wrong value, an engine that stopped, or a video whose tokens cannot be laid out.
    """
    check(show)
    frames = read_video(show.path, show.num_frames)
    configs = list({config.prune.pruner: config for config in map(show.config, show.pruners)}.values())
    records = _look(show, _engines(configs), report)
    grid = records[0].grid
    if any(record.grid != grid for record in records):
        raise VidSpecError("the engines saw different token grids; please report this")
    if grid.tokens_per_frame * grid.num_frames == 0 or (grid.num_frames == grid.height == 1 < grid.width):
        raise VidSpecError(f"the layout of the video's {grid.num_tokens} tokens is unknown: nothing can be drawn")
    what = f"{show.target or show.family}, prune ratio {show.prune_ratio:g}"
    rows = [contact_sheet.Row(config.prune.pruner, choose(config, records), grid) for config in configs]
    image = contact_sheet.draw(
        frames,
        grid,
        rows,
        title=f"What the draft sees of {show.path.name}: {what}",
        columns=show.columns,
    )
    contact_sheet.save(image, show.out, rows)
    return {"rows": [row.figures() for row in rows], "out": show.out}


def _engines(configs: list[VidSpecConfig]) -> list[str]:
    """Return the pruners to run engines with: one for each thing that has to be measured, else just the first."""
    from vllm_vidspec.pruning import get_pruner

    first: dict[frozenset[str], str] = {}
    for config in configs:
        first.setdefault(get_pruner(config.prune.pruner).needs, config.prune.pruner)
    return [pruner for needs, pruner in first.items() if needs] or [configs[0].prune.pruner]


def _look(show: Show, pruners: list[str], report: Report) -> list[Record]:
    """Run one engine per pruner and return what it saw."""
    import torch

    from vllm_vidspec.pruning import TokenGrid

    records = []
    report("plan", {"total": len(pruners)})
    for pruner in pruners:
        report("loading", {"label": f"engine with pruner {pruner}"})
        with EngineSession(show.job(pruner)) as session:
            path = session.folder / "records.pt"
            session.ask({"command": "look", "path": str(path)})
            found = torch.load(path, weights_only=True)
        if not found:
            raise VidSpecError(f"the engine with pruner {pruner} did not prune the video: nothing was drafted")
        grid = TokenGrid(*found[0].pop("grid"))
        records.append(Record(pruner, grid, **found[0]))
        report("done", {})
    return records


def choose(config: VidSpecConfig, records: list[Record]) -> "Tensor":
    """Prune as the engine would, from what the engines measured.

    Args:
        config: Pruner, ratio and knobs.
        records: At least one; all of one grid.

    Returns:
        int64 `[num_keep]`, ascending.

    Raises:
        VidSpecError: What the pruner needs was not measured, or an engine that ran this pruner chose otherwise.
    """
    import torch

    from vllm_vidspec.pruning import SCORE_NEEDS, PruneInputs, budget, get_pruner

    pruner, grid = get_pruner(config.prune.pruner), records[0].grid
    num_keep = budget(grid.num_tokens, config.prune.ratio_for("video"))
    measured = next((r for r in records if pruner.needs and get_pruner(r.pruner).needs == pruner.needs), None)
    scores = measured.scores if measured else None
    features = measured.features if measured else None
    is_choice = 0 < num_keep < grid.num_tokens
    if is_choice and (
        (pruner.needs & SCORE_NEEDS and scores is None) or ("features" in pruner.needs and features is None)
    ):
        raise VidSpecError(f"pruner {pruner.name}: the engine measured nothing for it (see vidspec's log lines)")
    if is_choice:
        inputs = PruneInputs(grid, num_keep, scores, features, lambda_r=config.prune.lambda_r, seed=config.prune.seed)
        kept = pruner(inputs)
    else:
        kept = torch.arange(num_keep)
    for record in records:
        if record.pruner == config.prune.pruner and not torch.equal(record.kept_indices, kept):
            raise VidSpecError(f"pruner {pruner.name}: the engine kept other tokens than shown; please report this")
    return kept
