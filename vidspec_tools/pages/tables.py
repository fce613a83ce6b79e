"""Markdown from rows: a table is a head and the template of a row; a page's sections are between its markers."""

import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec.tools.tables import Columns, percent

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"

Row = Mapping[str, Any]
Result = dict[str, Any]


class _Formatter(string.Formatter):
    """Formats figures of a row: None as a dash, `p` as a share of at most 100 %, `.1f%` as any percentage.

    `%` alone has one digit, and `n%` is its number without the sign.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return "-"
        if spec == "p":
            return percent(value)
        if spec.endswith("%"):
            number, digits = 100 * value, spec[:-1].replace("n", "") or ".1f"
            return f"{number:{digits}}" if spec == "n%" else f"{number:{digits}} %"
        return format(value, spec)


def fill(template: str, row: Row) -> str:
    return _Formatter().vformat(template, (), row)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], words: int | Collection[int] = 1) -> str:
    """Return a Markdown table; `words` says how many columns at the front, or which, are words and left-aligned."""
    left = range(words) if isinstance(words, int) else words
    rules = ["---" if column in left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *rows))


def table(head: str, line: str, rows: Iterable[Row], words: int | Collection[int] = 1) -> str:
    """Return the Markdown table of rows; `line` is the template of one, and " | " parts columns."""
    templates = line.split(" | ")
    cells = ([fill(template, row).replace("|", "\\|") for template in templates] for row in rows)
    return markdown(head.split(" | "), cells, words)


def shown(columns: Columns, rows: Iterable[Any], words: int | Collection[int] = 1) -> str:
    """Return the Markdown table of what a terminal shows, each head on one line."""
    cells = [[show(row) for show in columns.values()] for row in rows]
    return markdown([" ".join(head.split()) for head in columns], cells, words)


def counts(numbers: Mapping[str, Any], template: str = "{name} {count}") -> str:
    return ", ".join(template.format(name=name, count=count) for name, count in numbers.items())


def read(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text())


def figure(path: str, words: str) -> list[str]:
    """Return a picture beside a page, nothing where its file is not there."""
    return [f"![{words}](../results/{path})"] if (RESULTS / path).exists() else []


def recorded(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def origin(result: Result) -> str:
    """Return one line that says where a result comes from."""
    found = result["provenance"]
    commit = (found["git_sha"] or "no commit")[:10] + (" with local changes" if found["git_dirty"] else "")
    where = found["device"] if found["device"] != "cpu" else f"{found['cpu']}, {found['num_cpus']} cores"
    return f"{found['date'][:10]}, commit {commit}, vLLM {found['versions'].get('vllm')}, {where}."


def written(page: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its sections, between `<!-- NAME -->` and `<!-- /NAME -->`, made anew; other text stays."""

    def section(match: re.Match[str]) -> str:
        opening, name, old, closing = match.groups()
        if name not in sections:
            return match.group()
        return opening + sections[name]().strip() + (closing if old else "\n" + closing)

    return re.sub(r"(<!-- (\S+) -->\n+)(.*?)(\n*<!-- /\2 -->)", section, page, flags=re.DOTALL)
