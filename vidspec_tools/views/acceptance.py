"""How `vidspec bench acceptance` shows itself: its table and its figure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vidspec_tools.bench.acceptance import AXES, TEXT_ONLY, UNPRUNED, canonical, measured_itself
from vidspec_tools.views import figures
from vidspec_tools.views.csv_file import flatten
from vllm_vidspec.errors import VidSpecError
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
# What the figure shows, by pruner or by shape; every other axis must have one value.
_DRAWN = ("family", "pruner", "prune_ratio")
_DRAWN_BY_SHAPE = ("family", "drafting", "prune_ratio", "temperature")

# Paul Tol's "muted" palette, safe for the colour-blind, with grey and black: warm colours for what follows the target.
Style = tuple[str, str]  # colour and marker
_STYLES: dict[str, Style] = {
    "specvlm": ("#882255", "o"),
    "attention": ("#CC6677", "s"),
    "uv": ("#AA4499", "^"),
    "uniform": ("#332288", "D"),
    "random": ("#88CCEE", "v"),
    "window:front": ("#999933", "<"),
    "window:middle": ("#777777", "P"),
    "window:end": ("#000000", ">"),
    "frame": ("#117733", "X"),
    "fastvid": ("#44AA99", "*"),
    "dycoke": ("#DDCC77", "h"),
}


def check_room(path: str, axes: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a figure of more than it has room for: family and ratio, and pruners or shapes."""
    drawn = _DRAWN_BY_SHAPE if len(set(axes["drafting"])) > 1 else _DRAWN
    several = [name for name in AXES if name not in drawn and len(set(axes[name])) > 1]
    if drawn is _DRAWN_BY_SHAPE and all(len(set(axes[name])) > 1 for name in ("prune_ratio", "temperature")):
        several.append("temperature")  # one of the two is the x axis
    if several:
        raise VidSpecError(
            f"cannot draw {path}: a figure shows one {several[0]}, there are {len(set(axes[several[0]]))}"
        )


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return the table of `vidspec bench acceptance`: columns for what changes, one caption for what does not.

    Times are shown where one engine ran at a time. A length with a star comes from another row's engine. Of trees the
    table has the length that their depth allows, their nodes and the draft's forwards, per verify step.
    """
    varying = [name for name in AXES if len({str(row[name]) for row in rows}) > 1]
    fixed = [f"{_SHORT.get(name, name)} {_cell(rows[0][name])}" for name in _SHOWN_ALONE if name not in varying]
    timed = rows[0]["jobs"] == 1
    if not timed:
        fixed.append(f"no times: {rows[0]['jobs']} engines ran at once")
    shows_trees = any(row["drafting"] != "chain" for row in rows)
    if shows_trees:
        fixed.append(f"{rows[0]['scheduling']} scheduling")
    if knobs := rows[0]["knobs"]:
        fixed.append(", ".join(f"{name} {json.dumps(value)}" for name, value in knobs.items()))
    if not all(map(measured_itself, rows)):
        fixed.append("* not run itself, see measured_as")
    columns: Columns = {
        **{_SHORT.get(n, n.replace("_", " ")): lambda row, name=n: _cell(row[name]) for n in varying},  # type: ignore[misc]
        "accept\nlength": lambda row: number(row["acceptance_length"], 2) + "*" * (not measured_itself(row)),
        **(_TREE_FIGURES if shows_trees else _CHAIN_FIGURES),
        "same\noutput": lambda row: percent(row["identical_frac"]),
        "draft KV\nof full": _kv_share,
        **(_TIMES if timed else {}),
    }
    title = f"Acceptance on {rows[0]['requests']} held-out videos"
    return [by_columns(columns, rows, len(varying), title=title, caption=", ".join(fixed))]


def _kv_share(row: dict[str, Any]) -> str:
    return percent(row["draft_kv_bytes"] / row["full_draft_kv_bytes"] if row["full_draft_kv_bytes"] else None)


def _cell(value: Any) -> str:
    """Return a value of an axis; of a path its last part."""
    return Path(value).name if isinstance(value, str) else f"{value:g}"


def shape_of(row: dict[str, Any]) -> str:
    """Return what a row's drafts are called: the shape, and the knobs that are not the defaults."""
    knobs = json.loads(flatten(row)["knobs"] or "{}")
    return ", ".join([row["drafting"], *(f"{name} {json.dumps(value)}" for name, value in knobs.items())])


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw acceptance length, one panel per family: over prune ratio by pruner, or by shape where there are several.

    Shapes are lines over several prune ratios, otherwise bars, at each temperature. Ratios are evenly spaced,
    because what happens between 0.9 and 1 is the point. The same rows give the same file.
    """
    rows = [flatten(row) for row in rows if row["acceptance_length"] is not None]
    if not rows:
        raise VidSpecError(f"cannot draw {path}: no row has an acceptance length")
    rows = [row | {"drafting": shape_of(row)} for row in rows]
    axes = {name: [row[name] for row in rows] for name in AXES}
    if len({(row["drafting"], row["num_speculative_tokens"]) for row in rows}) == len(set(axes["drafting"])):
        axes["num_speculative_tokens"] = []  # each shape has its own
    check_room(path, axes)

    families = list(dict.fromkeys(row["family"] for row in rows))
    ratios = sorted({row["prune_ratio"] for row in rows})
    shapes = dict(zip(dict.fromkeys(row["drafting"] for row in rows), _STYLES.values(), strict=False))
    size = (1.6 + 4.2 * len(families), 4.0)
    with figures.panels(path, size, 1, len(families)) as (figure, (panels,), legend):
        for panel, family in zip(panels, families, strict=True):
            ours = [row for row in rows if row["family"] == family]
            if len(shapes) > 1 and len(ratios) == 1:
                legend |= _draw_bars(panel, ours, shapes)
            elif len(shapes) > 1:
                legend |= _draw_lines(panel, ours, "drafting", shapes, ratios)
            else:
                _draw_levels(panel, ours)
                chosen = [row for row in ours if row["pruner"] != UNPRUNED["pruner"]]
                legend |= _draw_lines(panel, chosen, "pruner", _STYLES, ratios)
            panel.set_title(family, fontsize=10)
        panels[0].set_ylabel("acceptance length (tokens per verify step)")
        if len(shapes) == 1 or len(ratios) > 1:
            figure.supxlabel("prune ratio (share of the video's tokens that the draft does not see)", fontsize=9)


def _draw_levels(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw dashed lines at the lengths with the whole video and without any."""
    for seen, words, (x, align) in (
        (UNPRUNED, "draft sees the whole video", (0.99, "right")),
        (TEXT_ONLY, "draft sees no video", (0.01, "left")),
    ):
        lengths = [r["acceptance_length"] for r in rows if canonical(r["pruner"], r["prune_ratio"]) == seen]
        if lengths:
            panel.axhline(lengths[0], color="#444444", linestyle=(0, (5, 3)), linewidth=1, zorder=1)
            place = {"xy": (x, lengths[0]), "xycoords": panel.get_yaxis_transform(), "textcoords": "offset points"}
            panel.annotate(f"{words}: {lengths[0]:.2f}", xytext=(0, 3), ha=align, color="#444444", fontsize=8, **place)


def _draw_lines(
    panel: Any, rows: Sequence[dict[str, Any]], axis: str, styles: Mapping[str, Style], ratios: Sequence[float]
) -> dict[str, Any]:
    """Draw a line over prune ratio for each value of an axis; return them."""
    series: dict[str, tuple[Style, dict[float, float]]] = {}
    for row in rows:
        style = styles.get(row[axis], figures.OTHER_STYLE)
        series.setdefault(row[axis], (style, {}))[1][row["prune_ratio"]] = row["acceptance_length"]
    return figures.lines(panel, ratios, series)


def _draw_bars(panel: Any, rows: Sequence[dict[str, Any]], shapes: Mapping[str, Style]) -> dict[str, Any]:
    """Draw a bar for each shape at each temperature; return them."""
    series: dict[str, tuple[str, dict[Any, tuple[float, float, float]]]] = {}
    for row in rows:
        length, (color, _) = row["acceptance_length"], shapes[row["drafting"]]
        series.setdefault(row["drafting"], (color, {}))[1][row["temperature"]] = (length, length, length)
    temperatures = sorted({row["temperature"] for row in rows})
    return figures.grouped_bars(panel, {value: f"temperature {value:g}" for value in temperatures}, series)
