"""Sections of docs/paper-tables.md and README.md: benchmarks interleaved with vanilla."""

from vidspec_tools.pages.tables import Result, read, shown, table
from vidspec_tools.views import versus


def paper(result: Result) -> list[str]:
    """Return a table for each family and ratio of `bench paper`, and the sources of what is published."""
    found = []
    for (family, ratio), rows in versus.by(result["rows"], "family", "inflate").items():
        reached = [f"{row['ratio']:.1f} ({row['method']})" for row in rows if row["ratio"]][:1]
        asked = f"T_t / T_d asked for: {ratio:g}, measured: {reached[0]}; " if ratio and reached else ""
        sources: dict[str, list[str]] = {}
        for row in rows:
            if row["published_source"]:
                sources.setdefault(row["published_source"], []).append(row["method"])
        words = "; ".join(f"{', '.join(names)}: {source}" for source, names in sources.items())
        found += [f"`{family}`, {asked}{versus.paper_caption(rows[0])}.", shown(versus.PAPER, rows)]
        found.append(f"Published: {words}.")
    failed = [f"{one['method']} ({one['family']}): {one['reason']}" for one in result["failures"]]
    return [*found, *([f"Did not run: {'; '.join(failed)}."] if failed else [])]


def speed(result: Result) -> list[str]:
    """Return two tables for each family and ratio of `bench speed`."""
    found = []
    for (family, _), rows in versus.by(result["rows"], "family", "inflate").items():
        found.append(f"`{family}`, {versus.setting(rows)}; {rows[0]['label'] or versus.AS_IT_IS}.")
        found += [shown(versus.SPEED, rows), shown(versus.PHASE_TIMES, rows)]
    return found


def wall_clock() -> str:
    """Return what README.md says of decode speed: two lossless methods, and a loose one."""
    rows = {row["method"]: row for row in read("paper-qwen2.5-vl-inflated-race")["rows"]}
    named = {
        "SD-chain": "5-token chain, sequential",
        "ParallelVLM": "in parallel (`parallel`)",
        "LVSpec": "10-token chain, `loose`",
    }
    return table(
        f"target {rows['SD-chain']['inflate']:g} times the draft | decode speed over vanilla | identical outputs",
        "{words} | {speedup:.2f}x ({speedup_p20:.2f} to {speedup_p80:.2f}) | {identical_frac:%}",
        [rows[method] | {"words": words} for method, words in named.items()],
    )
