"""How `vidspec bench quality` shows itself: tables, CSV, the figure drawn from it; no engine.

python -m vllm_vidspec.tools.quality_views F.csv F.png
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.shapeworld.captions import ATTRIBUTES, GROUPS
from vllm_vidspec.tools import plots
from vllm_vidspec.tools.bench.quality import DEFAULTS, DRAFT, LOSSY, STRICT, TARGET, setting_name, ways
from vllm_vidspec.tools.tables import number
from vllm_vidspec.tools.user_files import check_output

FLOOR = 0.98  # of the target's accuracy: what counts as kept
COLUMNS = (
    *("family", "temperature", "draft_noise", "method", *DEFAULTS),
    *("num_speculative_tokens", "prune_ratio", "requests", "batch_size", "max_tokens", "seed", "knobs"),
    *("retention", "accuracy", *(f"group_{name}" for name in GROUPS), *(f"attribute_{name}" for name in ATTRIBUTES)),
    *("acceptance_length", "ratio_to_strict", "delivered_length", "num_drafts"),
    *("exact_frac", "loosened_frac", "shifted_frac"),
    *("identical_frac", "tokens_per_caption", "relevance_auc", "decode_s"),
)
_TEXTS = frozenset({"family", "draft_noise", "method", "relevance_rows", "knobs"})
_PANEL = ("family", "temperature", "draft_noise")

# Paul Tol's "muted" palette; by what a line is called.
_STYLES = {
    "loose": ("#882255", "o"),
    "loose shift": ("#CC6677", "s"),
    "loose pred": ("#332288", "D"),
    "loose shift pred": ("#88CCEE", "v"),
    "fly": ("#117733", "X"),
    "fly-entropy": ("#44AA99", "P"),
    "random": ("#777777", "^"),
    "oracle": ("#DDCC77", "*"),
}

Panel = tuple[str, float, str]
Row = dict[str, Any]


def panels(rows: Sequence[Row]) -> dict[Panel, list[Row]]:
    """Return the rows of each family, temperature and noise; in front the target's and the draft's, which have none."""
    keys = dict.fromkeys((row["family"], row["temperature"], row["draft_noise"]) for row in rows)
    return {
        (family, temperature, noise): [
            row
            for row in rows
            if (row["family"], row["temperature"]) == (family, temperature) and row["draft_noise"] in (None, noise)
        ]
        for family, temperature, noise in keys
        if noise is not None
    }


def setting_key(row: Row) -> tuple[Any, ...]:
    """Return a dictionary's key that is equal for rows which measure the same."""
    return (*(row[name] for name in _PANEL), setting_name(row))


def panel_name(panel: Panel, family: bool = True) -> str:
    """Return a panel in words; at temperature 0 the noise makes no difference."""
    name, temperature, noise = panel
    words = f"temperature {temperature:g}" + (f", {noise} noise" if temperature else "")
    return f"{name}, {words}" if family else words


def longest_kept(rows: Sequence[Row], floor: float = FLOOR) -> dict[str, Row | None]:
    """Return, for each lossy scorer of a panel, the row of the longest acceptance that keeps enough, or None."""
    found: dict[str, Row | None] = {}
    for scorer in LOSSY:
        ours = [row for row in rows if row["method"] == scorer]
        kept = [row for row in ours if row["retention"] is not None and row["retention"] >= floor]
        if ours:
            found[scorer] = max(kept, key=lambda row: row["acceptance_length"], default=None)
    return found


