"""The section of docs/never-slower.md: the controller beside vanilla and fixed chains, a row a cell."""

from collections.abc import Callable, Iterable

from vidspec_tools.pages.tables import Row, markdown, read, recorded

NAME = "never-slower"
AGAIN = "vanilla again"  # a second vanilla engine: what two engines that do the same differ by
HEAD = (
    "video tokens", "draft", "batch", "target padded to", "best fixed over vanilla", "controller over vanilla",
    "over best fixed", "first round", "time to first token", "whole answers over vanilla", "whole over best fixed",
    "tokens per verify step", "a second vanilla over vanilla",
)  # fmt: skip


def table(cells: Iterable[Row]) -> str:
    """Return the table of cells."""
    return markdown(HEAD, map(line, cells), words=0)


def line(cell: Row) -> list[str]:
    """Return a cell as a row of the table."""
    vanilla, ours, *fixed = (row for row in cell["rows"] if row["engine"] != AGAIN)
    again = next((f"{row['speedup']:.2f}" for row in cell["rows"] if row["engine"] == AGAIN), "-")
    best = max((vanilla, *fixed), key=lambda row: row["speedup"])
    steps = ours["verify_steps_last"]
    return [
        f"{cell['tokens']:,}",
        cell["draft"],
        str(cell["batch"]),
        f"{cell['pads']:g} drafts" if cell["pads"] else "-",
        f"{best['speedup']:.2f} ({best['engine']})",
        *(f"{value:.2f}" for value in (ours["speedup"], ours["speedup"] / best["speedup"], ours["speedup_first"])),
        f"{ours['ttft_more_ms']:+.1f} of {vanilla['ttft_ms']:.0f} ms",
        f"{whole_s(cell, vanilla) / whole_s(cell, ours):.2f}",
        f"{min(whole_s(cell, row) for row in (vanilla, *fixed)) / whole_s(cell, ours):.2f}",
        f"{1 + ours['accepted_last'] / steps:.2f}" if steps else "rests",
        again,
    ]


def whole_s(cell: Row, row: Row) -> float:
    """Return the seconds of a round's answers, from the request on."""
    return 1e-3 * row["ttft_ms"] + (cell["max_tokens"] - 1) * cell["batch"] / row["tokens_per_s"]


def sections() -> dict[str, Callable[[], str]]:
    """Return what writes the section, where there is a result."""
    return {"cells": lambda: table(read(NAME)["cells"])} if recorded(NAME) else {}
