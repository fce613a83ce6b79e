"""Sections of docs/paper-tables.md, and others on benchmarks interleaved with vanilla."""

from collections.abc import Callable

from vidspec_tools.pages.tables import RESULTS, Result, figure, fill, read, shown, table
from vidspec_tools.views import versus


def asked_ratio(ratio: float, label: str) -> str:
    """Return how a pair was inflated; `label` as in `Workload.label`."""
    asked = f"T_t / T_d asked for: {ratio:g}" if ratio else "the pair as it is"
    return asked + (f" ({label})" if label else "")


def parallel(result: Result) -> list[str]:
    """Return a table per family and ratio of `bench parallel`, and a list of what did not run."""
    found = []
    for (family, ratio), rows in versus.by(result["rows"], "family", "inflate").items():
        first = rows[0]
        words = f"`{family}`, {asked_ratio(ratio, first['label'])}; {first['rounds']} rounds of {first['requests']} "
        words += "requests, one at a time."
        words += f" Published: {first['published_pair']}." if "published_pair" in first else ""
        found += [words, shown(versus.parallel_columns(rows), rows)]
    failed = [fill("{method} ({family}, {inflate:g}): {reason}", one) for one in result["failures"]]
    found += [f"Did not run: {'; '.join(failed)}."] if failed else []
    return [*found, *figure("R14-parallel.png", "decode speed over vanilla's, by ratio and method")]


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
    return found


def speed(result: Result) -> list[str]:
    """Return two tables for each family and ratio of `bench speed`."""
    found = []
    for (family, _), rows in versus.by(result["rows"], "family", "inflate").items():
        found.append(f"`{family}`, {versus.setting(rows)}; {rows[0]['label'] or 'the pair as it is'}.")
        found += [shown(versus.SPEED, rows), shown(versus.PHASE_TIMES, rows)]
    return found


def scaling(result: Result) -> list[str]:
    """Return a table for each family of `bench scaling`."""
    found = []
    for (family,), rows in versus.by(result["rows"], "family").items():
        setting = versus.setting(rows, rows[0]["axis"])
        found.append(f"`{family}`, {setting}; {rows[0]['label'] or 'the pair as it is'}.")
        found.append(shown(versus.scaling_columns(rows), rows, words=2))
    return found


def of_page(name: str, result: Result, body: Callable[[Result], list[str]], words: str) -> list[str]:
    """Return a section of docs/paper-tables.md: tables, what did not run, the figure."""
    failed = [
        f"{one['method'] if 'method' in one else format(one['value'], 'g')} ({one['family']}): {one['reason']}"
        for one in result["failures"]
    ]
    picture = [f"![{words}](results/{name}.png)"] if (RESULTS / f"{name}.png").exists() else []
    return [*body(result), *([f"Did not run: {'; '.join(failed)}."] if failed else []), *picture]


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


# Of docs/paper-tables.md, by what a result's name begins with: what shows it, and what its figure is called.
OF_PAPERS: dict[str, tuple[Callable[[Result], list[str]], str]] = {
    "paper": (paper, "tokens per verify step and decode speed of each method, published beside"),
    "speed": (speed, "what a request's time is made of"),
    "scaling": (scaling, "decode speed and tokens per verify step over the axis"),
}
