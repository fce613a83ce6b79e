"""Sections of docs/never-slower.md: the controller beside vanilla and fixed chains, a row a cell; mixed traffic."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.methods import CONTROLLER
from benchmarks.scaling import median_error
from vidspec_tools.pages import tables
from vidspec_tools.pages.tables import Row, markdown, read, recorded
from vllm_vidspec.tools.bench.trials import VANILLA

NAME, ONE_ENGINE = "never-slower", "one-engine"
CELL = ("tokens", "draft", "batch", "pads")  # what tells a cell from others
NUM_CELLS = 96
AGAIN = "vanilla again"  # a second vanilla engine: what two engines that do the same differ by
BOTH = "both vanillas"  # at the mean
LEAST = 0.97  # of vanilla, or of the best fixed number: what no cell should be under
LOWEST = 5  # cells that are named
PAYS = 1.05  # over vanilla: what the best fixed number gains at least where drafts are said to pay
LATER = 2.0, 0.03  # ms, or share of vanilla's: by how much a first token may be later where a class rests
HEAD = (
    "video tokens", "draft", "batch", "target padded to", "rounds", "best fixed over vanilla",
    "controller over vanilla", "controller over best fixed", "whole answers over vanilla", "whole over best fixed",
    "tokens per verify step", "a second vanilla over vanilla",
)  # fmt: skip
FIRST_HEAD = (*HEAD[:4], "first answer", "time to first token, cached", "cold")
SHORT_HEAD = ("answer's tokens", *HEAD[1:3], "rounds", "best fixed over vanilla", *HEAD[8:11])
REST_HEAD = "video tokens | requests | with our hooks | without | ratio"
REST = "{tokens:,} | {batch} | {with_ms:.3f} ms | {without_ms:.3f} ms | {ratio:.3f} ± {ratio_error:.3f}"
MIXED = {
    "good_beside_hopeless": "good beside hopeless",
    "good_beside_good": "good beside good",
    "sixteen_tokens_per_s": "tokens/s, 16 requests",
    "traffic_tokens_per_s": "tokens/s, 192 requests",
}


def pooled(cells: Iterable[Row]) -> list[Row]:
    """Return every cell once: figures of the first start, and all of its `starts`."""
    found: dict[tuple, Row] = {}
    for cell in cells:
        first = found.setdefault(tuple(cell[of] for of in CELL), {**cell, "starts": []})
        first["starts"].append(cell)
    return list(found.values())


def table(cells: Iterable[Row]) -> str:
    """Return the table of cells: how fast they decode."""
    return markdown(HEAD, map(line, cells), words=0)


def first_table(cells: Iterable[Row]) -> str:
    """Return the table of first answers and first tokens."""
    return markdown(FIRST_HEAD, map(first_line, cells), words=0)


def mixed_table(mixed: list[Row]) -> str:
    """Return the table of mixed traffic."""
    rows = [
        [padded(each), row["engine"], str(len(row["good_beside_good"])), *(with_error(row[of]) for of in MIXED)]
        for each in mixed
        for row in each["rows"]
    ]
    return markdown((HEAD[3], "engine", HEAD[4], *MIXED.values()), rows, words=2)


def short_table(cells: Iterable[Row]) -> str:
    """Return the table of short answers: how soon they are there, the first token included."""
    rows = []
    for cell in map(whole, cells):
        _, draft, batch, _, rounds, best, speed, of_best, _, _, steps, _ = line(cell)
        rows.append([str(cell["max_tokens"]), draft, batch, rounds, best, speed, of_best, steps])
    return markdown(SHORT_HEAD, rows, words=0)


def with_error(ratios: Sequence[float]) -> str:
    """Return the median of ratios, and its error."""
    return f"{statistics.median(ratios):.2f} ± {median_error(ratios):.2f}"


def padded(found: Row) -> str:
    """Return what the target is padded to."""
    return f"{found['pads']:g} drafts" if found["pads"] else "-"


def labels(cell: Row) -> list[str]:
    """Return what tells a cell from others, as a row begins."""
    return [f"{cell['tokens']:,}", cell["draft"], str(cell["batch"]), padded(cell)]


def line(cell: Row) -> list[str]:
    """Return a cell as a row of the table."""
    ours, best, found, answers = cell["rows"][1], best_fixed(cell), over_vanilla(cell), whole(cell)
    steps, num_starts = ours["verify_steps_last"], len(starts(cell))
    return [
        *labels(cell),
        str(len(found)) + (f" ({num_starts} starts)" if num_starts > 1 else ""),
        f"{statistics.median(over_vanilla(cell, best)):.2f} ({VANILLA if best == BOTH else best})",
        *map(with_error, (found, over_best(cell))),
        *(f"{statistics.median(each):.2f}" for each in (over_vanilla(answers), over_best(answers))),
        f"{1 + ours['accepted_last'] / steps:.2f}" if steps else "rests",
        f"{statistics.median(second_vanilla(cell)):.2f}",
    ]


def first_line(cell: Row) -> list[str]:
    """Return a cell as a row of the table of first answers."""
    vanilla, ours, *_ = cell["rows"]
    cached = f"{later_ms(cell):+.1f} of {vanilla['ttft_ms']:.0f} ms"
    cold = f"{ours['cold_ttft_ms'] - vanilla['cold_ttft_ms']:+.0f} of {vanilla['cold_ttft_ms']:.0f} ms"
    return [*labels(cell), f"{ours['speedup_first']:.2f}", cached, cold]


def starts(cell: Row) -> list[Row]:
    """Return what was measured of a cell, by start of the engine."""
    return cell.get("starts", [cell])


def whole(cell: Row) -> Row:
    """Return a cell whose times are those of whole answers: the median time to a first token, and decode."""

    def answers_ms(start: Row, row: Row) -> list[float]:
        return [row["ttft_ms"] + (start["max_tokens"] - 1) * ms for ms in row["tpot_ms"]]

    made = [
        {**start, "rows": [{**row, "tpot_ms": answers_ms(start, row)} for row in start["rows"]]}
        for start in starts(cell)
    ]
    return {**cell, "starts": made}


def speeds(cell: Row, engine: str, over: str) -> list[float]:
    """Return the decode speed of an engine over that of another in every round but a start's first; in that one where
    one of them was not asked again. All engines of a round are asked the same.
    """
    found = []
    for start in starts(cell):
        ms = {row["engine"]: row["tpot_ms"] for row in start["rows"]}
        ms[BOTH] = [statistics.mean(both) for both in zip(ms[VANILLA], ms[AGAIN], strict=True)]
        ratios = [its / own for its, own in zip(ms[over], ms[engine], strict=False)]
        found += ratios[1:] or ratios
    return found


def over_vanilla(cell: Row, engine: str = CONTROLLER) -> list[float]:
    """Return an engine's decode speed over vanilla's, by round."""
    return speeds(cell, engine, BOTH)


def over_best(cell: Row) -> list[float]:
    """Return the controller's over that of the best fixed number."""
    return speeds(cell, CONTROLLER, best_fixed(cell))


