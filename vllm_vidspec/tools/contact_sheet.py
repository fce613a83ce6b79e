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

_SHEET_WIDTH = 1600  # of all columns together, about
_MIN_CELL, _MAX_CELL = 56, 168
_MARGIN, _GAP, _ROW_GAP, _LABEL_WIDTH, _HEADER, _BARS, _CAPTION = 20, 6, 18, 236, 76, 22, 22
_BACKGROUND, _TEXT, _FAINT, _ACCENT, _GRID = (20, 22, 27), (236, 238, 242), (150, 156, 168), (255, 196, 60), (0, 0, 0)
_BASE = (60, 64, 72)  # of the bars


@dataclass(frozen=True)
class Row:
    """What one pruner kept.

    Attributes:
        pruner: Its name.
        kept_indices: int64 `[k]`, ascending.
        grid: Layout of the video's tokens.
    """

    pruner: str
    kept_indices: "Tensor"
    grid: "TokenGrid"

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

    @property
    def even_frac(self) -> float:
        """What `ends_frac` would be if every frame kept as much."""
        return min(1.0, 2 * _ENDS / self.grid.num_frames)

    def figures(self) -> dict[str, Any]:
        """Return what the picture says in words."""
        return {
            "pruner": self.pruner,
            "kept": len(self.kept_indices),
            "total": self.grid.num_tokens,
            "ends_frac": self.ends_frac,
            "even_frac": self.even_frac,
        }

    def labels(self) -> list[str]:
        """Return the lines beside the row: the name first."""
        lines = [self.pruner, f"{len(self.kept_indices)} of {self.grid.num_tokens} tokens kept"]
        if self.ends_frac is not None:
            lines.append(f"first + last {_ENDS} frames: {self.ends_frac:.0%}")
            lines.append(f"(evenly spread: {self.even_frac:.0%})")
        if self.grid.num_trailing:
            trailing = int((self.kept_indices >= self.grid.num_tokens - self.grid.num_trailing).sum())
            lines.append(f"trailing tokens: {trailing} of {self.grid.num_trailing}")
        return lines


