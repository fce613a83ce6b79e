"""Results that commands measure: which a page shows in front of a result's section, and what comes of several."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from vidspec_tools.pages.tables import DOCS, RESULTS, ROOT, Result
from vidspec_tools.views import csv_file
from vidspec_tools.views.__main__ import view_of
from vidspec_tools.views.quality import setting_key

PAGES = (RESULTS / "README.md", DOCS / "paper-tables.md")
# Results that have a CSV file of their rows beside them; those that have a figure drawn from all their commands.
WITH_CSV = ("R9", "R9-sage", "R12", "R14-parallel", "R16", "R16-qwen3-vl", "R16-loose", "R17-shapes")
WITH_FIGURE = ("R9", "R12", "R14-parallel", "R16-loose")


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
        # A calibration's result is the file that it writes.
        words = [*shlex.split(command), "--out" if command.startswith("calibrate") else "--json", str(path)]
        if subprocess.run([sys.executable, *program, *words], cwd=ROOT).returncode != 0:
            raise SystemExit(f"failed: {command}")
        result = json.loads(path.read_text().replace(f"{ROOT}/", "").replace(f"{folder}/", ""))
    result.pop("log_dir", None)  # of this machine only
    return result


def merge(parts: list[Result]) -> Result:
    """Return one result of several: their rows; the command lines of all."""
    first = parts[0]
    if len(parts) == 1:
        return first
    origin = first["provenance"] | {"argv": [part["provenance"]["argv"] for part in parts]}
    lists = {name: [row for part in parts for row in part.get(name, [])] for name in ("rows", "failures")}
    families = list(dict.fromkeys(row["family"] for row in lists["rows"]))
    if "retention" in lists["rows"][0]:
        # Every command measures the target, the draft and strict for itself: once is enough.
        by_setting = {setting_key(row): row for row in reversed(lists["rows"])}
        lists["rows"] = [row for row in lists["rows"] if by_setting[setting_key(row)] is row]
    lists["rows"].sort(key=lambda row: families.index(row["family"]))
    return {**lists, "provenance": origin}


def write(path: Path, result: Result) -> None:
    """Write a result as JSON, and beside it what else there is of it: its rows as CSV, its figure."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    of_papers = path.stem.startswith(("paper-", "speed-", "scaling-"))
    if path.stem in WITH_CSV or of_papers:
        csv_file.write(str(path.with_suffix(".csv")), result)
    if path.stem in WITH_FIGURE or of_papers:
        view_of(result["rows"][0]).draw(result["rows"], str(path.with_suffix(".png")))
