"""How `vidspec show-relevance` shows itself: HTML, or a picture (matplotlib), and the table; no engine."""

import html
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from vllm_vidspec.shapeworld.captions import KINDS
from vllm_vidspec.tools.tables import number, percent
from vllm_vidspec.tools.user_files import writing

SUFFIXES = (".html", ".png")
WIDTH = 100  # characters in a line of the picture

# From white to an orange that black text stays readable on.
_LOW, _HIGH = np.array([255, 255, 255]), np.array([247, 148, 60])
_UNMEASURED = "#e4e4e4"
# The marks differ in line and colour: one of them is enough to tell them apart.
_MARKS = {"loosened": ("#0b5cad", "solid"), "shifted": ("#8a1538", "dashed")}
_LEGEND = {
    "own": "the target's own token",
    "exact": "a draft that the target would have written, too",
    "loosened": "loosened: the target would have written another token",
    "shifted": "shifted: the target would have written another token of the same draft",
}
_STYLE = """
:root { color-scheme: light; }
body { background: #fff; color: #111; font: 16px/2 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; }
h1 { font-size: 1.2rem; margin: 0; }
p { margin: 0.4rem 0; }
.small { color: #444; font-size: 0.85rem; line-height: 1.5; }
.caption { border: solid #ccc; border-width: 1px 0; margin: 1rem 0; padding: 1rem 0; overflow-wrap: anywhere; }
.t { border: 2px solid transparent; border-radius: 4px; padding: 1px 3px; white-space: pre-wrap; }
.own { font-style: italic; }
.scale { border: 1px solid #ccc; display: inline-block; height: 0.8em; vertical-align: middle; width: 12em; }
.legend .t { margin-right: 0.3em; }
"""


def write(row: dict[str, Any], path: str) -> None:
    """Write the picture of a row of `show_relevance.run`; the suffix names the format."""
    with writing(path):
        if Path(path).suffix.lower() == ".png":
            _save_png(row, path)
        else:
            Path(path).write_text(to_html(row), encoding="utf-8")


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


def to_html(row: dict[str, Any]) -> str:
    """Return a page that needs no other file: the setting, a legend, the caption with a tooltip per token."""
    ends = scale(row["relevance"])
    caption = "".join(_html_token(word, value, kind, ends) for word, value, kind in _tokens(row))
    marks = "".join(
        f"<p>{_span('token', kind, color(ends[0], ends))} {html.escape(words)}</p>" for kind, words in _LEGEND.items()
    )
    marks += f"<p>{_span('token', 'exact', _UNMEASURED)} not measured</p>"
    style = "".join(f".{kind} {{ border: 2px {line} {tint}; }}\n" for kind, (tint, line) in _MARKS.items())
    gradient = f"linear-gradient(to right, {color(ends[0], ends)}, {color(ends[1], ends)})"
    lines = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title(row))}</title>',
        f"<style>{_STYLE}{style}</style></head><body>",
        f"<h1>{html.escape(title(row))}</h1>",
        f'<p class="small">{html.escape(setting(row))}</p>',
        f'<p class="small">Asked: {html.escape(row["question"])}</p>',
        f'<p class="caption">{caption}</p>',
        f'<p class="small">{html.escape(" ".join(figures(row)))}</p>',
        f'<div class="small legend"><p>{ends[0]:.3f} <span class="scale" style="background: {gradient}"></span> '
        f"{ends[1]:.3f} relevance (mean cosine with the {row['top_n']} most similar video tokens)</p>{marks}</div>",
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def _html_token(word: str, value: float | None, kind: str, ends: tuple[float, float]) -> str:
    """Return one token; spaces before it stay outside its box."""
    text = word.lstrip(" ")
    said = f"relevance {number(value, 4)}" if value is not None else "relevance not measured"
    hint = f"{text!r}: {said}, {_LEGEND[kind]}"
    shown = html.escape(text or "·").replace("\n", "↵<br>")
    return " " * (len(word) - len(text)) + _span(shown, kind, color(value, ends), hint)


def _span(shown: str, kind: str, background: str, hint: str = "") -> str:
    """Return a token's box around markup that is escaped already."""
    hint = f' title="{html.escape(hint)}"' if hint else ""
    return f'<span class="t {kind}" style="background: {background}"{hint}>{shown}</span>'


