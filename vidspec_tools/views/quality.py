"""How `vidspec bench quality` shows itself: its tables and its figure."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.captions import GROUPS
from benchmarks.quality import DRAFT, LOSSY, STRICT, knob, line_name, setting_name
from vidspec_tools.views import figures
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.tables import Columns, by_columns, number

FLOOR = 0.98  # of the target's accuracy: what counts as kept
_PANEL = ("family", "temperature", "draft_noise")

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


def panel_name(panel: Panel) -> str:
    """Return a panel in words; at temperature 0 the noise makes no difference."""
    family, temperature, noise = panel
    return f"{family}, temperature {temperature:g}" + (f", {noise} noise" if temperature else "")


def longest_kept(rows: Sequence[Row]) -> dict[str, Row | None]:
    """Return, for each lossy scorer of a panel, the row of the longest acceptance that keeps enough, or None."""
    return {
        scorer: max(
            (row for row in rows if row["method"] == scorer and _is_kept(row)),
            key=lambda row: row["acceptance_length"],
            default=None,
        )
        for scorer in LOSSY
        if any(row["method"] == scorer for row in rows)
    }


def longest_words(rows: Sequence[Row]) -> str:
    """Return what `longest_kept` found as a sentence."""
    parts = [
        f"{scorer} nowhere"
        if row is None
        else f"{setting_name(row)} with {row['acceptance_length']:.2f} tokens per step ({row['ratio_to_strict']:.2f} "
        f"of strict's, {100 * row['retention']:.1f} % kept)"
        for scorer, row in longest_kept(rows).items()
    ]
    return f"At least {100 * FLOOR:g} % kept: {'; '.join(parts) or 'nothing was loosened'}."


# Everything but lengths, ratios and the AUC in percent.
COLUMNS: Columns = {
    "": setting_name,
    "accept\nlength": lambda row: number(row["acceptance_length"], 2),
    "of\nstrict": lambda row: number(row["ratio_to_strict"], 2),
    "kept": lambda row: _in_percent(row["retention"]),
    **{group: lambda row, group=group: _in_percent(row["group"][group]) for group in GROUPS},  # type: ignore[misc]
    "not\nexact": lambda row: _in_percent(None if row["exact_frac"] is None else 1 - row["exact_frac"]),
    "same": lambda row: _in_percent(row["identical_frac"]),
    "AUC": lambda row: number(row["relevance_auc"], 2),
}


def _in_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}".removesuffix(".0")


def _is_kept(row: Row) -> bool:
    return row["method"] in LOSSY and row["retention"] is not None and row["retention"] >= FLOOR


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    for panel, ours in panels(rows).items():
        caption = f"{ours[0]['requests']} captions, K {ours[0]['num_speculative_tokens']}, in %. {longest_words(ours)}"
        style = lambda row: "green" if _is_kept(row) else None  # noqa: E731
        yield by_columns(COLUMNS, ours, style=style, title=panel_name(panel), caption=caption, padding=0)


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw retention over acceptance length: a panel per family (down), temperature and noise (across).

    A line joins what a scorer gives over its lambda or threshold. The same rows give the same file.
    """
    found = panels(rows)
    if not found:
        raise VidSpecError(f"cannot draw {path}: no row has drafts")
    families = list(dict.fromkeys(family for family, _, _ in found))
    across = list(dict.fromkeys(panel[1:] for panel in found))
    size = (1.8 + 3.4 * len(across), 0.6 + 3.1 * len(families))
    with figures.panels(path, size, len(families), len(across)) as (_, grid, lines):
        for places, family in zip(grid, families, strict=True):
            for place, condition in zip(places, across, strict=True):
                panel = (family, *condition)
                if panel not in found:
                    place.set_axis_off()
                    continue
                lines |= draw_panel(place, [row for row in found[panel] if row["retention"] is not None])
                place.set_title(panel_name(panel), fontsize=9)
            places[0].set_ylabel("attributes right (% of the target's)")
        for place in grid[-1]:
            place.set_xlabel("acceptance length (tokens per verify step)")


def draw_panel(place: Any, rows: Sequence[Row]) -> dict[str, Any]:
    levels = {"the target alone": (1.0, "#444444", "-"), f"{100 * FLOOR:g} % of it": (FLOOR, "#444444", (0, (5, 3)))}
    for row in rows:
        if row["method"] == DRAFT:
            levels["the draft alone"] = (row["retention"], "#999933", ":")
    lines = {
        words: place.axhline(100 * level, color=color, linestyle=dashes, linewidth=1, zorder=1)
        for words, (level, color, dashes) in levels.items()
    }
    lossy: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] == STRICT:
            star = {"markersize": 13, "linestyle": "none", "zorder": 5}
            lines[STRICT] = figures.draw_line(place, [_point(row)], ("#000000", "*"), **star)
        elif row["method"] in LOSSY:
            lossy.setdefault(line_name(row), []).append(row)
    for name, style in figures.styles(lossy).items():
        points = [point for _, point in sorted((knob(row), _point(row)) for row in lossy[name])]
        lines[name] = figures.draw_line(place, points, style)
    figures.tidy(place)
    return lines


def _point(row: Row) -> tuple[float, float]:
    return row["acceptance_length"], 100 * row["retention"]
