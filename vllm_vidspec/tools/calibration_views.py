"""How `vidspec calibrate` shows itself: the table and the plot; no engine."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_vidspec.config import NONE
from vllm_vidspec.tools import costs
from vllm_vidspec.tools.costs import CHAIN, TREES, VANILLA
from vllm_vidspec.tools.tables import by_columns, number, percent

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#bcbd22", "#000000")
_MARKERS = "osD^vphP<>"


def layers_name(layers: str | Sequence[int] | None) -> str:
    """Return a layer set in a few characters: "all", "2", "0-3", "0, 2"."""
    if layers is None or isinstance(layers, str):
        return layers or "-"
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def table(result: dict[str, Any]) -> Table:
    """Return the measurements, the chosen one marked."""
    settings: dict[str, Callable[[Any], str]] = {
        "layers": lambda row: layers_name(row["guidance_layers"]),
        "lambda": lambda row: number(row["lambda_r"], 1),
    }
    if result["pruner"] == "uv":
        settings = {"uv layer": lambda row: str(row["uv_layer"])}
    figures = {
        "accept\nlength": lambda row: number(row["acceptance_length"], 3),
        "accept\nrate": lambda row: percent(row["acceptance_rate"]),
        "verify\nsteps": lambda row: str(row["num_drafts"]),
        "s": lambda row: number(row["seconds"], 1),
        "": lambda row: "*" if row["chosen"] else "",
    }
    on = f"prune {result['prune_ratio']:g}, K {result['num_speculative_tokens']}, {result['prompts']} videos"
    return by_columns(
        settings | figures,
        result["measurements"],
        num_words=0,
        style=lambda row: "bold green" if row["chosen"] else None,
        title=f"Calibration of {result['pruner']}",
        caption=f"{on}; * is chosen",
        padding=(0, 1),
    )


def summary(result: dict[str, Any]) -> str:
    """Return the choice in one or two sentences."""
    knobs = ", ".join(
        f"{name} {layers_name(value) if name == 'guidance_layers' else format(value, 'g')}"
        for name, value in result["config"].items()
    )
    text = f"{knobs}: {result['acceptance_length']:.3f} tokens per verify step."
    uniform = [row["acceptance_length"] for row in result["measurements"] if row["lambda_r"] == 0.0]
    if result["config"].get("lambda_r") == 0.0:
        return text + " At lambda_r 0 the tokens are chosen evenly: on these videos guidance gains nothing."
    return text + (f" Without guidance (lambda_r 0): {uniform[0]:.3f}." if uniform else "")


def costs_table(result: dict[str, Any]) -> Table:
    """Return tokens per second by batch size and draft, and what makes them; what `draft_table` says is marked.

    Of the chains that follow from others those are shown that it names.
    """
    rows = {(row["shape"], row["num_speculative_tokens"], row["batch_size"]): row for row in result["costs"]}
    table = [(last, VANILLA if shape == NONE else shape, k) for _, last, shape, k in result["config"]["draft_table"]]

    def cell(shape: str, k: int, size: int) -> str:
        row, chosen = rows[shape, k, size], next(draft for last, *draft in table if size <= last)
        steps = f"[dim]{row['acceptance_length']:.2f} in\n{row['step_ms']:.1f} ms[/dim]"
        marks = "*" * (chosen == [shape, k]) + "~" * (row["num_steps"] == 0)
        return f"{row['tokens_per_s']:.0f}{marks}\n{steps}"

    shown = sorted({(shape, k) for (shape, k, _), row in rows.items() if row["num_steps"]} | {row[1:] for row in table})
    shown.sort(key=lambda draft: [VANILLA, CHAIN, *TREES].index(draft[0]))
    return by_columns(
        {"batch": str} | {costs.label(*draft): functools.partial(cell, *draft) for draft in shown},
        dict.fromkeys(size for _, _, size in rows),
        num_words=0,
        title="Tokens per second, and tokens per verify step in its time",
        caption=f"{result['rounds']} rounds, {result['provenance']['device']}; * is in draft_table, ~ follows from "
        "other chains",
    )


def costs_summary(result: dict[str, Any]) -> str:
    """Return the table of drafts in words."""
    parts = [
        f"{first} to {last} requests: " + ("no drafts" if shape == NONE else f"{shape} ({num_tokens} tokens per step)")
        for first, last, shape, num_tokens in result["config"]["draft_table"]
    ]
    return ", ".join(parts) + "."


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Draw acceptance length over `lambda_r`, a line for each layer set (or over `uv_layer`); mark the choice.

    A set of which only the ends are known is a dashed line. Needs matplotlib; the path's suffix names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = result["measurements"]
    is_uv = result["pruner"] == "uv"
    x_name = "uv_layer" if is_uv else "lambda_r"
    for index, (label, points) in enumerate(_lines(rows, x_name).items()):
        look: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)], "label": label}
        if is_uv or len(points) > 2:
            look |= {"marker": "o", "markersize": 4, "linewidth": 1.8}
        else:  # lines often meet: shapes of different sizes stay visible on top of each other
            look |= {"marker": _MARKERS[index % len(_MARKERS)], "markersize": 5 + index, "markerfacecolor": "none"}
            look |= {"linewidth": 1.0, "linestyle": (0, (4, 3)), "alpha": 0.7}
        axes.plot(*zip(*sorted(points), strict=True), **look)
    chosen = next(row for row in rows if row["chosen"])
    star = {"marker": "*", "markersize": 16, "markerfacecolor": "none", "markeredgecolor": "black"}
    axes.plot([chosen[x_name]], [chosen["acceptance_length"]], linestyle="none", label="chosen", zorder=5, **star)
    axes.set_xlabel("target layer read (uv_layer)" if is_uv else "lambda_r (0: evenly spaced; 1: highest scores)")
    axes.set_ylabel("acceptance length (tokens per verify step)")
    on = f"{result['prune_ratio']:g} of the video tokens pruned, {result['prompts']} videos"
    axes.set_title(f"{result['pruner']}, {on}", fontsize=11)
    if is_uv:
        axes.set_xticks(sorted({row["uv_layer"] for row in rows}))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    legend = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False, "fontsize": 8}
    axes.legend(title=None if is_uv else "layers", **legend)
    figure.savefig(path, dpi=150)


def _lines(rows: list[dict[str, Any]], x_name: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line; the one measurement at `lambda_r` 0 belongs to all of them."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = "uv" if x_name == "uv_layer" else layers_name(row["guidance_layers"])
        lines.setdefault(name, []).append((row[x_name], row["acceptance_length"]))
    shared = [(row["lambda_r"], row["acceptance_length"]) for row in rows if row["lambda_r"] == 0.0]
    return {name: sorted({*points, *shared}) for name, points in lines.items()}
