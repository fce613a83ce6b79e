"""How `vidspec bench parallel` shows itself: its table, CSV, and the figure drawn from it; no engine.

python -m vidspec_tools.race_views F.csv F.png
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vidspec_tools import csv_files, figures, inflation
from vidspec_tools.bench.race_rows import SPREAD, SPREADING
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent, times

_PUBLISHED = ("published_pair", "published_m", "published_speedup")
COLUMNS = (
    *("family", "inflate", "label", "mode", "method", "drafting", "pruner", "prune_ratio", "num_speculative_tokens"),
    *(column for name in SPREADING for column in (name, *(f"{name}_{p}" for p in SPREAD))),
    *("identical_frac", "output_tokens", "forwards", "t_step_ms"),
    *("acceptance_length", "acceptance_rate", "late_frac", "stream_length", "num_drafts"),
    *("late_drafts", "stale_streams", "stream_tokens", "drafter_restarts"),
    *("t_target_ms", "t_draft_ms", "ratio"),
    *("requests", "rounds", "max_tokens", "temperature", "seed", "knobs", "target_layers", "draft_layers"),
    *_PUBLISHED,
)
_LATER = frozenset({"forwards"})  # columns that files of earlier versions lack
_STYLES = {"vanilla": "#777777", "sequential": "#332288", "ParallelVLM": "#882255"}
_NAMES = {"sequential": "draft, then verify", "ParallelVLM": "in parallel"}


def write_csv(path: str, result: Mapping[str, Any]) -> None:
    """Write the rows of a result under COLUMNS.

    Raises:
        VidSpecError: The file cannot be written.
    """
    csv_files.write_rows(path, result, COLUMNS)


def read_csv(path: str) -> list[dict[str, Any]]:
    """Return the rows of a file that `write_csv` wrote.

    Raises:
        VidSpecError: The file cannot be read or is something else.
    """
    return csv_files.read_rows(path, COLUMNS, "bench parallel", _LATER)


def shown_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table for each family and ratio."""
    return [_table(group) for group in groups(rows).values()]


def groups(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], list[Mapping[str, Any]]]:
    """Return the rows by family and ratio."""
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["family"], row["inflate"]), []).append(row)
    return found


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns of a table of rows; what is published stands in the last ones, if it is asked for."""
    shown: Columns = {
        "method": lambda row: _NAMES.get(row["method"], row["method"]),
        "K": lambda row: number(row["num_speculative_tokens"], 0),
        "speedup": lambda row: f"{row['speedup']:.2f}x",
        "p20 - p80": lambda row: " - ".join(f"{row[f'speedup_{p}']:.2f}" for p in SPREAD),
        "same\noutput": lambda row: percent(row["identical_frac"]),
        "accept\nlength": lambda row: number(row["acceptance_length"], 2),
        "stream\nlength": lambda row: number(row["stream_length"], 2),
        "late": lambda row: percent(row["late_frac"]),
        "tokens\nper s": lambda row: number(row["tokens_per_s"], 1),
        "TTFT\ns": lambda row: number(row["ttft_s"], 2),
        "step\nms": lambda row: number(row["t_step_ms"], 1),
        "draft\nms": lambda row: number(row["t_draft_ms"], 1),
        "T_t /\nT_d": lambda row: number(row["ratio"], 1),
    }
    if "published_pair" in rows[0]:
        shown |= {
            "published\nspeedup": lambda row: times(row["published_speedup"]),
            "published\nM": lambda row: number(row["published_m"], 2),
        }
    return shown


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first = rows[0]
    words = [f"{first['rounds']} rounds of {first['requests']} requests", first["label"] or "the pair as it is"]
    if "published_pair" in first:
        words.append(f"published: {first['published_pair']}")
    title = f"{first['family']}: one request at a time, beside vanilla"
    return by_columns(columns(rows), rows, title=title, caption="; ".join(words))


def beside_vanilla(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the flat rows of what has a speedup over vanilla.

    Raises:
        VidSpecError: None has.
    """
    found = [csv_files.flatten(dict(row)) for row in rows if row["mode"] != "vanilla"]
    if not found:
        raise VidSpecError("no row has a speedup over vanilla")
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draw speedups over vanilla as bars, a group a ratio, a panel a family, with their spread over rounds.

    Raises:
        VidSpecError: Nothing to draw, or the file cannot be written.
    """
    rows = beside_vanilla(rows)
    families = list(dict.fromkeys(row["family"] for row in rows))
    with figures.panels(path, (4.4 * len(families) + 2.2, 3.2), 1, len(families)) as (_, grid, legend):
        for panel, family in zip(grid[0], families, strict=True):
            bars = _draw_bars(panel, [row for row in rows if row["family"] == family])
            legend |= {_NAMES.get(method, method): bar for method, bar in bars.items()}
            panel.set_title(family)
        grid[0][0].set_ylabel("decode speed, of vanilla's")


def _draw_bars(panel: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Draw one family; return the bars by method."""
    ratios = list(dict.fromkeys(row["inflate"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colors = ["#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#999933"]
    width, bars = 0.8 / len(methods), {}
    for index, method in enumerate(methods):
        mine = {row["inflate"]: row for row in rows if row["method"] == method}
        places = [place for place, ratio in enumerate(ratios) if ratio in mine]
        found = [mine[ratios[place]] for place in places]
        heights = [row["speedup"] for row in found]
        spread = [
            [row["speedup"] - row["speedup_p20"] for row in found],
            [row["speedup_p80"] - row["speedup"] for row in found],
        ]
        bars[method] = panel.bar(
            [place + (index - (len(methods) - 1) / 2) * width for place in places],
            heights,
            0.9 * width,
            yerr=spread,
            error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
            color=_STYLES.get(method) or colors[index % len(colors)],
        )
        panel.bar_label(bars[method], [f"{height:.2f}" for height in heights], padding=2, fontsize=7)
    panel.axhline(1.0, color="#777777", linewidth=0.8, linestyle="--")
    panel.set_xticks(range(len(ratios)), [_ratio_words(ratio, rows) for ratio in ratios])
    panel.tick_params(axis="x", length=0)
    figures.tidy(panel, "y")
    return bars


def _ratio_words(ratio: float, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what stands under a group: the ratio that was measured, and what was done for it."""
    here = [row for row in rows if row["inflate"] == ratio]
    reached = next((row["ratio"] for row in reversed(here) if row["ratio"]), None)
    words = f"T_t / T_d {number(reached, 1)}"
    number_of = {role: here[0][f"{role}_layers"] for role in ("target", "draft")}
    added = [f"{count:.0f} to the {role}" for role, count in number_of.items() if count]
    return f"{words}\n{inflation.WORDS}:\n{', '.join(added)}" if added else f"{words}\nthe pair as it is"


if __name__ == "__main__":
    sys.exit(csv_files.redraw("race_views", read_csv, draw))
