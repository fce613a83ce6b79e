"""One table layer: a result's rows by columns, in a terminal or in Markdown; no engine."""

import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

Row = Mapping[str, Any]
# Head -> how a row is shown: a template of its fields (see `fill`), or a function of the row.
Columns = Mapping[str, str | Callable[[Any], str]]


def number(value: float | None, digits: int) -> str:
    """Return a number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share as a percentage, or a dash for None; 100 % only where it is exactly 1."""
    if share is None:
        return "-"
    return f"{min(99.9, 100 * share):.1f} %" if share < 1 else "100 %"


# Formats beside Python's own.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "p": percent,
    "x": lambda ratio: f"{ratio:.2f}x",
    "ms": lambda seconds: f"{1000 * seconds:.1f} ms",
    "KiB": lambda size: f"{size / 2**10:.0f} KiB" if size < 2**20 else f"{size / 2**20:.1f} MiB",
    "MiB": lambda size: f"{size / 2**20:.1f} MiB",
    "GB": lambda size: f"{size / 1e9:.1f}",
    "n%": lambda share: f"{100 * share:.1f}".removesuffix(".0"),
}


class _Formatter(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return "-"
        if spec in _FORMATS:
            return _FORMATS[spec](value)
        if spec.endswith("%"):
            return f"{100 * value:{spec[:-1] or '.1f'}} %"
        return format(value, spec)


def fill(template: str, row: Row) -> str:
    """Return a template with the fields of a row.

    None is a dash in every format. `p` is a share in percent, 100 only where it is exactly 1; `.1f%` any percentage,
    `n%` one without the sign; `x` a ratio; `ms` seconds in ms; `KiB`, `MiB` and `GB` sizes in bytes.
    """
    return _Formatter().vformat(template, (), row)


def cells(columns: Columns, rows: Iterable[Any]) -> list[list[str]]:
    return [[fill(show, row) if isinstance(show, str) else show(row) for show in columns.values()] for row in rows]


def by_columns(
    columns: Columns,
    rows: Iterable[Any],
    num_words: int = 1,
    style: Callable[[Any], str | None] = lambda row: None,
    **options: Any,
) -> Table:
    """Return a terminal's table of rows; the first `num_words` columns are left-aligned, `style` is a row's."""
    rows = list(rows)
    table = Table(**{"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), **options})
    for index, head in enumerate(columns):
        table.add_column(head, justify="left" if index < num_words else "right", no_wrap=True)
    for row, texts in zip(rows, cells(columns, rows), strict=True):
        table.add_row(*map(escape, texts), style=style(row))
    return table


def folding(table: Table, first: int = 0) -> Table:
    """Let the cells of a table's columns from the `first` on continue on the next line."""
    for column in table.columns[first:]:
        column.no_wrap, column.overflow = False, "fold"
    return table


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], words: int | Collection[int] = 1) -> str:
    """Return a Markdown table; `words` says how many columns at the front, or which, are left-aligned."""
    left = range(words) if isinstance(words, int) else words
    rules = ["---" if column in left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))


def by(rows: Iterable[Any], *names: str) -> dict[tuple[Any, ...], list[Any]]:
    """Return rows by the values of these fields, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found
