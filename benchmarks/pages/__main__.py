"""Write what is generated in README.md and docs/: tables of recorded results, plans, the configuration's keys.

    python -m benchmarks.pages             # write
    python -m benchmarks.pages --check     # only name the pages that differ

What is generated stands between `<!-- NAME -->` and `<!-- /NAME -->`, on whichever page. SECTIONS says what each name
is; all other text stays as it is.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.pages import configuration, plans, results
from benchmarks.pages.results import ROOT

SECTIONS = results.SECTIONS | configuration.SECTIONS | plans.SECTIONS


def written(page: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its sections made anew; a marker may stand in a line or on one of its own."""

    def section(match: re.Match[str]) -> str:
        opening, name, old, closing = match.groups()
        if name not in sections:
            return match.group()
        return opening + sections[name]().strip() + (closing if old or "\n" not in opening else "\n" + closing)

    return re.sub(r"(<!-- (\S+) -->\n*)(.*?)(\n*<!-- /\2 -->)", section, page, flags=re.DOTALL)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page of README.md and docs/, and what it should hold."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, written(path.read_text(), SECTIONS)


def write(check: bool = False) -> bool:
    """Write the pages that differ, or with `check` only name them; return whether some did."""
    stale = [(path, text) for path, text in pages() if path.read_text() != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} {'is not what its results say' if check else 'written'}")
        if not check:
            path.write_text(text)
    return bool(stale)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page differs")
    check = parser.parse_args().check
    sys.exit(int(write(check) and check))