def longest_words(rows: Sequence[Row], floor: float = FLOOR) -> str:
    """Return what `longest_kept` found as a sentence."""
    parts = [
        f"{scorer} nowhere"
        if row is None
        else f"{setting_name(row)} with {row['acceptance_length']:.2f} tokens per step ({row['ratio_to_strict']:.2f} "
        f"of strict's, {100 * row['retention']:.1f} % kept)"
        for scorer, row in longest_kept(rows, floor).items()
    ]
    return f"At least {100 * floor:g} % kept: {'; '.join(parts) or 'nothing was loosened'}."


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield a table per family, temperature and noise; everything but lengths and ratios in percent."""
    for panel, ours in panels(rows).items():
        caption = f"{ours[0]['requests']} captions, K {ours[0]['num_speculative_tokens']}, in %. {longest_words(ours)}"
        table = Table(title=panel_name(panel), caption=caption, box=box.SIMPLE_HEAD, padding=0)
        table.add_column("", no_wrap=True)
        for name in ("accept\nlength", "of\nstrict", "kept", *GROUPS, "not\nexact", "same", "AUC"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in ours:
            is_kept = row["method"] in LOSSY and row["retention"] is not None and row["retention"] >= FLOOR
            table.add_row(*cells(row), style="green" if is_kept else None)
        yield table


def cells(row: Row) -> list[str]:
    """Return a row of a table: its name, length and ratio, shares in percent without the sign, the AUC."""
    exact = row["exact_frac"]
    shares = (row["retention"], *row["group"].values(), None if exact is None else 1 - exact, row["identical_frac"])
    return [
        setting_name(row),
        *(number(row[name], 2) for name in ("acceptance_length", "ratio_to_strict")),
        *("-" if share is None else f"{100 * share:.1f}".removesuffix(".0") for share in shares),
        number(row["relevance_auc"], 2),
    ]


def check_outputs(*, csv_path: str | None, plot_path: str | None, json_path: str | None) -> None:
    """Refuse, before anything runs, a file that could not be written afterwards; "-" is standard output.

    Raises:
        VidSpecError: One line naming what is wrong.
    """
    for path in (csv_path, plot_path, None if json_path == "-" else json_path):
        if path is not None:
            check_output(path)
    if plot_path is not None:
        plots.check_figure(plot_path)


def write_csv(path: str, result: dict[str, Any]) -> None:
    """Write the rows of `quality.run` under COLUMNS; the first line is a comment with the provenance as JSON.

    Raises:
        VidSpecError: The file cannot be written.
    """
    plots.write_rows(path, COLUMNS, map(plots.flatten, result["rows"]), result["provenance"])


def read_csv(path: str) -> list[Row]:
    """Return the flat rows that `write_csv` wrote; numbers are floats, an empty cell is None.

    Raises:
        VidSpecError: The file cannot be read or is something else.
    """
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError
            return [{name: _value(name, row[name]) for name in COLUMNS} for row in reader]
    except OSError as error:
        raise VidSpecError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, csv.Error):
        raise VidSpecError(f"{path} is not a file of `vidspec bench quality --csv`") from None


def _value(name: str, text: str) -> str | float | bool | None:
    if name == "knobs":
        return text
    if not text:
        return None
    if name == "position_shift":
        return {"True": True, "False": False}[text]
    return text if name in _TEXTS else float(text)


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw retention over acceptance length: a panel per family (down), temperature and noise (across).

    A line joins what a scorer gives over its lambda or threshold. Loose points with another N than the line's stand
    alone, hollow, with their N beside them. The same rows give the same file.

    Args:
        rows: As `run` or `read_csv` returns them.
        path: A .png or .svg file.

    Raises:
        VidSpecError: There is nothing to draw, no matplotlib, or the file cannot be written.
    """
    found = panels(rows)
    if not found:
        raise VidSpecError(f"cannot draw {path}: no row has drafts")
    plots.check_figure(path)

    import matplotlib
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(family for family, _, _ in found))
    across = list(dict.fromkeys(panel[1:] for panel in found))
    size = (1.8 + 3.4 * len(across), 0.6 + 3.1 * len(families))
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "vidspec"}):
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        grid = figure.subplots(len(families), len(across), sharey="row", squeeze=False)
        lines: dict[str, Any] = {}
        for places, family in zip(grid, families, strict=True):
            for place, condition in zip(places, across, strict=True):
                panel = (family, *condition)
                if panel not in found:
                    place.set_axis_off()
                    continue
                lines |= draw_panel(place, found[panel])
                place.set_title(panel_name(panel), fontsize=9)
            places[0].set_ylabel("attributes right (% of the target's)")
        for place in grid[-1]:
            place.set_xlabel("acceptance length (tokens per verify step)")
        figure.legend(list(lines.values()), list(lines), loc="outside right center", frameon=False)
        try:
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
        except OSError as error:
            raise VidSpecError(f"cannot write {path}: {error.strerror}") from None


def draw_panel(place: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Draw one panel; return what its legend names."""
    lines: dict[str, Any] = {}
    rows = [row for row in rows if row["retention"] is not None]
    for level, words, style in ((1.0, "the target", "-"), (FLOOR, f"{100 * FLOOR:g} %", (0, (5, 3)))):
        line = place.axhline(100 * level, color="#444444", linestyle=style, linewidth=1, zorder=1)
        lines["the target alone" if level == 1 else f"{words} of it"] = line
    for row in rows:
        if row["method"] == DRAFT:
            line = place.axhline(100 * row["retention"], color="#999933", linestyle=":", linewidth=1.2, zorder=1)
            lines["the draft alone"] = line
        elif row["method"] == STRICT:
            star = {"marker": "*", "markersize": 13, "color": "#000000", "linestyle": "none", "zorder": 5}
            (lines[STRICT],) = place.plot([row["acceptance_length"]], [100 * row["retention"]], **star)
    ours = [row for row in rows if row["method"] not in (TARGET, DRAFT, STRICT)]
    for name in dict.fromkeys(" ".join([row["method"], *ways(row)]) for row in ours):
        lines[name] = _draw_line(place, name, [row for row in ours if " ".join([row["method"], *ways(row)]) == name])
    place.grid(color="#DDDDDD", linewidth=0.6)
    place.set_axisbelow(True)
    place.spines[["top", "right"]].set_visible(False)
    return lines


def _draw_line(place: Any, name: str, rows: Sequence[Row]) -> Any:
    """Draw the line of one way to loosen over lambda or the threshold, and hollow points beside it; return the line."""
    color, marker = _STYLES.get(name, ("#555555", "."))
    # The line's N is the one with the most points; of equals the first.
    counts = [row["top_n"] for row in rows]
    usual = max(dict.fromkeys(counts), key=counts.count)
    shared = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.4}
    points = sorted(
        (row["fly_entropy"] if row["lambda_loose"] is None else row["lambda_loose"], _point(row))
        for row in rows
        if row["top_n"] == usual
    )
    (line,) = place.plot([point[0] for _, point in points], [point[1] for _, point in points], **shared)
    for row in rows:
        if row["top_n"] != usual:
            hollow = {"linestyle": "none", "markerfacecolor": "white"}
            place.plot(*([value] for value in _point(row)), **shared | hollow)
            beside = {"textcoords": "offset points", "xytext": (5, 3), "fontsize": 7, "color": color}
            place.annotate(f"N {row['top_n']:g}", _point(row), **beside)
    return line


def _point(row: Row) -> tuple[float, float]:
    return row["acceptance_length"], 100 * row["retention"]


def main() -> int:
    """Redraw a figure from its CSV file; see `redraw`."""
    return plots.redraw("quality_views", read_csv, draw)


if __name__ == "__main__":
    sys.exit(main())
