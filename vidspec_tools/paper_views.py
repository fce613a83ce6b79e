"""How `vidspec bench paper` shows itself: its table, CSV, and the figure drawn from it; no engine.

python -m vidspec_tools.paper_views F.csv F.png
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vidspec_tools import csv_files, figures, race_views
from vidspec_tools.bench import published
from vidspec_tools.bench.race_rows import SPREAD
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent, times

COLUMNS = (
    *(name for name in race_views.COLUMNS if not name.startswith("published")),
    *("draft", *published.COLUMNS),
)
_OURS, _PUBLISHED = "#332288", "#CC6677"
# What is drawn: the words below a panel, ours and what is published.
_DRAWN = {
    "tokens per verify step": ("acceptance_length", "published_acceptance_length"),
    "decode speed, of vanilla's": ("speedup", "published_speedup"),
}

write_csv = functools.partial(csv_files.write_rows, columns=COLUMNS)
read_csv = functools.partial(csv_files.read_rows, columns=COLUMNS, command="bench paper")

# The columns of a table, in the terminal and on the page.
TABLE: Columns = {
    "method": lambda row: row["method"],
    "K": lambda row: number(row["num_speculative_tokens"], 0),
    "accept\nlength": lambda row: number(row["acceptance_length"], 2),
    "forwards": lambda row: number(row["forwards"], 1),
    "tokens\nper s": lambda row: number(row["tokens_per_s"], 1),
    "speedup": lambda row: times(row["speedup"]),
    "p20 - p80": lambda row: (
        "-" if row["speedup"] is None else " - ".join(f"{row[f'speedup_{p}']:.2f}" for p in SPREAD)
    ),
    "same\noutput": lambda row: percent(row["identical_frac"]),
    "published\nlength": lambda row: number(row["published_acceptance_length"], 2),
    "published\nspeedup": lambda row: times(row["published_speedup"]),
}


def shown_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table for each family and ratio."""
    return [
        by_columns(TABLE, group, title=f"{group[0]['family']}: one request at a time", caption=caption(group[0]))
        for group in race_views.groups(rows).values()
    ]


def caption(row: Mapping[str, Any]) -> str:
    """Return how many requests a table is of, and on which pair."""
    words = [f"{row['rounds']:.0f} rounds of {row['requests']:.0f} requests", row["label"] or "the pair as it is"]
    return "; ".join([*words, "published on VideoDetailCaption, lengths with the target's own token"])


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draw acceptance lengths and speedups as bars, a row of panels a family and ratio, what is published beside.

    Raises:
        VidSpecError: Nothing to draw, or the file cannot be written.
    """
    rows = race_views.beside_vanilla(rows)
    found = race_views.groups(rows)
    height = 0.8 + sum(0.5 + 0.3 * len(group) for group in found.values())
    with figures.panels(path, (9.0, height), len(found), len(_DRAWN)) as (_, grid, legend):
        for panels, ((family, _ratio), group) in zip(grid, found.items(), strict=True):
            for panel, (words, names) in zip(panels, _DRAWN.items(), strict=True):
                legend |= _draw_bars(panel, group, *names)
                panel.set_xlabel(words)
            panels[0].set_title("; ".join(filter(None, (family, group[0]["label"]))), loc="left", fontsize=9)


def _draw_bars(panel: Any, rows: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> dict[str, Any]:
    """Draw one figure of each method; return the bars and the marks of what is published."""
    places = range(len(rows))
    spread = None
    if f"{ours}_p20" in rows[0]:
        found = [[(row[at] or 0.0) for at in (ours, f"{ours}_p20", f"{ours}_p80")] for row in rows]
        spread = [[middle - low for middle, low, _ in found], [high - middle for middle, _, high in found]]
    lengths = [row[ours] or 0.0 for row in rows]
    style = {"xerr": spread, "error_kw": {"elinewidth": 0.8, "ecolor": "#444444"}}
    drawn = {"measured, bundled pair": panel.barh(places, lengths, 0.7, color=_OURS, **style)}
    known = [(row[theirs], place) for place, row in zip(places, rows, strict=True) if row[theirs] is not None]
    if known:
        xs, ys = zip(*known, strict=True)
        drawn["published, the paper's pair"] = panel.scatter(xs, ys, color=_PUBLISHED, marker="D", s=22, zorder=3)
    panel.axvline(1.0, color="#777777", linewidth=0.8, linestyle="--")
    panel.set_yticks(places, [row["method"] for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)  # the first above
    panel.tick_params(axis="y", length=0)
    figures.tidy(panel, "x")
    return drawn


if __name__ == "__main__":
    sys.exit(csv_files.redraw("paper_views", read_csv, draw))
