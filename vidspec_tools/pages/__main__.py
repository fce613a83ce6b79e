"""Write the generated sections of README.md and docs/ from docs/results; `--check` only names the pages that differ."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from vidspec_tools.pages import configuration, long_videos, never_slower, pruners, reliability, results
from vidspec_tools.pages.tables import DOCS, ROOT, written


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page that has generated text, and what it should hold."""
    sections: dict[str, Callable[[], str]] = {}
    for module in (results, reliability, long_videos, pruners, never_slower):
        sections |= module.sections()
    for path in (ROOT / "README.md", DOCS / "coexistence.md", *sorted((DOCS / "notebook").glob("*.md"))):
        yield path, written(path.read_text(), sections)
    yield DOCS / "configuration.md", configuration.render()


def main() -> int:
    """Write the pages; with --check return 1 if one of them differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [(path, text) for path, text in pages() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} {'is not what its results say' if check else 'written'}")
        if not check:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
