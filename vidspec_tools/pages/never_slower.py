"""Sections of docs/never-slower.md: the controller beside vanilla and fixed chains, a row a cell; mixed traffic."""

import statistics
from collections.abc import Callable, Iterable

from vidspec_tools.pages import tables
from vidspec_tools.pages.tables import Row, markdown, read, recorded

NAME, ONE_ENGINE = "never-slower", "one-engine"
CELL = ("tokens", "draft", "batch", "pads")  # what tells a cell from others
AGAIN = "vanilla again"  # a second vanilla engine: what two engines that do the same differ by
LEAST = 0.97  # of vanilla, or of the best fixed number: what no cell should be under
LOWEST = 5  # cells that are named
PAYS = 1.05  # over vanilla: what the best fixed number gains at least where drafts are said to pay
LATER = 2.0, 0.03  # ms, or share of vanilla's: by how much a first token may be later where a class rests
HEAD = (
    "video tokens", "draft", "batch", "target padded to", "best fixed over vanilla", "controller over vanilla",
    "over best fixed", "first answer", "time to first token, cached", "cold", "whole answers over vanilla",
    "whole over best fixed", "tokens per verify step", "a second vanilla over vanilla",
)  # fmt: skip
OF_ONE = (0, 1, 2, 3, 4, 5, 6, 12, 13)  # columns that one engine in several roles tells
REST_HEAD = "video tokens | requests | with our hooks | without | ratio"
REST = "{tokens:,} | {batch} | {with_ms:.3f} ms | {without_ms:.3f} ms | {ratio:.3f} ± {ratio_error:.3f}"
MIXED_HEAD = "engine | good beside hopeless | good beside good | tokens/s, 16 requests | tokens/s, 192 requests"
MIXED = (
    "{engine} | {good_beside_hopeless:.2f} | {good_beside_good:.2f} | {sixteen_tokens_per_s:.2f} |"
    " {traffic_tokens_per_s:.2f}"
)


def pooled(cells: Iterable[Row]) -> list[Row]:
    """Return every cell once: of those that were measured with several starts the median of each figure, speeds over
    the mean of each start's vanilla engines.
    """
    starts: dict[tuple, list[Row]] = {}
    for cell in cells:
        of_vanilla = vanilla_speed(cell)
        rows = [{**row, "speedup": row["speedup"] / of_vanilla} for row in cell["rows"]]
        starts.setdefault(tuple(cell[of] for of in CELL), []).append({**cell, "rows": rows})
    found = list[Row]()
    for of_cell in starts.values():
        engines = zip(*(cell["rows"] for cell in of_cell), strict=True)
        found.append({**of_cell[0], "rows": [of_starts(rows) for rows in engines], "starts": len(of_cell)})
    return found


def of_starts(rows: tuple[Row, ...]) -> Row:
    """Return an engine's row of a cell, given those of each start."""
    numbers = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    medians = {name: statistics.median(row[name] for row in rows) for name in numbers}
    return {**rows[-1], **medians, "identical_frac": min(row["identical_frac"] for row in rows)}


def table(cells: Iterable[Row]) -> str:
    """Return the table of cells."""
    return markdown(HEAD, map(line, cells), words=0)


def table_of_one(cells: Iterable[Row]) -> str:
    """Return the table of cells of one engine in several roles."""
    rows = ([line(cell)[column] for column in OF_ONE] for cell in cells)
    return markdown([HEAD[column] for column in OF_ONE], rows, words=0)


def mixed_table(rows: list[Row]) -> str:
    """Return the table of mixed traffic."""
    return tables.table(MIXED_HEAD, MIXED, rows)