def second_vanilla(cell: Row) -> list[float]:
    """Return a second vanilla engine's over the first's."""
    return speeds(cell, AGAIN, VANILLA)


def best_fixed(cell: Row) -> str:
    """Return the fixed number of drafts that decodes fastest; `BOTH` for none."""
    chains = [row["engine"] for row in cell["rows"][2:] if row["engine"] != AGAIN]
    return max([BOTH, *chains], key=lambda engine: statistics.median(over_vanilla(cell, engine)))


def later_ms(cell: Row) -> float:
    """Return by how much the controller's first tokens are later than those of both vanilla engines, at the mean."""
    of_engine = {row["engine"]: row["ttft_more_ms"] for row in cell["rows"]}
    return of_engine[CONTROLLER] - of_engine[AGAIN] / 2


def rests(cell: Row) -> bool:
    """Return whether nothing was drafted in the last round."""
    return not cell["rows"][1]["verify_steps_last"]


def summary(cells: list[Row]) -> str:
    """Return how fast cells decode, and which are slower than they should be."""
    again_too = sum(len(cell["starts"]) > 1 for cell in cells)
    lines = [f"Measured are {len(cells)} of {NUM_CELLS} cells, {again_too} of them with several starts of the engine."]
    return bullets(*lines, *decode_lines(cells))


