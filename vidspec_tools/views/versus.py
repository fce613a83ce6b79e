"""How benchmarks interleaved with vanilla show themselves: `bench paper` and `bench speed`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vidspec_tools.bench.rows import SPREAD
from vidspec_tools.bench.speed import PHASES
from vidspec_tools.views import figures
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent, times

Row = Mapping[str, Any]
Rows = Sequence[Row]
AS_IT_IS = "the pair as it is"


def by(rows: Rows, *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some columns."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _spread(row: Row) -> str:
    return "-" if row["speedup"] is None else " - ".join(f"{row[f'speedup_{p}']:.2f}" for p in SPREAD)


def _rounds(row: Row) -> str:
    return f"{row['rounds']:.0f} rounds of {row['requests']:.0f} requests; {row['label'] or AS_IT_IS}"


# Columns of both tables, in the terminal and on a page.
_SPEEDUP: Columns = {"speedup": lambda row: times(row["speedup"]), "p20 - p80": _spread}
_TOKENS: Columns = {"tokens\nper s": lambda row: number(row["tokens_per_s"], 1)}
_LENGTH: Columns = {"accept\nlength": lambda row: number(row["acceptance_length"], 2)}
_SAME: Columns = {"same\noutput": lambda row: percent(row["identical_frac"])}

# ---- bench paper -----------------------------------------------------------------------------------------------------

PAPER: Columns = {
    "method": lambda row: row["method"],
    "K": lambda row: number(row["num_speculative_tokens"], 0),
    **_LENGTH,
    "forwards": lambda row: number(row["forwards"], 1),
    **(_TOKENS | _SPEEDUP | _SAME),
    "published\nlength": lambda row: number(row["published_acceptance_length"], 2),
    "published\nspeedup": lambda row: times(row["published_speedup"]),
}
_OURS, _PUBLISHED = "#332288", "#CC6677"
# What is drawn: the words below a panel, ours and what is published.
_DRAWN = {
    "tokens per verify step": ("acceptance_length", "published_acceptance_length"),
    "decode speed, of vanilla's": ("speedup", "published_speedup"),
}


def paper_caption(row: Row) -> str:
    """Return how many requests a table is of, and on which pair."""
    return f"{_rounds(row)}; published on VideoDetailCaption, lengths with the target's own token"


def paper_tables(rows: Rows) -> list[Table]:
    """Return the table of each family and ratio."""
    return [
        by_columns(PAPER, group, title=f"{group[0]['family']}: one request at a time", caption=paper_caption(group[0]))
        for group in by(rows, "family", "inflate").values()
    ]


def draw_paper(rows: Rows, path: str) -> None:
    """Draw acceptance lengths and speedups as bars, a row of panels a family and ratio, what is published beside."""
    found = by([row for row in rows if row["mode"] != "vanilla"], "family", "inflate")
    if not found:
        raise VidSpecError(f"cannot draw {path}: no row has a speedup over vanilla")
    height = 0.8 + sum(0.5 + 0.3 * len(group) for group in found.values())
    with figures.panels(path, (9.0, height), len(found), len(_DRAWN)) as (_, grid, legend):
        for panels, ((family, _ratio), group) in zip(grid, found.items(), strict=True):
            for panel, (words, names) in zip(panels, _DRAWN.items(), strict=True):
                legend |= _draw_methods(panel, group, *names)
                panel.set_xlabel(words)
            panels[0].set_title("; ".join(filter(None, (family, group[0]["label"]))), loc="left", fontsize=9)


def _draw_methods(panel: Any, rows: Rows, ours: str, theirs: str) -> dict[str, Any]:
    """Draw one figure of each method; return the bars and the marks of what is published."""
    places, spread = range(len(rows)), None
    lengths = [row[ours] or 0.0 for row in rows]
    if f"{ours}_p20" in rows[0]:
        ends = [[row[f"{ours}_{p}"] or 0.0 for row in rows] for p in SPREAD]
        spread = [[abs(end - length) for end, length in zip(side, lengths, strict=True)] for side in ends]
    error_bars = {"elinewidth": 0.8, "ecolor": "#444444"}
    bars = panel.barh(places, lengths, 0.7, color=_OURS, xerr=spread, error_kw=error_bars)
    drawn = {"measured, bundled pair": bars}
    known = [(row[theirs], place) for place, row in enumerate(rows) if row[theirs] is not None]
    if known:
        xs, ys = zip(*known, strict=True)
        drawn["published, the paper's pair"] = panel.scatter(xs, ys, color=_PUBLISHED, marker="D", s=22, zorder=3)
    panel.axvline(1.0, color="#777777", linewidth=0.8, linestyle="--")
    panel.set_yticks(places, [row["method"] for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)  # the first above
    panel.tick_params(axis="y", length=0)
    figures.tidy(panel, "x")
    return drawn


# ---- bench speed -----------------------------------------------------------------------------------------------------

SPEED: Columns = {
    "engine": lambda row: row["method"],
    **(_TOKENS | _SPEEDUP),
    "TTFT\nms": lambda row: number(1e3 * row["ttft_s"], 1),
    "ms a\ntoken": lambda row: number(row["inter_token_ms"], 2),
    "step\nms": lambda row: number(row["t_step_ms"], 1),
    "step\np99": lambda row: number(row["t_step_ms_p99"], 1),
    **(_LENGTH | _SAME),
}
# What only a parallel drafter has.
_STREAMS: Columns = {
    "stream\nlength": lambda row: number(row["stream_length"], 2),
    "late": lambda row: percent(row["late_frac"]),
    "T_t /\nT_d": lambda row: number(row["ratio"], 1),
}
PHASE_TIMES: Columns = {
    "engine": lambda row: row["method"],
    "a request\nms": lambda row: number(row["request_ms"], 1),
    **{
        f"{name.replace('_', ' ')}\nms": lambda row, name=name: number(row[f"{name}_ms"], 1)  # type: ignore[misc]
        for name in PHASES
    },
}


def setting(rows: Rows) -> str:
    """Return what was measured beside vanilla, in a few words."""
    row = rows[-1]
    place = ", drafter in a process of its own" if row["mode"] == "parallel" else ""
    tokens, ratio = f"{row['num_speculative_tokens']:.0f}", f"{row['prune_ratio']:g}"
    return f"{row['drafting']} of {tokens}, {row['pruner']} {ratio}, {row['scorer']}{place}"


def speed_tables(rows: Rows) -> list[Table]:
    """Return two tables of each family and ratio: speed, and what a request's time is made of."""
    found = []
    for group in by(rows, "family", "inflate").values():
        title = f"{group[0]['family']}: {setting(group)}"
        is_parallel = group[-1]["mode"] == "parallel"
        columns = SPEED | _STREAMS if is_parallel else SPEED
        found.append(by_columns(columns, group, title=title, caption=_rounds(group[0])))
        note = "the target's vision is in target prefill, the draft's and pruning in draft prefill, scoring in verify"
        note += "; the drafter's phases run beside the others" if is_parallel else ""
        found.append(by_columns(PHASE_TIMES, group, title="what a request's time is made of", caption=note))
    return found