def line(cell: Row) -> list[str]:
    """Return a cell as a row of the table."""
    vanilla, ours, *_ = cell["rows"]
    (best, its_name), second = best_fixed(cell), second_vanilla(cell)
    steps, is_cached = ours["verify_steps_last"], "cold_ttft_ms" in ours
    cold = "cold_ttft_ms" if is_cached else "ttft_ms"
    return [
        f"{cell['tokens']:,}",
        cell["draft"],
        str(cell["batch"]),
        f"{cell['pads']:g} drafts" if cell["pads"] else "-",
        f"{best:.2f} ({its_name})",
        f"{over_vanilla(cell):.2f}"
        + (f" ± {ours['speedup_error']:.2f}" if "speedup_error" in ours else "")
        + (f" ({cell['starts']} starts)" if cell.get("starts", 1) > 1 else ""),
        *(f"{value:.2f}" for value in (over_best(cell), first_answer(cell))),
        f"{later_ms(cell):+.1f} of {vanilla['ttft_ms']:.0f} ms" if is_cached else "-",
        f"{ours[cold] - vanilla[cold]:+.0f} of {vanilla[cold]:.0f} ms",
        f"{whole_s(cell, vanilla) / whole_s(cell, ours):.2f}",
        f"{min(whole_s(cell, row) for row in (vanilla, *chains(cell))) / whole_s(cell, ours):.2f}",
        f"{1 + ours['accepted_last'] / steps:.2f}" if steps else "rests",
        "-" if second is None else f"{second:.2f}",
    ]


def chains(cell: Row) -> list[Row]:
    """Return the rows of fixed numbers of drafts but 0."""
    return [row for row in cell["rows"][2:] if row["engine"] != AGAIN]


def again(cell: Row) -> Row | None:
    """Return the second vanilla engine's row, None where there is but one engine."""
    return next((row for row in cell["rows"] if row["engine"] == AGAIN), None)


def second_vanilla(cell: Row) -> float | None:
    """Return a second vanilla engine's decode speed over the first's, None where there is but one."""
    row = again(cell)
    return None if row is None else row["speedup"] / cell["rows"][0]["speedup"]


def vanilla_speed(cell: Row) -> float:
    """Return the decode speed that others are compared with, the mean of both vanilla engines'."""
    first, row = cell["rows"][0]["speedup"], again(cell)
    return first if row is None else (first + row["speedup"]) / 2


def over_vanilla(cell: Row) -> float:
    """Return the controller's decode speed over vanilla's."""
    return cell["rows"][1]["speedup"] / vanilla_speed(cell)


def best_fixed(cell: Row) -> tuple[float, str]:
    """Return the decode speed over vanilla's of the best fixed number of drafts, and what it is called."""
    found = [(row["speedup"] / vanilla_speed(cell), row["engine"]) for row in chains(cell)]
    return max([(1.0, "vanilla"), *found])


def over_best(cell: Row) -> float:
    """Return the controller's decode speed over that of the best fixed number."""
    return over_vanilla(cell) / best_fixed(cell)[0]


def later_ms(cell: Row) -> float:
    """Return by how much the controller's first tokens are later than those of both vanilla engines, at the mean."""
    row = again(cell)
    return cell["rows"][1]["ttft_more_ms"] - (0.0 if row is None else row["ttft_more_ms"] / 2)


def rests(cell: Row) -> bool:
    """Return whether nothing was drafted in the last round."""
    return not cell["rows"][1]["verify_steps_last"]


def whole_s(cell: Row, row: Row) -> float:
    """Return the seconds of a round's answers, from the request on."""
    return 1e-3 * row["ttft_ms"] + (cell["max_tokens"] - 1) * cell["batch"] / row["tokens_per_s"]


def summary(cells: list[Row]) -> str:
    """Return which cells are slower than they should be."""
    again_too = sum(cell["starts"] > 1 for cell in cells)
    lines = [f"Measured are {len(cells)} of 96 cells, {again_too} of them with several starts of all engines."]
    resting = [cell for cell in cells if rests(cell)]
    firsts = spread([first_answer(cell) for cell in resting])
    lines += decode_lines(cells)
    lines.append(
        f"Very first answers of a length, where nothing is drafted later ({len(resting)} cells): {firsts} of vanilla."
    )
    late = [cell for cell in resting if later_ms(cell) > max(LATER[0], LATER[1] * cell["rows"][0]["ttft_ms"])]
    within = f"within {LATER[0]:g} ms or {100 * LATER[1]:g} % in {len(resting) - len(late)} of {len(resting)} cells"
    others = [f"{later_ms(cell):+.1f} of {cell['rows'][0]['ttft_ms']:.0f} ms ({name(cell)})" for cell in late]
    lines.append(f"First tokens at rest (cached prompts): {within}; the others: {'; '.join(others) or 'none'}.")
    return bullets(*lines)