@dataclass(frozen=True)
class Layout:
    """Where things are in the picture, in pixels.

    Attributes:
        grid: Layout of the video's tokens.
        frames: The frames shown, one per column.
        token: Side of a token.
    """

    grid: "TokenGrid"
    frames: tuple[int, ...]
    token: int

    @classmethod
    def fit(cls, grid: "TokenGrid", columns: int) -> "Layout":
        """Choose the frames, evenly spaced where there are more than `columns`, and the size of their tokens."""
        from vllm_vidspec.pruning import linspace_indices

        frames = tuple(linspace_indices(grid.num_frames, min(columns, grid.num_frames)).tolist())
        cell = min(max(_SHEET_WIDTH // len(frames) - _GAP, _MIN_CELL), _MAX_CELL)
        return cls(grid, frames, max(2, cell // max(grid.height, grid.width)))

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a frame."""
        return self.grid.width * self.token, self.grid.height * self.token

    @property
    def row_height(self) -> int:
        """From one row's top to the next one's."""
        return max(self.cell[1] + _BARS, 6 * 17) + _ROW_GAP

    def size(self, num_rows: int) -> tuple[int, int]:
        """Width and height of the picture."""
        columns = len(self.frames) * (self.cell[0] + _GAP) - _GAP
        width = max(2 * _MARGIN + _LABEL_WIDTH + columns, 900)
        return width, _HEADER + num_rows * self.row_height + 2 * _CAPTION + _MARGIN

    def origin(self, row: int, column: int) -> tuple[int, int]:
        """The upper left corner of a frame."""
        return _MARGIN + _LABEL_WIDTH + column * (self.cell[0] + _GAP), _HEADER + row * self.row_height

    def token_box(self, row: int, column: int, y: int, x: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of a token, the last two exclusive."""
        left, top = self.origin(row, column)
        left, top = left + x * self.token, top + y * self.token
        return left, top, left + self.token, top + self.token


def draw(frames: np.ndarray, grid: "TokenGrid", rows: Sequence[Row], title: str, columns: int = 16) -> "Image":
    """Draw the contact sheet.

    Args:
        frames: `[num_frames, height, width, 3]` uint8, RGB; as many as the model was shown, which may be several to
            one frame of its token grid: of those the first is drawn.
        grid: Layout of the video's tokens.
        rows: One per pruner.
        title: The headline.
        columns: Most frames in a row.
    """
    from PIL import Image

    layout = Layout.fit(grid, columns)
    image = Image.new("RGB", layout.size(len(rows)), _BACKGROUND)
    per_step = -(-len(frames) // grid.num_frames)
    shown = [Image.fromarray(frames[min(step * per_step, len(frames) - 1)]) for step in layout.frames]
    cells = [np.asarray(frame.resize(layout.cell, Image.Resampling.LANCZOS)) for frame in shown]
    _write(image, (_MARGIN, 14), title, 20, _TEXT)
    _write(image, (_MARGIN + _LABEL_WIDTH - 12, _HEADER - 18), "frame", 12, anchor="ra")
    for column, step in enumerate(layout.frames):
        left, top = layout.origin(0, column)
        _write(image, (left + layout.cell[0] / 2, top - 18), str(step), 12, anchor="ma")
    most = max(1, *(int(row.is_kept.sum((1, 2)).max()) for row in rows))
    for index, row in enumerate(rows):
        _draw_row(image, layout, cells, index, row, most)
    for line, text in enumerate(_caption(grid, layout, per_step)):
        _write(image, (_MARGIN, layout.origin(len(rows), 0)[1] + line * _CAPTION), text, 14)
    return image


def _write(
    image: "Image", at: tuple[float, float], text: str, size: int, fill: Any = _FAINT, anchor: str | None = None
) -> None:
    from PIL import ImageDraw, ImageFont

    ImageDraw.Draw(image).text(at, text, font=ImageFont.load_default(size), fill=fill, anchor=anchor)


def _draw_row(image: "Image", layout: Layout, cells: Sequence[np.ndarray], index: int, row: Row, most: int) -> None:
    """Draw the labels, the frames with their kept tokens lit, and under each frame a bar: how many it keeps."""
    from PIL import Image, ImageDraw

    pen = ImageDraw.Draw(image)
    name, *others = row.labels()
    top = layout.origin(index, 0)[1]
    _write(image, (_MARGIN, top), name, 18, _TEXT)
    for line, text in enumerate(others):
        _write(image, (_MARGIN, top + 26 + 18 * line), text, 13)
    (width, height), side = layout.cell, layout.token
    for column, (step, cell) in enumerate(zip(layout.frames, cells, strict=True)):
        is_kept = row.is_kept[step]
        lit = np.kron(is_kept, np.ones((side, side), bool))[..., None]
        left, top = layout.origin(index, column)
        image.paste(Image.fromarray(np.where(lit, cell, (cell * DIM).astype(np.uint8))), (left, top))
        if side >= 6:
            for x in range(left + side, left + width, side):
                pen.line((x, top, x, top + height - 1), fill=_GRID)
            for y in range(top + side, top + height, side):
                pen.line((left, y, left + width - 1, y), fill=_GRID)
            for y, x in zip(*is_kept.nonzero(), strict=True):
                box = layout.token_box(index, column, int(y), int(x))
                pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=_ACCENT)
        base = top + height + _BARS - 2
        pen.line((left, base, left + width - 1, base), fill=_BASE)
        if tall := round(int(is_kept.sum()) / most * (_BARS - 6)):
            pen.rectangle((left, base - tall, left + width - 1, base - 1), fill=_ACCENT)


def _caption(grid: "TokenGrid", layout: Layout, per_step: int) -> list[str]:
    """Return the two lines under the picture."""
    each = f"{grid.height} x {grid.width} tokens" + (
        f" over {per_step} video frames, the first shown" if per_step > 1 else ""
    )
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
    info.add_text("Description", "; ".join(", ".join(row.labels()) for row in rows))
    image.save(path, format="PNG", pnginfo=info)


def table(result: dict[str, Any]) -> Table:
    """Return the rows of the picture as a table."""
    columns: Columns = {
        "pruner": lambda row: row["pruner"],
        "kept": lambda row: str(row["kept"]),
        "of": lambda row: str(row["total"]),
        f"in the first and\nlast {_ENDS} frames": lambda row: percent(row["ends_frac"]),
        "evenly\nspread": lambda row: "-" if row["ends_frac"] is None else percent(row["even_frac"]),
    }
    return by_columns(columns, result["rows"], title="What the draft sees")
