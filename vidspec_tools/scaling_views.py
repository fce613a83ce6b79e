"""How `vidspec bench scaling` shows itself: its table, CSV, and the figure drawn from it; no engine.

python -m vidspec_tools.scaling_views F.csv F.png
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vidspec_tools import csv_files, figures, race_views, speed_views
from vidspec_tools.bench.race_rows import SPREAD
from vidspec_tools.bench.scaling import SPREADING
from vllm_vidspec.tools.tables import Columns, by_columns

COLUMNS = (
    *("family", "axis", "value", "method", "mode", "inflate", "label"),
    *("drafting", "pruner", "prune_ratio", "scorer", "num_speculative_tokens", "batch_size", "video_tokens"),
    *(column for name in SPREADING for column in (name, *(f"{name}_{p}" for p in SPREAD))),
    *("acceptance_length", "num_drafts", "visual_tokens_full", "visual_tokens_kept", "requests_skipped"),
    *("identical_frac", "output_tokens", "rounds", "max_tokens", "temperature", "seed", "knobs"),
    *("target_layers", "draft_layers"),
)
_STYLES = (("#332288", "o"), ("#CC6677", "s"), ("#44AA99", "^"))
_DRAWN = {"decode speed, of vanilla's": "speedup", "tokens per verify step": "acceptance_length"}

# The columns of a table behind the axis' value, in the terminal and on a page.
TABLE: Columns = {head: show for head, show in speed_views.TABLE.items() if not head.startswith("step")}

write_csv = functools.partial(csv_files.write_rows, columns=COLUMNS)
read_csv = functools.partial(csv_files.read_rows, columns=COLUMNS, command="bench scaling")


def by_family(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each family."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append(row)
    return found


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns of a table of rows: the axis in front."""
    axis = rows[0]["axis"].replace("_", " ")
    return {axis: lambda row: f"{row['value']:g}", **TABLE}


def shown_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table for each family."""
    found = []
    for family, group in by_family(rows).items():
        title = f"{family}: {speed_views.setting(group, group[0]['axis'])}"
        words = f"{group[0]['rounds']} rounds; {group[0]['label'] or 'the pair as it is'}"
        found.append(by_columns(columns(group), group, num_words=2, title=title, caption=words))
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draw speedup and acceptance length over the axis, a line a family.

    Raises:
        VidSpecError: Nothing to draw, or the file cannot be written.
    """
    rows = race_views.beside_vanilla(rows)
    with figures.panels(path, (7.0, 5.0), len(_DRAWN), 1) as (_, grid, legend):
        for panel, (words, name) in zip(grid[:, 0], _DRAWN.items(), strict=True):
            legend |= _draw_lines(panel, rows, name)
            panel.set_title(words, fontsize=9, loc="left")
        grid[-1, 0].set_xlabel(rows[0]["axis"].replace("_", " "))


def _draw_lines(panel: Any, rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Draw one figure; values stand at equal distances, as most axes double. Return the lines by family."""
    values = sorted({row["value"] for row in rows})
    place_of = {value: place for place, value in enumerate(values)}
    lines = {}
    for style, (family, group) in zip(_STYLES, by_family(rows).items(), strict=False):
        points = sorted((place_of[row["value"]], row[name]) for row in group if row[name] is not None)
        lines[family] = figures.draw_line(panel, points, style)
    panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    figures.tidy(panel, "y")
    return lines


if __name__ == "__main__":
    sys.exit(csv_files.redraw("scaling_views", read_csv, draw))
