"""How the papers' methods and lossy verification show their rows: tables, and a plot of what is kept; no engine."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.captions import GROUPS
from benchmarks.quality import DRAFT, LOSSY, STRICT, knob, line_name, setting_name
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.bench.speed import PARALLEL
from vllm_vidspec.tools.bench.views import SPEEDUP, rounds_words
from vllm_vidspec.tools.tables import Columns, by, by_columns, fill

Row = dict[str, Any]
Rows = Sequence[Row]

# ---- the papers' methods ---------------------------------------------------------------------------------------------

_PAPER: Columns = {
    "method": "{method}",
    "K": "{num_speculative_tokens:.0f}",
    "accept\nlength": "{acceptance_length:.2f}",
    "forwards": "{forwards:.1f}",
    "tokens\nper s": "{tokens_per_s:.1f}",
    **SPEEDUP,
    "same\noutput": "{identical_frac:p}",
    "published\nlength": lambda row: _published_length(row),
    "published\nspeedup": "{published_speedup:x}",
}


def _published_length(row: Row) -> str:
    """Return tokens of a step; of a parallel drafter the paper's M, which is none: marked."""
    is_m = row["mode"] == PARALLEL and row["published_tau"] is not None
    return fill("M {published_tau:.2f}" if is_m else "{published_acceptance_length:.2f}", row)


def paper_tables(rows: Rows) -> Iterator[Table]:
    lengths = "lengths with the target's own token; M: from one rejection to the next"
    for group in by(rows, "family", "inflate").values():
        caption = f"{rounds_words(group[0])}; published on VideoDetailCaption, {lengths}"
        yield by_columns(_PAPER, group, title=f"{group[0]['family']}: one request at a time", caption=caption)


# ---- lossy verification ----------------------------------------------------------------------------------------------

FLOOR = 0.98  # of the target's accuracy: what counts as kept


def panels(rows: Rows) -> dict[str, list[Row]]:
    """Return the rows of each family and temperature that have drafts; at temperature 0 noise makes no difference."""
    found = {}
    for (family, temperature), ours in by(rows, "family", "temperature").items():
        if noises := [row["draft_noise"] for row in ours if row["draft_noise"] is not None]:
            found[f"{family}, temperature {temperature:g}" + (f", {noises[0]} noise" if temperature else "")] = ours
    return found


def longest_kept(rows: Rows) -> dict[str, Row | None]:
    """Return, for each lossy scorer of a panel, the row of the longest acceptance that keeps enough, or None."""
    return {
        scorer: max(filter(_is_kept, ours), key=lambda row: row["acceptance_length"], default=None)
        for (scorer,), ours in by(rows, "method").items()
        if scorer in LOSSY
    }


def _is_kept(row: Row) -> bool:
    return row["method"] in LOSSY and row["retention"] is not None and row["retention"] >= FLOOR


def longest_words(rows: Rows) -> str:
    """Return what `longest_kept` found as a sentence."""
    line = (
        "{name} with {acceptance_length:.2f} tokens per step ({ratio_to_strict:.2f} of strict's, {retention:.1f%} kept)"
    )
    parts = [
        f"{scorer} nowhere" if row is None else fill(line, row | {"name": setting_name(row)})
        for scorer, row in longest_kept(rows).items()
    ]
    return f"At least {100 * FLOOR:g} % kept: {'; '.join(parts) or 'nothing was loosened'}."


# Everything but lengths, ratios and the AUC in percent.
_QUALITY: Columns = {
    "": setting_name,
    "accept\nlength": "{acceptance_length:.2f}",
    "of\nstrict": "{ratio_to_strict:.2f}",
    "kept": "{retention:n%}",
    **{group: f"{{group[{group}]:n%}}" for group in GROUPS},
    "not\nexact": lambda row: fill(
        "{share:n%}", {"share": None if row["exact_frac"] is None else 1 - row["exact_frac"]}
    ),
    "same": "{identical_frac:n%}",
    "AUC": "{relevance_auc:.2f}",
}


def quality_tables(rows: Rows) -> Iterator[Table]:
    for title, ours in panels(rows).items():
        caption = f"{ours[0]['requests']} captions, K {ours[0]['num_speculative_tokens']}, in %. {longest_words(ours)}"
        style = lambda row: "green" if _is_kept(row) else None  # noqa: E731
        yield by_columns(_QUALITY, ours, style=style, title=title, caption=caption, padding=0)


def draw_quality(rows: Rows, path: str) -> None:
    """Draw what is kept over acceptance length: a panel per family (down) and temperature (across).

    A line joins what a scorer gives over its lambda or threshold; the star is strict.
    """
    from vllm_vidspec.tools.plots import draw

    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    stars, levels = {}, {}
    for title, ours in panels(rows).items():
        measured = [row for row in ours if row["retention"] is not None]
        scorers = by([row | {"line": line_name(row)} for row in measured if row["method"] in LOSSY], "line")
        lines[title] = {
            name: [_point(row) for row in sorted(found, key=lambda row: knob(row) or 0.0)]
            for (name,), found in scorers.items()
        }
        stars[title] = [_point(row) for row in measured if row["method"] == STRICT]
        levels[title] = {f"{100 * FLOOR:g} % of the target alone": 100 * FLOOR}
        if alone := [100 * row["retention"] for row in measured if row["method"] == DRAFT]:
            levels[title]["the draft alone"] = alone[0]
    if not lines:
        raise VidSpecError(f"cannot draw {path}: no row has drafts")
    across = len({row["temperature"] for row in rows})
    x_name, y_name = "acceptance length (tokens per verify step; star: strict)", "attributes right (% of the target's)"
    draw(path, lines, x_name, y_name, across=across, stars=stars, levels=levels)


def _point(row: Row) -> tuple[float, float]:
    return row["acceptance_length"], 100 * row["retention"]
