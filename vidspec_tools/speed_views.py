"""How `vidspec bench speed` shows itself: its tables, CSV, and the figure drawn from it; no engine.

python -m vidspec_tools.speed_views F.csv F.png
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vidspec_tools import csv_files, figures, race_views
from vidspec_tools.bench.race_rows import SPREAD
from vidspec_tools.bench.speed import PHASES
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent

COLUMNS = (
    *(name for name in race_views.COLUMNS if not name.startswith("published")),
    *("scorer", "inter_token_ms", *(f"inter_token_ms_{p}" for p in SPREAD), "t_step_ms_p99", "request_ms"),
    *(f"{name}_ms" for name in PHASES),
)
# Paul Tol's "muted" palette: the target's phases blue and green, the draft's red and yellow.
_COLORS = dict(zip(PHASES, ("#332288", "#117733", "#DDCC77", "#CC6677", "#88CCEE", "#44AA99", "#DDDDDD"), strict=True))
# The columns of a table, in the terminal and on a page.
TABLE: Columns = {
    "engine": lambda row: row["method"],
    "tokens\nper s": lambda row: number(row["tokens_per_s"], 1),
    "speedup": lambda row: f"{row['speedup']:.2f}x",
    "p20 - p80": lambda row: f"{row['speedup_p20']:.2f} - {row['speedup_p80']:.2f}",
    "TTFT\nms": lambda row: number(1e3 * row["ttft_s"], 1),
    "ms a\ntoken": lambda row: number(row["inter_token_ms"], 2),
    "step\nms": lambda row: number(row["t_step_ms"], 1),
    "step\np99": lambda row: number(row["t_step_ms_p99"], 1),
    "accept\nlength": lambda row: number(row["acceptance_length"], 2),
    "same\noutput": lambda row: percent(row["identical_frac"]),
}
PHASE_TABLE: Columns = {
    "engine": lambda row: row["method"],
    "a request\nms": lambda row: number(row["request_ms"], 1),
    **{
        f"{name.replace('_', ' ')}\nms": lambda row, name=name: number(row[f"{name}_ms"], 1)  # type: ignore[misc]
        for name in PHASES
    },
}

write_csv = functools.partial(csv_files.write_rows, columns=COLUMNS)
read_csv = functools.partial(csv_files.read_rows, columns=COLUMNS, command="bench speed")


def shown_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return two tables for each family and ratio: speeds, and what a request's time is made of."""
    found = []
    for group in race_views.groups(rows).values():
        words = f"{group[0]['rounds']} rounds of {group[0]['requests']} requests"
        words += f"; {group[0]['label'] or 'the pair as it is'}"
        found.append(by_columns(TABLE, group, title=f"{group[0]['family']}: {setting(group)}", caption=words))
        found.append(by_columns(PHASE_TABLE, group, title="what a request's time is made of", caption=note(group)))
    return found


def setting(rows: Sequence[Mapping[str, Any]], axis: str | None = None) -> str:
    """Return what was measured beside vanilla, in a few words, without what an axis varies."""
    row = rows[-1]
    length = "" if axis == "num_speculative_tokens" else f" of {row['num_speculative_tokens']:.0f}"
    ratio = "" if axis == "prune_ratio" else f" {row['prune_ratio']:g}"
    return f"{row['drafting']}{length}, {row['pruner']}{ratio}, {row['scorer']}" + (
        ", drafter in a process of its own" if row["mode"] == "parallel" else ""
    )


def note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a reader of the phases must know."""
    words = "the target's vision is in target prefill, the draft's and pruning in draft prefill, scoring in verify"
    return words + ("; the drafter's phases run beside the others" if rows[-1]["mode"] == "parallel" else "")


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draw what a request's time is made of as stacked bars, a bar for each family and ratio; vanilla's as a line.

    Raises:
        VidSpecError: Nothing to draw, or the file cannot be written.
    """
    found = race_views.groups(rows)
    if not any(row["verify_ms"] is not None for row in rows):
        raise VidSpecError("no row has phases")
    with figures.panels(path, (8.5, 0.9 + 0.7 * len(found)), 1, 1) as (_, grid, legend):
        legend |= _draw_bars(grid[0][0], list(found.values()))
        grid[0][0].set_xlabel("ms a request (mean)")


def _draw_bars(panel: Any, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Draw a bar a group, its phases one after another; return them by name."""
    drawn: dict[str, Any] = {}
    names = []
    for place, group in enumerate(groups):
        vanilla, row = group[0], group[-1]
        left = 0.0
        for name in PHASES:
            value = row[f"{name}_ms"] or 0.0
            drawn[name.replace("_", " ")] = panel.barh(place, value, 0.6, left=left, color=_COLORS[name])
            left += value
        drawn["vanilla's whole request"] = panel.vlines(
            vanilla["request_ms"], place - 0.4, place + 0.4, color="#000000", linestyle="--", linewidth=1
        )
        names.append("\n".join(filter(None, (row["family"], row["label"]))))
    panel.set_yticks(range(len(groups)), names)
    panel.tick_params(axis="y", length=0)
    figures.tidy(panel, "x")
    return drawn


if __name__ == "__main__":
    sys.exit(csv_files.redraw("speed_views", read_csv, draw))
