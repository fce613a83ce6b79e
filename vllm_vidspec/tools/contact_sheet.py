"""How `vidspec show-pruning` shows itself: the picture, one row per pruner and kept tokens lit; the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from vllm_vidspec.tools.tables import Columns, by_columns, percent
from vllm_vidspec.tools.user_files import writing

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_vidspec.pruning import TokenGrid

DIM = 0.25  # brightness of a dropped token
_ENDS = 2  # frames at either end that count as the ends of the video
_WIDTH, _MOST_CELL, GAP = 1600, 168, 6  # pixels: of a row, about; of a frame, at most; between two frames
_FRAME = (255, 196, 60)  # colour around a kept token


@dataclass(frozen=True)
class Row:
    pruner: str  # its name
    kept_indices: "Tensor"  # int64 `[k]`, ascending
    grid: "TokenGrid"  # layout of the video's tokens

    @cached_property
    def is_kept(self) -> np.ndarray:
        """Bool `[num_frames, height, width]`, without the trailing tokens."""
        flat = np.zeros(self.grid.num_tokens, bool)
        flat[self.kept_indices.numpy()] = True
        num_drawn = self.grid.num_frames * self.grid.tokens_per_frame
        return flat[:num_drawn].reshape(self.grid.num_frames, self.grid.height, self.grid.width)

    @property
    def ends_frac(self) -> float | None:
        """Share of the drawn kept tokens that lie in the first and last two frames; None for a short video."""
        per_frame = self.is_kept.sum((1, 2))
        if self.grid.num_frames <= 2 * _ENDS or not per_frame.any():
            return None
        return float((per_frame[:_ENDS].sum() + per_frame[-_ENDS:].sum()) / per_frame.sum())

    def figures(self) -> dict[str, Any]:
        """Return what the picture says in words; `even_frac` is `ends_frac` if every frame kept as much."""
        return {
            "pruner": self.pruner,
            "kept": len(self.kept_indices),
            "total": self.grid.num_tokens,
            "ends_frac": self.ends_frac,
            "even_frac": min(1.0, 2 * _ENDS / self.grid.num_frames),
        }

    def label(self) -> str:
        found = self.figures()
        words = f"{self.pruner}: {found['kept']} of {found['total']} tokens kept"
        if found["ends_frac"] is not None:
            spread = f"evenly spread: {found['even_frac']:.0%}"
            words += f", {found['ends_frac']:.0%} of them in the first and last {_ENDS} frames ({spread})"
        if self.grid.num_trailing:
            trailing = int((self.kept_indices >= self.grid.num_tokens - self.grid.num_trailing).sum())
            words += f", trailing tokens: {trailing} of {self.grid.num_trailing}"
        return words


def shown_frames(grid: "TokenGrid", columns: int) -> list[int]:
    """Return the frames of a grid that are drawn, evenly spaced where there are more than `columns`."""
    from vllm_vidspec.pruning import linspace_indices

    return linspace_indices(grid.num_frames, min(columns, grid.num_frames)).tolist()


def strip(frames: np.ndarray, row: Row, shown: Sequence[int]) -> np.ndarray:
    """Return a row of the picture, `[height, width, 3]` uint8: the `shown` frames side by side, their kept tokens lit
    and framed, the others dark.

    `frames` are `[num_frames, height, width, 3]` uint8, RGB; as many as the model was shown, which may be several to
    one frame of its token grid: of those the first is drawn.
    """
    import cv2

    grid, cells = row.grid, []
    side = max(2, min(_WIDTH // len(shown) - GAP, _MOST_CELL) // max(grid.height, grid.width))  # of a token
    edge = np.zeros((side, side), bool)
    edge[0] = edge[:, 0] = side >= 6
    edges = np.tile(edge, (grid.height, grid.width))[..., None]
    per_step = -(-len(frames) // grid.num_frames)
    for step in shown:
        frame = frames[min(step * per_step, len(frames) - 1)]
        frame = cv2.resize(frame, (grid.width * side, grid.height * side), interpolation=cv2.INTER_AREA)
        lit = np.kron(row.is_kept[step], np.ones((side, side), bool))[..., None]
        cell = np.where(lit, frame, (frame * DIM).astype(np.uint8))
        cell = np.where(edges, np.where(lit, np.array(_FRAME, np.uint8), np.uint8(0)), cell)
        cells.append(np.pad(cell, ((0, 0), (0, GAP), (0, 0)), constant_values=255))
    return np.concatenate(cells, 1)


def draw(
    path: str | Path, frames: np.ndarray, grid: "TokenGrid", rows: Sequence[Row], title: str, columns: int = 16
) -> None:
    """Draw the contact sheet as a PNG file, at most `columns` frames in a row; its text chunk "Description" says the
    labels in words.
    """
    from matplotlib.figure import Figure

    shown = shown_frames(grid, columns)
    strips = [strip(frames, row, shown) for row in rows]
    height, width = strips[0].shape[:2]
    size = (max(width, 900) / 100 + 0.4, len(rows) * (height / 100 + 0.7) + 1.2)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    for place, row, image in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows, strips, strict=True):
        place.imshow(image, interpolation="nearest")
        place.set_title(row.label(), loc="left", fontsize=11)
        each = width / len(shown)
        kept = row.is_kept.sum((1, 2))
        names = [f"{step}: {kept[step]}" for step in shown]
        place.set_xticks([(column + 0.5) * each for column in range(len(shown))], names, fontsize=8)
        place.set_yticks([])
        place.spines[:].set_visible(False)
    figure.suptitle(title)
    figure.supxlabel(_caption(grid, len(shown), -(-len(frames) // grid.num_frames)), fontsize=9)
    with writing(path):
        figure.savefig(path, format="png", metadata={"Description": "; ".join(row.label() for row in rows)})


def _caption(grid: "TokenGrid", num_shown: int, per_step: int) -> str:
    each = f"{grid.height} x {grid.width} tokens"
    if per_step > 1:
        each += f" over {per_step} video frames, the first shown"
    chosen = "" if num_shown == grid.num_frames else f"; {num_shown} evenly spaced ones shown"
    trailing = f" {grid.num_trailing} trailing token(s) not drawn, but counted." if grid.num_trailing else ""
    return (
        f"Columns: the model's {grid.num_frames} frames of {each}{chosen}.\n"
        f"Lit and framed: kept. Dark: dropped. Below: a frame's number, and how many tokens of it are kept.{trailing}"
    )


def table(result: dict[str, Any]) -> Table:
    columns: Columns = {
        "pruner": lambda row: row["pruner"],
        "kept": lambda row: str(row["kept"]),
        "of": lambda row: str(row["total"]),
        f"in the first and\nlast {_ENDS} frames": lambda row: percent(row["ends_frac"]),
        "evenly\nspread": lambda row: "-" if row["ends_frac"] is None else percent(row["even_frac"]),
    }
    return by_columns(columns, result["rows"], title="What the draft sees")