def summary_of_one(cells: list[Row]) -> str:
    """Return the same of one engine in several roles."""
    return bullets(f"Measured are {len(cells)} of 96 cells.", *decode_lines(cells))


def bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)


def decode_lines(cells: list[Row]) -> list[str]:
    """Return how fast cells decode."""
    lines = []
    for what, figure in (("vanilla", over_vanilla), ("the best fixed number", over_best)):
        found = sorted((figure(cell), name(cell), cell["rows"][1].get("speedup_error", 1.0)) for cell in cells)
        num_slow = sum(round(value, 2) < LEAST for value, _, _ in found)
        num_sure = sum(value + error < LEAST for value, _, error in found)
        lowest = "; ".join(f"{value:.2f} ({words})" for value, words, _ in found[:LOWEST])
        middle = found[len(found) // 2][0]
        slow = f"under {LEAST} in {num_slow} of {len(found)}, in {num_sure} by more than the rounds' chance"
        lines.append(f"Over {what}: median {middle:.2f}; {slow}; lowest {lowest}.")
    resting, drafting = [cell for cell in cells if rests(cell)], [cell for cell in cells if not rests(cell)]
    paying = [cell for cell in drafting if best_fixed(cell)[0] >= PAYS]
    hardly = [cell for cell in drafting if best_fixed(cell)[0] < PAYS]
    for words, those, figure, of in (
        ("Where nothing is drafted in the last round", resting, over_vanilla, "vanilla"),
        (
            f"Where it drafts and the best fixed number gains less than {100 * (PAYS - 1):.0f} %",
            hardly,
            over_vanilla,
            "vanilla",
        ),
        ("Where it drafts and that gains more", paying, over_best, "the best fixed number"),
        ("The same", paying, over_vanilla, "vanilla"),
    ):
        if those:
            lines.append(f"{words} ({len(those)} cells): {spread([figure(cell) for cell in those])} of {of}.")
    seconds = [value for cell in cells if (value := second_vanilla(cell)) is not None]
    if seconds:
        lines.append(f"A second vanilla: {spread(seconds)} of the first.")
    identical = min(row["identical_frac"] for cell in cells for row in cell["rows"])
    return [*lines, f"Answers identical to vanilla's: {100 * identical:g} %."]


def first_answer(cell: Row) -> float:
    """Return the decode speed over vanilla's of the very first answer of a length."""
    return cell["rows"][1]["speedup_first"]


def spread(values: list[float]) -> str:
    """Return the least, the most and the median of them."""
    return f"{min(values):.2f} to {max(values):.2f}, {statistics.median(values):.2f} at the median,"


def name(cell: Row) -> str:
    """Return what a cell is called in a sentence."""
    padded = f", padded to {cell['pads']:g} drafts" if cell["pads"] else ""
    return f"`{cell['draft']}`, {cell['tokens']:,} tokens, batch {cell['batch']}{padded}"


def sections() -> dict[str, Callable[[], str]]:
    """Return what writes the sections, where there is a result."""
    if not recorded(NAME):
        return {}
    found = read(NAME)
    cells, of_one = pooled(found["cells"]), pooled(read(ONE_ENGINE)["cells"])
    return {
        "cells": lambda: table(cells),
        "cells-summary": lambda: summary(cells),
        "one-engine": lambda: table_of_one(of_one),
        "one-engine-summary": lambda: summary_of_one(of_one),
        "mixed": lambda: mixed_table(found["mixed"]["rows"]),
        "rest": lambda: tables.table(REST_HEAD, REST, read("rest")["rows"]),
    }
