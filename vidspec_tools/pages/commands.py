"""Results that commands measure: which a page shows in front of a result's section, and what comes of several."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vidspec_tools.pages.tables import DOCS, RESULTS, ROOT, Result
from vidspec_tools.views import acceptance, quality

PAGES = (RESULTS / "README.md", DOCS / "paper-tables.md")
# Results that have a figure drawn from all their commands.
FIGURES: dict[str, Callable[[Any, str], None]] = {"R9": acceptance.draw, "R12": quality.draw, "R16-loose": quality.draw}


def commands_by_name() -> dict[str, list[str]]:
    """Return the command lines of every result, as a page shows them: in front of its marker, behind the last one."""
    found = {}
    for page in PAGES:
        for part in re.split("<!-- /.* -->", re.sub(r"\s*\\\n\s+", " ", page.read_text())):
            text, marker, rest = part.partition("<!-- ")
            if marker and (lines := re.findall("^    (?:vidspec|python) (.*)$", text, re.MULTILINE)):
                found[rest.split()[0]] = lines
    return found


def chosen(names: str, known: Iterable[str]) -> list[str]:
    """Return the results that comma-separated names mean: R9 is R9-sage, too."""
    wanted, known = names.split(","), list(known)
    if unknown := [name for name in wanted if name not in {*known, *(one.split("-")[0] for one in known)}]:
        raise SystemExit(f"no result is called {unknown[0]!r}; there are {', '.join(known)}")
    return [name for name in known if name in wanted or name.split("-")[0] in wanted]


def run(command: str) -> Result:
    """Run what follows `vidspec`, or a script of this repository, and return its result."""
    program = [] if command.startswith("benchmarks/") else ["-m", "vllm_vidspec.cli"]
    with tempfile.TemporaryDirectory(prefix="vidspec-results-") as folder:
        path = Path(folder, "result.json")
        words = [*shlex.split(command), "--json", str(path)]
        if subprocess.run([sys.executable, *program, *words], cwd=ROOT).returncode != 0:
            raise SystemExit(f"failed: {command}")
        result = json.loads(path.read_text().replace(f"{ROOT}/", "").replace(f"{folder}/", ""))
    result.pop("log_dir", None)  # of this machine only
    return result


def merge(parts: list[Result]) -> Result:
    first = parts[0]
    if len(parts) == 1:
        return first
    origin = first["provenance"] | {"argv": [part["provenance"]["argv"] for part in parts]}
    rows, failures = ([row for part in parts for row in part.get(name, [])] for name in ("rows", "failures"))
    families = list(dict.fromkeys(row["family"] for row in rows))
    if "retention" in rows[0]:
        # Every command measures the target, the draft and strict for itself: once is enough.
        rows = list({quality.setting_key(row): row for row in reversed(rows)}.values())[::-1]
    rows.sort(key=lambda row: families.index(row["family"]))
    return {"rows": rows, "failures": failures, "provenance": origin}


def write(path: Path, result: Result) -> None:
    """Write a result as JSON, and beside it its figure where it has one."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    if path.stem in FIGURES:
        FIGURES[path.stem](result["rows"], str(path.with_suffix(".png")))
