"""How `vidspec show-pruning` shows itself: the picture, one row per pruner and kept tokens lit; the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from vllm_vidspec.tools.tables import by_columns
from vllm_vidspec.tools.user_files import writing

if TYPE_CHECKING:
    from vllm_vidspec.pruning import TokenGrid

DIM = 0.25  # brightness of a dropped token
_WIDTH, _MOST_CELL, GAP = 1600, 168, 6  # pixels: of a row, about; of a frame, at most; between two frames
_FRAME = (255, 196, 60)  # colour around a kept token


@dataclass(frozen=True)
class Row:
    pruner: str  # its name
    kept_indices: np.ndarray  # int64 `[k]`, ascending
    grid: "TokenGrid"  # layout of the video's tokens

    @cached_property
    def is_kept(self) -> np.ndarray:
        """Bool `[num_frames, height, width]`, without the trailing tokens."""
        flat = np.zeros(self.grid.num_tokens, bool)
        flat[self.kept_indices] = True
        num_drawn = self.grid.num_frames * self.grid.tokens_per_frame
        return flat[:num_drawn].reshape(self.grid.num_frames, self.grid.height, self.grid.width)

    def figures(self) -> dict[str, Any]:
        """Return what the picture says in words."""
        return {"pruner": self.pruner, "kept": len(self.kept_indices), "total": self.grid.num_tokens}

    def label(self) -> str:
        words = "{pruner}: {kept} of {total} tokens kept".format(**self.figures())
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


def draw(path: str | Path, frames: np.ndarray, rows: Sequence[Row], title: str, columns: int = 16) -> None:
    """Draw rows of one grid as a PNG file, at most `columns` frames in a row; its text chunk "Description" says the
    labels in words.
    """
    from matplotlib.figure import Figure

    grid = rows[0].grid
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
    columns = {"pruner": "{pruner}", "kept": "{kept}", "of": "{total}"}
    return by_columns(columns, result["rows"], title="What the draft sees")
