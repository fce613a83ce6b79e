"""How `vidspec bench acceptance` shows itself: its table and its figure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vidspec_tools.views import figures
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.bench.acceptance import AXES
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent

_SHORT = {"num_speculative_tokens": "K", "temperature": "T", "prune_ratio": "prune"}
_SHOWN_ALONE = ("family", "draft", "pruner", "prune_ratio", "num_speculative_tokens", "temperature")

# Columns of a table of chains alone, and of one with trees.
_CHAIN_FIGURES: Columns = {
    "accept\nrate": lambda row: percent(row["acceptance_rate"]),
    "drafts": lambda row: str(row["num_drafts"]),
}
_TREE_FIGURES: Columns = {
    "at\nmost": lambda row: number(row["max_acceptance_length"], 2),
    "nodes": lambda row: number(row["nodes_per_step"], 1),
    "draft\nruns": lambda row: number(row["draft_forwards_per_step"], 1),
}
_TIMES: Columns = {
    "s": lambda row: number(row["decode_s"], 1),
    "vanilla\ns": lambda row: number(row["vanilla_decode_s"], 1),
}


def check_room(path: str, axes: Mapping[str, Sequence[Any]]) -> tuple[str, str]:
    """Return what a figure's lines and its x axis are, pruners or shapes, prune ratio or temperature; refuse more."""
    several = [name for name in AXES if len(set(axes[name])) > 1]
    lines = "drafting" if "drafting" in several else "pruner"
    over = "temperature" if lines == "drafting" and "prune_ratio" not in several else "prune_ratio"
    if more := [name for name in several if name not in ("family", lines, over)]:
        raise VidSpecError(f"cannot draw {path}: a figure shows one {more[0]}, there are {len(set(axes[more[0]]))}")
    return lines, over


def varying(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the axes of which rows have several values."""
    return [name for name in AXES if len({str(row[name]) for row in rows}) > 1]


def columns(rows: Sequence[dict[str, Any]]) -> Columns:
    """Return the columns of a table of rows: what changes in front, times only where one engine ran at a time.

    Of trees it has the length that their depth allows, their nodes and the draft's forwards, per verify step.
    """
    is_timed = all(row.get("jobs", 1) == 1 for row in rows)
    return {
        **{_SHORT.get(n, n.replace("_", " ")): lambda row, name=n: _cell(row[name]) for n in varying(rows)},  # type: ignore[misc]
        "accept\nlength": lambda row: number(row["acceptance_length"], 2),
        **(_TREE_FIGURES if shows_trees(rows) else _CHAIN_FIGURES),
        "same\noutput": lambda row: percent(row["identical_frac"]),
        "draft KV\nof full": _kv_share,
        **(_TIMES if is_timed else {}),
    }


def shows_trees(rows: Sequence[dict[str, Any]]) -> bool:
    return any(row["drafting"] != "chain" for row in rows)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    several = varying(rows)
    fixed = [f"{_SHORT.get(name, name)} {_cell(rows[0][name])}" for name in _SHOWN_ALONE if name not in several]
    if shows_trees(rows):
        fixed.append(f"{rows[0]['scheduling']} scheduling")
    fixed += [f"{name} {json.dumps(value)}" for name, value in rows[0]["knobs"].items()]
    title = f"Acceptance on {rows[0]['requests']} held-out videos"
    return [by_columns(columns(rows), rows, len(several), title=title, caption=", ".join(fixed))]


def _kv_share(row: dict[str, Any]) -> str:
    return percent(row["draft_kv_bytes"] / row["full_draft_kv_bytes"] if row["full_draft_kv_bytes"] else None)


def _cell(value: Any) -> str:
    """Return a value of an axis; of a path its last part."""
    return Path(value).name if isinstance(value, str) else f"{value:g}"


def shape_of(row: dict[str, Any]) -> str:
    """Return what a row's drafts are called: the shape, and the knobs that are not the defaults."""
    knobs = sorted((row.get("knobs") or {}).items())
    return ", ".join([row["drafting"], *(f"{name} {json.dumps(value)}" for name, value in knobs)])


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw acceptance length, a panel per family, a line per pruner or, where there are several, shape.

    The x axis is the prune ratio, or where shapes have one only the temperature. Its values are evenly spaced, because
    what happens between 0.9 and 1 is the point. The same rows give the same file.
    """
    rows = [row | {"drafting": shape_of(row)} for row in rows if row["acceptance_length"] is not None]
    if not rows:
        raise VidSpecError(f"cannot draw {path}: no row has an acceptance length")
    axes = {name: [row[name] for row in rows] for name in AXES}
    if len({(row["drafting"], row["num_speculative_tokens"]) for row in rows}) == len(set(axes["drafting"])):
        axes["num_speculative_tokens"] = []  # each shape has its own
    axis, over = check_room(path, axes)
    families, values, styles = list(dict.fromkeys(axes["family"])), sorted(set(axes[over])), figures.styles(axes[axis])
    words = {"prune_ratio": "prune ratio (share of the video's tokens that is dropped)"}
    with figures.panels(path, (1.6 + 4.2 * len(families), 4.0), 1, len(families)) as (_, (panels,), legend):
        for panel, family in zip(panels, families, strict=True):
            series: dict[str, tuple[figures.Style, dict[float, float]]] = {}
            for row in rows:
                if row["family"] == family:
                    points = series.setdefault(row[axis], (styles[row[axis]], {}))[1]
                    points[row[over]] = row["acceptance_length"]
            legend |= figures.lines(panel, values, series)
            panel.set_title(family, fontsize=10)
            panel.set_xlabel(words.get(over, over))
        panels[0].set_ylabel("acceptance length (tokens per verify step)")
