"""How `vidspec show-pruning` shows itself: the picture (Pillow), one row per pruner and kept tokens lit; the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from vllm_vidspec.tools.tables import Columns, by_columns, percent

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vllm_vidspec.pruning import TokenGrid

DIM = 0.25  # brightness of a dropped token
_ENDS = 2  # frames at either end that count as the ends of the video

_SHEET_WIDTH, _MIN_WIDTH = 1600, 900  # of all columns together, about
_MIN_CELL, _MAX_CELL = 56, 168
_MARGIN, _GAP, _HEADER, _LABEL, _BARS, _LINE = 20, 6, 60, 26, 20, 22
_BACKGROUND, _TEXT, _FAINT, _ACCENT = (20, 22, 27), (236, 238, 242), (150, 156, 168), (255, 196, 60)


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


@dataclass(frozen=True)
class Layout:
    grid: "TokenGrid"  # layout of the video's tokens
    frames: tuple[int, ...]  # the frames shown, one per column
    token: int  # side of a token

    @classmethod
    def fit(cls, grid: "TokenGrid", columns: int) -> "Layout":
        """Choose the frames, evenly spaced where there are more than `columns`, and the size of their tokens."""
        from vllm_vidspec.pruning import linspace_indices

        frames = tuple(linspace_indices(grid.num_frames, min(columns, grid.num_frames)).tolist())
        cell = min(max(_SHEET_WIDTH // len(frames) - _GAP, _MIN_CELL), _MAX_CELL)
        return cls(grid, frames, max(2, cell // max(grid.height, grid.width)))

    @property
    def cell(self) -> tuple[int, int]:
        return self.grid.width * self.token, self.grid.height * self.token

    def size(self, num_rows: int) -> tuple[int, int]:
        columns = len(self.frames) * (self.cell[0] + _GAP) - _GAP
        return max(columns + 2 * _MARGIN, _MIN_WIDTH), self.origin(num_rows, 0)[1] + 2 * _LINE

    def origin(self, row: int, column: int) -> tuple[int, int]:
        top = _HEADER + _LABEL + row * (_LABEL + self.cell[1] + _BARS)
        return _MARGIN + column * (self.cell[0] + _GAP), top

    def token_box(self, row: int, column: int, y: int, x: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of a token, the last two exclusive."""
        left, top = self.origin(row, column)
        left, top = left + x * self.token, top + y * self.token
        return left, top, left + self.token, top + self.token


def draw(frames: np.ndarray, grid: "TokenGrid", rows: Sequence[Row], title: str, columns: int = 16) -> "Image":
    """Draw the contact sheet, at most `columns` frames in a row.

    Frames are `[num_frames, height, width, 3]` uint8, RGB; as many as the model was shown, which may be several to one
    frame of its token grid: of those the first is drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    layout = Layout.fit(grid, columns)
    image = Image.new("RGB", layout.size(len(rows)), _BACKGROUND)
    pen = ImageDraw.Draw(image)

    def write(x: float, y: float, text: str, size: int, fill: Any = _FAINT) -> None:
        pen.text((x, y), text, font=ImageFont.load_default(size), fill=fill)

    per_step = -(-len(frames) // grid.num_frames)
    shown = [Image.fromarray(frames[min(step * per_step, len(frames) - 1)]) for step in layout.frames]
    cells = [np.asarray(frame.resize(layout.cell, Image.Resampling.LANCZOS)) for frame in shown]
    most = max(1, *(int(row.is_kept.sum((1, 2)).max()) for row in rows))
    write(_MARGIN, 12, title, 20, _TEXT)
    for index, row in enumerate(rows):
        write(_MARGIN, layout.origin(index, 0)[1] - 22, row.label(), 15, _TEXT)
        for column, (step, cell) in enumerate(zip(layout.frames, cells, strict=True)):
            left, top = layout.origin(index, column)
            if index == 0:
                write(left, _HEADER - 16, f"frame {step}", 11)
            image.paste(Image.fromarray(_lit(cell, row.is_kept[step], layout.token)), (left, top))
            tall, below = round(int(row.is_kept[step].sum()) / most * (_BARS - 6)), top + layout.cell[1] + _BARS - 4
            pen.rectangle((left, below - tall, left + layout.cell[0] - 1, below), fill=_ACCENT if tall else _FAINT)
    for line, text in enumerate(_caption(grid, layout, per_step)):
        write(_MARGIN, layout.origin(len(rows), 0)[1] - _LABEL + 6 + line * _LINE, text, 14)
    return image


def _lit(cell: np.ndarray, is_kept: np.ndarray, side: int) -> np.ndarray:
    """Return a frame, `[height, width, 3]`, with its kept tokens lit and framed, the others dark."""
    lit = np.kron(is_kept, np.ones((side, side), bool))[..., None]
    drawn = np.where(lit, cell, (cell * DIM).astype(np.uint8))
    if side < 6:
        return drawn
    edge = np.zeros((side, side), bool)
    edge[0] = edge[:, 0] = True
    edges = np.tile(edge, is_kept.shape)[..., None]
    return np.where(edges, np.where(lit, np.array(_ACCENT, np.uint8), np.uint8(0)), drawn)


def _caption(grid: "TokenGrid", layout: Layout, per_step: int) -> list[str]:
    each = f"{grid.height} x {grid.width} tokens"
    if per_step > 1:
        each += f" over {per_step} video frames, the first shown"
    chosen = "" if len(layout.frames) == grid.num_frames else f"; {len(layout.frames)} evenly spaced ones shown"
    trailing = f" {grid.num_trailing} trailing token(s) not drawn, but counted." if grid.num_trailing else ""
    return [
        f"Columns: the model's {grid.num_frames} frames of {each}{chosen}.",
        f"Lit and framed: kept. Dark: dropped. Bars: tokens kept of each frame, one scale for all rows.{trailing}",
    ]


def save(image: "Image", path: str | Path, rows: Sequence[Row]) -> None:
    """Write the PNG file; its text chunk "Description" says the labels in words."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("Description", "; ".join(row.label() for row in rows))
    image.save(path, format="PNG", pnginfo=info)


def table(result: dict[str, Any]) -> Table:
    columns: Columns = {
        "pruner": lambda row: row["pruner"],
        "kept": lambda row: str(row["kept"]),
        "of": lambda row: str(row["total"]),
        f"in the first and\nlast {_ENDS} frames": lambda row: percent(row["ends_frac"]),
        "evenly\nspread": lambda row: "-" if row["ends_frac"] is None else percent(row["even_frac"]),
    }
    return by_columns(columns, result["rows"], title="What the draft sees")
