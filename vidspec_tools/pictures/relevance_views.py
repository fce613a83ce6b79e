"""How `vidspec show-relevance` shows itself: a picture, and the table; no engine."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from vidspec_tools.captions import KINDS
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent
from vllm_vidspec.tools.user_files import writing

SUFFIXES = (".png",)
WIDTH = 1200  # of the picture, in pixels

# From white to an orange that black text stays readable on.
_LOW, _HIGH = np.array([255, 255, 255]), np.array([247, 148, 60])
_UNMEASURED = "#e4e4e4"
# What is drawn around a token, and what it says.
_MARKS = {
    "loosened": ("#0b5cad", "loosened: the target would have written another token"),
    "shifted": ("#8a1538", "shifted: the target would have written another token of the same draft"),
}


def write(row: dict[str, Any], path: str) -> None:
    """Write the picture of a row of `show_relevance.run`."""
    with writing(path):
        _draw(row).save(path)


def scale(relevance: Sequence[float | None]) -> tuple[float, float]:
    """Return the values that are shown in the palest and in the strongest colour: the 5th and 95th percentiles."""
    values = [value for value in relevance if value is not None]
    low, high = np.percentile(values, [5, 95]) if values else (0.0, 0.0)
    return float(low), float(high)


def color(value: float | None, ends: tuple[float, float]) -> str:
    """Return the colour of a relevance as #rrggbb."""
    if value is None:
        return _UNMEASURED
    low, high = ends
    share = 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
    return "#" + "".join(f"{round(part):02x}" for part in (1 - share) * _LOW + share * _HIGH)


def title(row: dict[str, Any]) -> str:
    """Return the headline."""
    return f"Visual relevance of each token: {row['video']}, {row['family'] or Path(row['target']).name}"


def setting(row: dict[str, Any]) -> str:
    """Return the setting in words."""
    rows = "its own state" if row["relevance_rows"] == "token" else "the state that predicts it"
    shift = "with" if row["position_shift"] else "without"
    return (
        f"lambda {row['lambda_loose']:g}, N {row['top_n']}, {shift} position shift, relevance of {rows}; "
        f"K {row['num_speculative_tokens']}, prune ratio {row['prune_ratio']:g}, temperature {row['temperature']:g}"
    )


def figures(row: dict[str, Any]) -> list[str]:
    """Return in sentences what became of the drafts and, where it is known, what relevance tells apart."""
    found = [
        f"{len(row['words'])} tokens, {number(row['acceptance_length'], 2)} per verify step; of the accepted drafts "
        f"{percent(row['loosened_frac'])} loosened, {percent(row['shifted_frac'])} shifted."
    ]
    if row["relevance_auc"] is not None:
        found.append(
            f"Words about the video are more relevant than fillers in {percent(row['relevance_auc'])} of pairs."
        )
    return found


def _tokens(row: dict[str, Any]) -> Iterator[tuple[str, float | None, str]]:
    """Yield the text of each token, its relevance and its kind's name."""
    for word, value, kind in zip(row["words"], row["relevance"], row["kinds"], strict=True):
        yield word, value, KINDS[kind]


def _draw(row: dict[str, Any]) -> Any:
    """Draw the setting, the caption and a legend with Pillow, whose own face has western languages' characters."""
    from PIL import Image, ImageDraw, ImageFont

    font, small, left = ImageFont.load_default(16), ImageFont.load_default(13), 20
    image = Image.new("RGB", (WIDTH, 200 + 28 * len(row["words"])), "#ffffff")  # as if each token had its line
    pen, ends = ImageDraw.Draw(image), scale(row["relevance"])
    x, y = left, 70

    def token(text: str, kind: str, background: str) -> None:
        nonlocal x, y
        shown = text.strip(" ").replace("\n", "¶") or "·"
        width = int(font.getlength(shown)) + 8
        if x + width > WIDTH - left:
            x, y = left, y + 28
        tint = _MARKS[kind][0] if kind in _MARKS else background
        pen.rounded_rectangle((x, y, x + width, y + 22), 4, fill=background, outline=tint, width=2)
        pen.text((x + 4, y + 2), shown, font=font, fill="#111111" if kind != "own" else "#555555")
        x += width + (4 if kind in _MARKS else 2)
        if "\n" in text:
            x, y = left, y + 28

    for line, (text, face) in enumerate(((title(row), font), (setting(row), small))):
        pen.text((left, 12 + 24 * line), text, font=face, fill="#111111")
    for word, value, kind in _tokens(row):
        token(word, kind, color(value, ends))
    words = [*figures(row), f"relevance: white {ends[0]:.3f}, orange {ends[1]:.3f}; grey text: the target's own token"]
    for line, text in enumerate(words, 1):
        pen.text((left, y + 20 * line + 20), text, font=small, fill="#444444")
    y += 20 * len(words) + 46
    for kind, (_, said) in _MARKS.items():
        x = left
        token(kind, kind, "#ffffff")
        pen.text((x + 8, y + 4), said, font=small, fill="#444444")
        y += 28
    return image.crop((0, 0, WIDTH, y + 12))


def table(row: dict[str, Any]) -> Table:
    """Return how many tokens there are of each kind, and their mean relevance."""
    columns: Columns = {
        "token": itemgetter(0),
        "for example": itemgetter(1),
        "number": itemgetter(2),
        "mean relevance": itemgetter(3),
    }
    rows = []
    for kind in KINDS:
        ours = [(word, value) for word, value, of in _tokens(row) if of == kind]
        values = [value for _, value in ours if value is not None]
        words = list(dict.fromkeys(word.strip() for word, _ in ours))[:6]
        mean = sum(values) / len(values) if values else None
        rows.append((kind, escape(" ".join(words)), str(len(ours)), number(mean, 3)))
    caption = f"{setting(row)}. {' '.join(figures(row))}"
    return by_columns(columns, rows, 2, title=title(row), caption=caption)
