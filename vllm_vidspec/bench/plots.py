"""Rows of `vidspec bench acceptance` as CSV, and the figure drawn from them; matplotlib is imported to draw only.

python -m vllm_vidspec.bench.plots F.csv F.png
"""

import csv
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec.bench.acceptance import AXES, TEXT_ONLY, UNPRUNED, canonical
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GUIDANCE_FALLBACKS, SKIP_REASONS

COLUMNS = (
    *AXES,
    *(f"measured_as_{name}" for name in UNPRUNED),
    *("requests", "max_tokens", "batch_size", "seed", "jobs"),
    *("acceptance_length", "acceptance_rate", "num_drafts", "draft_kv_bytes", "full_draft_kv_bytes"),
    *("identical_frac", "output_tokens", "text_tokens", "visual_tokens_full", "visual_tokens_kept"),
    *("draft_kv_bytes_per_token", "draft_load_bytes"),
    *(f"skipped_{reason}" for reason in SKIP_REASONS),
    *(f"unguided_{reason}" for reason in GUIDANCE_FALLBACKS),
    *("decode_s", "vanilla_decode_s"),
)
_TEXTS = ("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions", "measured_as_pruner")
# What the figure shows; every other axis must have one value.
_DRAWN = ("family", "pruner", "prune_ratio")

SUFFIXES = (".png", ".svg")
# Paul Tol's "muted" palette, safe for the colour-blind, with grey and black: warm colours for what follows the target.
_STYLES = {
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
_OTHER_STYLE = ("#555555", ".")


def check_outputs(
    axes: Mapping[str, Sequence[Any]], *, csv_path: str | None, plot_path: str | None, json_path: str | None
) -> None:
    """Refuse, before anything runs, a file that could not be written afterwards.

    Args:
        axes: Of the sweep; a figure has no room for other axes than family, pruner and ratio.
        csv_path: Where the rows go as CSV.
        plot_path: Where the figure goes.
        json_path: Where the result goes; "-" is standard output.

    Raises:
        VidSpecError: One line naming what is wrong.
    """
    for path in (csv_path, plot_path, None if json_path == "-" else json_path):
        if path is not None:
            _check_writable(Path(path))
    if plot_path is not None:
        _check_plot(plot_path, axes)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise VidSpecError(f"cannot write {path}: Is a directory")
    if not path.parent.is_dir():
        raise VidSpecError(f"cannot write {path}: No such directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise VidSpecError(f"cannot write {path}: Permission denied")


def _check_plot(path: str, axes: Mapping[str, Sequence[Any]]) -> None:
    if Path(path).suffix not in SUFFIXES:
        raise VidSpecError(f"cannot draw {path}: its name must end in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise VidSpecError("drawing needs matplotlib: pip install matplotlib")
    several = [name for name in AXES if name not in _DRAWN and len(set(axes[name])) > 1]
    if several:
        raise VidSpecError(
            f"cannot draw {path}: a figure shows one {several[0]}, there are {len(set(axes[several[0]]))}"
        )


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `acceptance.run` with one value per column: `skipped_pool_full` for `skipped["pool_full"]`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def write_csv(path: str, result: dict[str, Any]) -> None:
    """Write the rows of `acceptance.run` under COLUMNS; the first line is a comment with the provenance as JSON.

    Raises:
        VidSpecError: The file cannot be written.
    """
    try:
        with open(path, "w", newline="") as file:
            file.write(f"# {json.dumps(result['provenance'])}\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(flatten, result["rows"]))
    except OSError as error:
        raise VidSpecError(f"cannot write {path}: {error.strerror}") from None


def read_csv(path: str) -> list[dict[str, Any]]:
    """Return the flat rows that `write_csv` wrote; numbers are floats, an empty cell is None.

    Raises:
        VidSpecError: The file cannot be read or is something else.
    """
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError
            return [
                {name: value if name in _TEXTS else _number(value) for name, value in row.items()} for row in reader
            ]
    except OSError as error:
        raise VidSpecError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, csv.Error):
        raise VidSpecError(f"{path} is not a file of `vidspec bench acceptance --csv`") from None


def _number(text: str) -> float | None:
    return float(text) if text else None


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw acceptance length over prune ratio: one panel per family, one line per pruner.

    Ratios stand at equal distances, because what happens between 0.9 and 1 is the point. The same rows give the same
    file.

    Args:
        rows: Flat, as `flatten` or `read_csv` returns them.
        path: A .png or .svg file.

    Raises:
        VidSpecError: There is nothing to draw, no room for it, no matplotlib, or the file cannot be written.
    """
    rows = [row for row in rows if row["acceptance_length"] is not None]
    if not rows:
        raise VidSpecError(f"cannot draw {path}: no row has an acceptance length")
    _check_plot(path, {name: [row[name] for row in rows] for name in AXES})

    import matplotlib
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(row["family"] for row in rows))
    ratios = sorted({row["prune_ratio"] for row in rows})
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "vidspec"}):
        figure = Figure(figsize=(1.6 + 4.2 * len(families), 4.0), dpi=160, layout="constrained")
        panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        for panel, family in zip(panels, families, strict=True):
            lines |= _draw_panel(panel, [row for row in rows if row["family"] == family], ratios)
            panel.set_title(family, fontsize=10)
        panels[0].set_ylabel("acceptance length (tokens per verify step)")
        figure.supxlabel("prune ratio (share of the video's tokens that the draft does not see)", fontsize=9)
        if lines:
            figure.legend(list(lines.values()), list(lines), loc="outside right center", frameon=False)
        try:
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
        except OSError as error:
            raise VidSpecError(f"cannot write {path}: {error.strerror}") from None


def _draw_panel(panel: Any, rows: Sequence[dict[str, Any]], ratios: Sequence[float]) -> dict[str, Any]:
    """Draw one family; return the line of each pruner."""
    for seen, words, (x, align) in (
        (UNPRUNED, "draft sees the whole video", (0.99, "right")),
        (TEXT_ONLY, "draft sees no video", (0.01, "left")),
    ):
        lengths = [r["acceptance_length"] for r in rows if canonical(r["pruner"], r["prune_ratio"]) == seen]
        if lengths:
            panel.axhline(lengths[0], color="#444444", linestyle=(0, (5, 3)), linewidth=1, zorder=1)
            place = {"xy": (x, lengths[0]), "xycoords": panel.get_yaxis_transform(), "textcoords": "offset points"}
            panel.annotate(f"{words}: {lengths[0]:.2f}", xytext=(0, 3), ha=align, color="#444444", fontsize=8, **place)
    lines = {}
    for pruner in dict.fromkeys(row["pruner"] for row in rows if row["pruner"] != UNPRUNED["pruner"]):
        lengths_at = {row["prune_ratio"]: row["acceptance_length"] for row in rows if row["pruner"] == pruner}
        color, marker = _STYLES.get(pruner, _OTHER_STYLE)
        places = [index for index, ratio in enumerate(ratios) if ratio in lengths_at]
        (lines[pruner],) = panel.plot(
            places, [lengths_at[ratios[i]] for i in places], color=color, marker=marker, linewidth=1.4, markersize=5
        )
    panel.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    return lines


def main() -> int:
    """Redraw a figure from its CSV file; an error is one line and exit status 2."""
    if len(sys.argv) != 3 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m vllm_vidspec.bench.plots ROWS.csv FIGURE.png", file=sys.stderr)
        return 2
    try:
        draw(read_csv(sys.argv[1]), sys.argv[2])
    except VidSpecError as error:
        print(f"vidspec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
