"""How `vidspec calibrate` shows itself: the table and the plot; no engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_vidspec.tools.tables import Columns, by_columns, number, percent


def layers_name(layers: str | Sequence[int] | None) -> str:
    """Return a layer set in a few characters: "all", "2", "0-3", "0, 2"."""
    if layers is None or isinstance(layers, str):
        return layers or "-"
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def table(result: dict[str, Any]) -> Table:
    """Return the measurements, the chosen one marked."""
    settings: Columns = {
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


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Draw acceptance length over `lambda_r`, a line for each layer set (or over `uv_layer`), by matplotlib; mark the
    choice. Of a set that was not searched only the ends are known.
    """
    from matplotlib.figure import Figure

    rows, is_uv = result["measurements"], result["pruner"] == "uv"
    x_name = "uv_layer" if is_uv else "lambda_r"
    shared = [row for row in rows if row["lambda_r"] == 0.0]  # one measurement, which holds for every set
    lines: dict[str, list[Any]] = {}
    for row in rows:
        lines.setdefault("uv" if is_uv else layers_name(row["guidance_layers"]), list(shared)).append(row)
    axes = Figure(figsize=(7, 4.2), layout="constrained").add_subplot()
    for label, line in lines.items():
        points = sorted({(row[x_name], row["acceptance_length"]) for row in line})
        look, alpha = ("o-", 1.0) if is_uv or len(points) > 2 else ("o--", 0.5)
        axes.plot(*zip(*points, strict=True), look, alpha=alpha, label=label)
    chosen = next(row for row in rows if row["chosen"])
    axes.plot(chosen[x_name], chosen["acceptance_length"], "k*", markersize=16, fillstyle="none", label="chosen")
    axes.set_xlabel("target layer read (uv_layer)" if is_uv else "lambda_r (0: evenly spaced; 1: highest scores)")
    axes.set_ylabel("acceptance length (tokens per verify step)")
    on = f"{result['prune_ratio']:g} of the video tokens pruned, {result['prompts']} videos"
    axes.set_title(f"{result['pruner']}, {on}", fontsize=11)
    axes.legend(title=None if is_uv else "layers", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    axes.figure.savefig(path, dpi=150)
