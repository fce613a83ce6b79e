"""How benchmarks interleaved with vanilla show themselves: `bench parallel`, `paper`, `speed` and `scaling`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from vidspec_tools import inflation
from vidspec_tools.bench.rows import SPREAD
from vidspec_tools.bench.speed import PHASES
from vidspec_tools.views import figures
from vidspec_tools.views.csv_file import flatten
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent, times

Row = Mapping[str, Any]
Rows = Sequence[Row]
AS_IT_IS = "the pair as it is"


class View(NamedTuple):
    """How the rows of one benchmark are shown: in a terminal, and as a figure."""

    tables: Callable[[Rows], list[Table]]
    draw: Callable[[Rows, str], None]


def by(rows: Rows, *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some columns."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def beside_vanilla(rows: Rows) -> list[Row]:
    """Return the flat rows of what has a speedup over vanilla."""
    found: list[Row] = [flatten(row) for row in rows if row["mode"] != "vanilla"]
    if not found:
        raise VidSpecError("no row has a speedup over vanilla")
    return found


def _spread(row: Row) -> str:
    return "-" if row["speedup"] is None else " - ".join(f"{row[f'speedup_{p}']:.2f}" for p in SPREAD)


# Columns that several tables have, in the terminal and on a page.
_COMMON: Columns = {
    "K": lambda row: number(row["num_speculative_tokens"], 0),
    "speedup": lambda row: times(row["speedup"]),
    "p20 - p80": _spread,
    "same\noutput": lambda row: percent(row["identical_frac"]),
    "accept\nlength": lambda row: number(row["acceptance_length"], 2),
    "tokens\nper s": lambda row: number(row["tokens_per_s"], 1),
    "step\nms": lambda row: number(row["t_step_ms"], 1),
}


def _common(*heads: str) -> Columns:
    return {head: _COMMON[head] for head in heads}


def setting(rows: Rows, axis: str | None = None) -> str:
    """Return what was measured beside vanilla, in a few words, without what an axis varies."""
    row = rows[-1]
    length = "" if axis == "num_speculative_tokens" else f" of {row['num_speculative_tokens']:.0f}"
    ratio = "" if axis == "prune_ratio" else f" {row['prune_ratio']:g}"
    place = ", drafter in a process of its own" if row["mode"] == "parallel" else ""
    return f"{row['drafting']}{length}, {row['pruner']}{ratio}, {row['scorer']}{place}"


def _rounds(row: Row) -> str:
    return f"{row['rounds']:.0f} rounds of {row['requests']:.0f} requests; {row['label'] or AS_IT_IS}"


# ---- bench parallel --------------------------------------------------------------------------------------------------

_COLORS = {"vanilla": "#777777", "sequential": "#332288", "ParallelVLM": "#882255"}
_OTHER_COLORS = ("#88CCEE", "#44AA99", "#DDCC77", "#CC6677", "#999933")
_NAMES = {"sequential": "draft, then verify", "ParallelVLM": "in parallel"}


def parallel_columns(rows: Rows) -> Columns:
    """Return the columns of a table of rows; published figures are the last ones, if asked for."""
    shown: Columns = {
        "method": lambda row: _NAMES.get(row["method"], row["method"]),
        **_common("K", "speedup", "p20 - p80", "same\noutput", "accept\nlength"),
        "stream\nlength": lambda row: number(row["stream_length"], 2),
        "late": lambda row: percent(row["late_frac"]),
        **_common("tokens\nper s"),
        "TTFT\ns": lambda row: number(row["ttft_s"], 2),
        **_common("step\nms"),
        "draft\nms": lambda row: number(row["t_draft_ms"], 1),
        "T_t /\nT_d": lambda row: number(row["ratio"], 1),
    }
    if "published_pair" in rows[0]:
        shown["published\nspeedup"] = lambda row: times(row["published_speedup"])
        shown["published\nM"] = lambda row: number(row["published_m"], 2)
    return shown


def _parallel_tables(rows: Rows) -> list[Table]:
    found = []
    for group in by(rows, "family", "inflate").values():
        published = f"; published: {group[0]['published_pair']}" if "published_pair" in group[0] else ""
        title = f"{group[0]['family']}: one request at a time, beside vanilla"
        found.append(by_columns(parallel_columns(group), group, title=title, caption=_rounds(group[0]) + published))
    return found


def _draw_parallel(rows: Rows, path: str) -> None:
    """Draw speedups over vanilla as bars, a group a ratio, a panel a family, with their spread over rounds."""
    rows = beside_vanilla(rows)
    families = by(rows, "family")
    with figures.panels(path, (4.4 * len(families) + 2.2, 3.2), 1, len(families)) as (_, grid, legend):
        for panel, ((family,), ours) in zip(grid[0], families.items(), strict=True):
            methods, colors = by(ours, "method"), iter(_OTHER_COLORS * 3)
            series = {
                _NAMES.get(method, method): (
                    _COLORS.get(method) or next(colors),
                    {row["inflate"]: tuple(row[f"speedup{end}"] for end in ("", "_p20", "_p80")) for row in mine},
                )
                for (method,), mine in methods.items()
            }
            groups = {ratio: _ratio_words(group) for (ratio,), group in by(ours, "inflate").items()}
            legend |= figures.grouped_bars(panel, groups, series)
            panel.axhline(1.0, color="#777777", linewidth=0.8, linestyle="--")
            panel.set_title(family)
        grid[0][0].set_ylabel("decode speed, of vanilla's")


def _ratio_words(rows: Rows) -> str:
    """Return the words below a group: the measured ratio, and the layers appended for it."""
    reached = next((row["ratio"] for row in reversed(rows) if row["ratio"]), None)
    words = f"T_t / T_d {number(reached, 1)}"
    layers = {role: rows[0][f"{role}_layers"] for role in ("target", "draft")}
    added = [f"{count:.0f} to the {role}" for role, count in layers.items() if count]
    return f"{words}\n{inflation.WORDS}:\n{', '.join(added)}" if added else f"{words}\n{AS_IT_IS}"


# ---- bench paper -----------------------------------------------------------------------------------------------------

PAPER: Columns = {
    "method": lambda row: row["method"],
    **_common("K", "accept\nlength"),
    "forwards": lambda row: number(row["forwards"], 1),
    **_common("tokens\nper s", "speedup", "p20 - p80", "same\noutput"),
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


def _paper_tables(rows: Rows) -> list[Table]:
    return [
        by_columns(PAPER, group, title=f"{group[0]['family']}: one request at a time", caption=paper_caption(group[0]))
        for group in by(rows, "family", "inflate").values()
    ]


def _draw_paper(rows: Rows, path: str) -> None:
    """Draw acceptance lengths and speedups as bars, a row of panels a family and ratio, what is published beside."""
    found = by(beside_vanilla(rows), "family", "inflate")
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
    bars = panel.barh(places, lengths, 0.7, color=_OURS, xerr=spread, error_kw=figures.ERROR_BARS)
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
    **_common("tokens\nper s", "speedup", "p20 - p80"),
    "TTFT\nms": lambda row: number(1e3 * row["ttft_s"], 1),
    "ms a\ntoken": lambda row: number(row["inter_token_ms"], 2),
    **_common("step\nms"),
    "step\np99": lambda row: number(row["t_step_ms_p99"], 1),
    **_common("accept\nlength", "same\noutput"),
}
PHASE_TIMES: Columns = {
    "engine": lambda row: row["method"],
    "a request\nms": lambda row: number(row["request_ms"], 1),
    **{
        f"{name.replace('_', ' ')}\nms": lambda row, name=name: number(row[f"{name}_ms"], 1)  # type: ignore[misc]
        for name in PHASES
    },
}
# Paul Tol's "muted" palette: the target's phases blue and green, the draft's red and yellow.
_PHASE_COLORS = dict(
    zip(PHASES, ("#332288", "#117733", "#DDCC77", "#CC6677", "#88CCEE", "#44AA99", "#DDDDDD"), strict=True)
)


def _speed_tables(rows: Rows) -> list[Table]:
    found = []
    for group in by(rows, "family", "inflate").values():
        title = f"{group[0]['family']}: {setting(group)}"
        found.append(by_columns(SPEED, group, title=title, caption=_rounds(group[0])))
        note = "the target's vision is in target prefill, the draft's and pruning in draft prefill, scoring in verify"
        note += "; the drafter's phases run beside the others" if group[-1]["mode"] == "parallel" else ""
        found.append(by_columns(PHASE_TIMES, group, title="what a request's time is made of", caption=note))
    return found


def _draw_speed(rows: Rows, path: str) -> None:
    """Draw what a request's time is made of as stacked bars, a bar for each family and ratio; vanilla's as a line."""
    groups = list(by(rows, "family", "inflate").values())
    if not any(row["verify_ms"] is not None for row in rows):
        raise VidSpecError("no row has phases")
    with figures.panels(path, (8.5, 0.9 + 0.7 * len(groups)), 1, 1) as (_, ((panel,),), legend):
        for place, (vanilla, *_others, row) in enumerate(groups):
            left = 0.0
            for name in PHASES:
                value = row[f"{name}_ms"] or 0.0
                legend[name.replace("_", " ")] = panel.barh(place, value, 0.6, left=left, color=_PHASE_COLORS[name])
                left += value
            line = {"color": "#000000", "linestyle": "--", "linewidth": 1}
            legend["vanilla's whole request"] = panel.vlines(vanilla["request_ms"], place - 0.4, place + 0.4, **line)
        names = ["\n".join(filter(None, (group[-1]["family"], group[-1]["label"]))) for group in groups]
        panel.set_yticks(range(len(groups)), names)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("ms a request (mean)")
        figures.tidy(panel, "x")


# ---- bench scaling ---------------------------------------------------------------------------------------------------

_STYLES = (("#332288", "o"), ("#CC6677", "s"), ("#44AA99", "^"))


def scaling_columns(rows: Rows) -> Columns:
    """Return the columns of a table of rows: the axis in front."""
    columns: Columns = {rows[0]["axis"].replace("_", " "): lambda row: f"{row['value']:g}"}
    return columns | {head: show for head, show in SPEED.items() if not head.startswith("step")}


def _scaling_tables(rows: Rows) -> list[Table]:
    found = []
    for (family,), group in by(rows, "family").items():
        title = f"{family}: {setting(group, group[0]['axis'])}"
        words = f"{group[0]['rounds']} rounds; {group[0]['label'] or AS_IT_IS}"
        found.append(by_columns(scaling_columns(group), group, num_words=2, title=title, caption=words))
    return found


def _draw_scaling(rows: Rows, path: str) -> None:
    """Draw speedup and acceptance length over the axis, a line a family; values are evenly spaced."""
    rows = beside_vanilla(rows)
    values = sorted({row["value"] for row in rows})
    drawn = {"decode speed, of vanilla's": "speedup", "tokens per verify step": "acceptance_length"}
    with figures.panels(path, (7.0, 5.0), len(drawn), 1) as (_, grid, legend):
        for panel, (words, name) in zip(grid[:, 0], drawn.items(), strict=True):
            series = {
                family: (style, {row["value"]: row[name] for row in group if row[name] is not None})
                for style, ((family,), group) in zip(_STYLES, by(rows, "family").items(), strict=False)
            }
            legend |= figures.lines(panel, values, series)
            panel.set_title(words, fontsize=9, loc="left")
        grid[-1, 0].set_xlabel(rows[0]["axis"].replace("_", " "))


PARALLEL_VIEW = View(_parallel_tables, _draw_parallel)
PAPER_VIEW = View(_paper_tables, _draw_paper)
SPEED_VIEW = View(_speed_tables, _draw_speed)
SCALING_VIEW = View(_scaling_tables, _draw_scaling)
