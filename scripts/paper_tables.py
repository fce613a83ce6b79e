"""The tables of docs/paper-tables.md, as Markdown; what the JSON files hold, and nothing else."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import result_tables as tables

from vllm_vidspec.tools import paper_views, race_views, scaling_views, speed_views
from vllm_vidspec.tools.tables import Columns

# What a result's name begins with -> what shows it.
VIEWS: dict[str, ModuleType] = {"paper": paper_views, "speed": speed_views, "scaling": scaling_views}
# The result that README.md's decode speed is of.
WALL_CLOCK = "paper-qwen2.5-vl-inflated-race"


def views_of(name: str) -> ModuleType | None:
    """Return the module that shows a result of this page, None of another page's."""
    return VIEWS.get(name.split("-")[0])


def body_of(name: str, result: dict[str, Any]) -> str:
    """Return what stands between the markers of a name: tables, a figure, and where the result comes from."""
    text = BODIES[name.split("-")[0]](result)
    named = [(one["method"] if "method" in one else f"{one['value']:g}", one) for one in result["failures"]]
    failed = [f"{what} ({one['family']}): {one['reason']}" for what, one in named]
    text += f"Did not run: {'; '.join(failed)}.\n\n" if failed else ""
    if (tables.FOLDER / f"{name}.png").exists():
        text += f"![{WORDS[name.split('-')[0]]}](results/{name}.png)\n\n"
    return text + tables.origin(result) + "\n"


def wall_clock(result: dict[str, Any]) -> str:
    """Return what README.md says of decode speed: two methods that lose nothing, and a loose one."""
    rows = {row["method"]: row for row in result["rows"]}
    named = {
        "SD-chain": "5-token chain, sequential",
        "ParallelVLM": "parallel drafting",
        "LVSpec": "10-token chain, `loose` (lossy)",
    }
    return tables.table(
        f"target {rows['SD-chain']['inflate']:g} times the draft | decode speed over vanilla | identical outputs",
        "{words} | {speedup:.2f}x ({speedup_p20:.2f} to {speedup_p80:.2f}) | {identical_frac:%}",
        [rows[method] | {"words": words} for method, words in named.items()],
    )


def shown(columns: Columns, rows: Iterable[Any], num_words: int = 1) -> str:
    """Return the Markdown table of what a terminal shows, each head on one line."""
    lines = [[show(row) for show in columns.values()] for row in rows]
    return tables.markdown_table([" ".join(head.split()) for head in columns], lines, num_words)


def paper_table(result: dict[str, Any]) -> str:
    """Return the Markdown of `bench paper`: a table for each family and ratio, and the sources of what is published."""
    text = ""
    for (family, ratio), rows in race_views.groups(result["rows"]).items():
        reached = [f"{row['ratio']:.1f} ({row['method']})" for row in rows if row["ratio"]][:1]
        asked = f"T_t / T_d asked for: {ratio:g}, measured: {reached[0]}; " if ratio and reached else ""
        text += f"`{family}`, {asked}{paper_views.caption(rows[0])}.\n\n" + shown(paper_views.TABLE, rows)
        by_source: dict[str, list[str]] = {}
        for row in rows:
            if row["published_source"]:
                by_source.setdefault(row["published_source"], []).append(row["method"])
        text += "Published: " + "; ".join(f"{', '.join(names)}: {source}" for source, names in by_source.items())
        text += ".\n\n"
    return text


def speed_tables(result: dict[str, Any]) -> str:
    """Return the Markdown of `bench speed`: two tables for each family and ratio."""
    text = ""
    for (family, _ratio), rows in race_views.groups(result["rows"]).items():
        text += f"`{family}`, {speed_views.setting(rows)}; {rows[0]['label'] or 'the pair as it is'}.\n\n"
        text += shown(speed_views.TABLE, rows) + shown(speed_views.PHASE_TABLE, rows)
    return text


def scaling_tables(result: dict[str, Any]) -> str:
    """Return the Markdown of `bench scaling`: a table for each family."""
    text = ""
    for family, rows in scaling_views.by_family(result["rows"]).items():
        text += (
            f"`{family}`, {speed_views.setting(rows, rows[0]['axis'])}; {rows[0]['label'] or 'the pair as it is'}.\n\n"
        )
        text += shown(scaling_views.columns(rows), rows, num_words=2)
    return text


BODIES = {"paper": paper_table, "speed": speed_tables, "scaling": scaling_tables}
WORDS = {
    "paper": "tokens per verify step and decode speed of each method, published beside",
    "speed": "what a request's time is made of",
    "scaling": "decode speed and tokens per verify step over the axis",
}