def lay_out(words: Sequence[str], width: int = WIDTH) -> list[tuple[int, int, str, int]]:
    """Return where each token is placed in lines of a fixed-width face.

    Args:
        words: The tokens' texts; a space before one parts it from the one before.
        width: Characters in a line; a longer token has a line of its own and sticks out.

    Returns:
        Line, column, what is shown and its width in characters, one per token.
    """
    places, line, column = [], 0, 0
    for word in words:
        text = word.lstrip(" ")
        shown = text.replace("\n", "↵") or "·"
        size = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in shown)
        gap = 1 if len(text) < len(word) and column else 0
        if column and column + gap + size > width:
            line, column, gap = line + 1, 0, 0
        places.append((line, column + gap, shown, size))
        column += gap + size
        if "\n" in text:
            line, column = line + 1, 0
    return places


def _save_png(row: dict[str, Any], path: str) -> None:
    """Draw the same with matplotlib, in a fixed-width face whose characters need not be measured."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    step, unit = 0.27, 0.0843  # inches: from line to line, and the width of a character of 10 points
    places, ends = lay_out(row["words"]), scale(row["relevance"])
    lines = places[-1][0] + 1
    head, foot = 3, 2.4 + len(figures(row)) + len(_MARKS)  # lines above and below the caption
    size = ((WIDTH + 4) * unit, (lines + head + foot) * step)
    figure = Figure(figsize=size, dpi=160)
    page = figure.add_axes((0, 0, 1, 1))
    page.set_xlim(-2, WIDTH + 2)
    page.set_ylim(lines + foot, -head)
    page.set_axis_off()

    def box_at(line: float, column: float, width: float, kind: str, background: str) -> None:
        tint, dash = _MARKS.get(kind, ("none", "solid"))
        look = {"facecolor": background, "edgecolor": tint, "linewidth": 1.3, "linestyle": dash}
        place = Rectangle((column - 0.25, line + 0.1), width + 0.5, 0.8, zorder=2 if kind in _MARKS else 1, **look)
        page.add_patch(place)

    def write_at(line: float, column: float, text: str, **style: Any) -> None:
        style = {"fontsize": 10, "family": "monospace", "va": "center", "color": "#111111"} | style
        page.text(column, line + 0.52, text, parse_math=False, zorder=3, **style)

    sans = {"family": "sans-serif", "color": "#444444", "fontsize": 9}
    write_at(-2.6, 0, title(row), **sans | {"fontsize": 12, "color": "#111111"})
    write_at(-1.5, 0, setting(row), **sans)
    for (line, column, shown, width), (_, value, kind) in zip(places, _tokens(row), strict=True):
        box_at(line, column, width, kind, color(value, ends))
        write_at(line, column, shown, style="italic" if kind == "own" else "normal")
    sentences = figures(row)
    for i, sentence in enumerate(sentences):
        write_at(lines + 0.4 + i, 0, sentence, **sans)
    below = lines + 0.6 + len(sentences)
    for i in range(40):
        value = ends[0] + (ends[1] - ends[0]) * i / 39
        page.add_patch(Rectangle((7 + i / 2, below + 0.15), 0.55, 0.7, facecolor=color(value, ends), linewidth=0))
    write_at(below, 0, f"{ends[0]:.3f}", **sans)
    write_at(below, 28, f"{ends[1]:.3f}  relevance (italic: the target's own token; grey: not measured)", **sans)
    for i, kind in enumerate(_MARKS, 1):
        box_at(below + 1.1 * i, 1, 5, kind, "#ffffff")
        write_at(below + 1.1 * i, 1, "token")
        write_at(below + 1.1 * i, 8, _LEGEND[kind], **sans)
    figure.savefig(path)


def table(row: dict[str, Any]) -> Table:
    """Return how many tokens there are of each kind, and their mean relevance."""
    shown = Table(title=title(row), caption=f"{setting(row)}. {' '.join(figures(row))}", box=box.SIMPLE_HEAD)
    for name in ("token", "number", "mean relevance", "for example"):
        shown.add_column(name, justify="right" if name in ("number", "mean relevance") else "left")
    for kind in KINDS:
        ours = [(word, value) for word, value, of in _tokens(row) if of == kind]
        values = [value for _, value in ours if value is not None]
        words = list(dict.fromkeys(word.strip() for word, _ in ours))[:6]
        mean = sum(values) / len(values) if values else None
        # Brackets of a caption are text, not markup.
        shown.add_row(kind, str(len(ours)), number(mean, 3), " ".join(words).replace("[", "\\["))
    return shown