def first_summary(cells: list[Row], of_one: list[Row]) -> str:
    """Return how late first answers and first tokens are, given cells of engines and those of one engine."""
    resting = list(filter(rests, cells))
    firsts = spread([cell["rows"][1]["speedup_first"] for cell in resting])
    return bullets(
        f"Very first answers of a length, where nothing is drafted later ({len(resting)} cells): {firsts} of vanilla.",
        f"First tokens at rest (cached prompts), an engine each: {late(resting)}.",
        f"The same in one engine (the cells above): {late(list(filter(rests, of_one)))}.",
    )


def late(cells: list[Row]) -> str:
    """Return in how many cells first tokens are late, and by how much."""
    found = [cell for cell in cells if later_ms(cell) > max(LATER[0], LATER[1] * cell["rows"][0]["ttft_ms"])]
    within = f"within {LATER[0]:g} ms or {100 * LATER[1]:g} % in {len(cells) - len(found)} of {len(cells)} cells"
    others = [f"{later_ms(cell):+.1f} of {cell['rows'][0]['ttft_ms']:.0f} ms ({name(cell)})" for cell in found]
    return f"{within}; the others: {'; '.join(others) or 'none'}"


def bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)


def decode_lines(cells: list[Row]) -> list[str]:
    """Return how fast cells decode."""
    lines = []
    answers = list(map(whole, cells))
    for what, of, those in (
        ("Decode over vanilla", over_vanilla, cells),
        ("Decode over the best fixed number", over_best, cells),
        ("Whole answers over vanilla", over_vanilla, answers),
        ("Whole answers over the best fixed number of these", over_best, answers),
    ):
        found = sorted((statistics.median(of(cell)), name(cell), median_error(of(cell))) for cell in those)
        num_slow = sum(round(value, 2) < LEAST for value, _, _ in found)
        num_sure = sum(value + error < LEAST for value, _, error in found)
        lowest = "; ".join(f"{value:.2f} ± {error:.2f} ({words})" for value, words, error in found[:LOWEST])
        slow = f"under {LEAST} in {num_slow} of {len(found)}, in {num_sure} by more than the rounds' chance"
        lines.append(f"{what}: median {found[len(found) // 2][0]:.2f}; {slow}; lowest {lowest}.")
    resting, paying, hardly = list(filter(rests, cells)), list[Row](), list[Row]()
    for cell in cells:
        if not rests(cell):
            gains = statistics.median(over_vanilla(cell, best_fixed(cell))) >= PAYS
            (paying if gains else hardly).append(cell)
    for words, those, of, what in (
        ("Where nothing is drafted in the last round", resting, over_vanilla, VANILLA),
        (f"Where it drafts and the best fixed number gains less than {PAYS - 1:.0%}", hardly, over_vanilla, VANILLA),
        ("Where it drafts and that gains more", paying, over_best, "the best fixed number"),
        ("The same", paying, over_vanilla, VANILLA),
    ):
        if those:
            medians = spread([statistics.median(of(cell)) for cell in those])
            lines.append(f"{words} ({len(those)} cells): {medians} of {what}.")
    seconds = spread([statistics.median(second_vanilla(cell)) for cell in cells])
    identical = min(row["identical_frac"] for cell in cells for start in starts(cell) for row in start["rows"])
    lines.append(f"A second vanilla: {seconds} of the first.")
    return [*lines, f"Answers identical to vanilla's: {100 * identical:g} %."]


def spread(values: list[float]) -> str:
    """Return the least, the most and the median of them."""
    return f"{min(values):.2f} to {max(values):.2f}, {statistics.median(values):.2f} at the median,"


def name(cell: Row) -> str:
    """Return what a cell is called in a sentence."""
    to = f", padded to {padded(cell)}" if cell["pads"] else ""
    return f"`{cell['draft']}`, {cell['tokens']:,} tokens, batch {cell['batch']}{to}"


def sections() -> dict[str, Callable[[], str]]:
    """Return what writes the sections, where there is a result."""
    if not recorded(NAME):
        return {}
    found = read(NAME)
    cells, of_starts = pooled(read(ONE_ENGINE)["cells"]), pooled(found["cells"])
    return {
        "cells": lambda: table(cells),
        "cells-summary": lambda: summary(cells),
        "first": lambda: first_table(of_starts),
        "first-summary": lambda: first_summary(of_starts, cells),
        "short": lambda: short_table(read(ONE_ENGINE)["short"]),
        "mixed": lambda: mixed_table(read(ONE_ENGINE)["mixed"]),
        "rest": lambda: tables.table(REST_HEAD, REST, read("rest")["rows"]),
    }
