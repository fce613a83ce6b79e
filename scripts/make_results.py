"""Run the commands that docs/results/README.md and docs/paper-tables.md show, and write their tables there.

    python scripts/make_results.py                 # what has no JSON file in docs/results yet
    python scripts/make_results.py --only R1,R6 --force

The commands stand in front of a result's marker, its tables between `<!-- NAME -->` and `<!-- /NAME -->`; the JSON
files hold every row with its provenance. What takes several commands is one file; R9 also stands for R9-sage, R12 for
R12-relevance, `paper` for all whose names begin so. `<!-- summary -->` is what they come to, `<!-- figure -->` its
first lines, in README.md, where `<!-- wall-clock -->` has three rows of a paper table.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import paper_tables
import result_tables as tables

from vidspec_tools import plots, race_views
from vidspec_tools import quality_views as views
from vidspec_tools.bench.acceptance import UNPRUNED

ROOT, FOLDER = Path(__file__).resolve().parents[1], tables.FOLDER
PAGE = FOLDER / "README.md"
PAPER_PAGE = ROOT / "docs" / "paper-tables.md"


def main() -> int:
    """Run, render, write."""
    commands = commands_by_name()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(commands), help="comma-separated names")
    parser.add_argument("--force", action="store_true", help="run again what has a JSON file")
    options = parser.parse_args()
    for name in chosen(options.only, commands):
        path = FOLDER / f"{name}.json"
        if options.force or not path.exists():
            parts = []
            for command in commands[name]:
                print(f"{name}: {command}", flush=True)
                parts.append(run(command))
            write(path, merge(parts))
    results = {name: read(path) for name in commands if (path := FOLDER / f"{name}.json").exists()}
    for page in (PAGE, PAPER_PAGE, ROOT / "README.md"):
        page.write_text(filled(page.read_text(), results))
    return 0


def commands_by_name() -> dict[str, list[str]]:
    """Return the command lines of every result, as a page shows them: in front of its marker, behind the last one."""
    found = {}
    for page in (PAGE, PAPER_PAGE):
        for part in re.split("<!-- /.* -->", re.sub(r"\s*\\\n\s+", " ", page.read_text())):
            text, marker, rest = part.partition("<!-- ")
            if marker and (lines := re.findall("^    (?:vidspec|python) (.*)$", text, re.MULTILINE)):
                found[rest.split()[0]] = lines
    return found


def chosen(names: str, known: Iterable[str]) -> list[str]:
    """Return the results that comma-separated names stand for: R9 is R9-sage, too."""
    wanted, known = names.split(","), list(known)
    if unknown := [name for name in wanted if name not in {*known, *(one.split("-")[0] for one in known)}]:
        raise SystemExit(f"no result is called {unknown[0]!r}; there are {', '.join(known)}")
    return [name for name in known if name in wanted or name.split("-")[0] in wanted]


def run(command: str) -> dict[str, Any]:
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


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result of several: their rows or, of calibrations, these by target; the command lines of all."""
    first = parts[0]
    if len(parts) == 1:
        return first
    origin = first["provenance"] | {"argv": [part["provenance"]["argv"] for part in parts]}
    if "costs" in first:
        return {"calibrations": {part["target"].split("/")[0]: part for part in parts}, "provenance": origin}
    lists = {name: [row for part in parts for row in part.get(name, [])] for name in ("rows", "failures")}
    families = list(dict.fromkeys(row["family"] for row in lists["rows"]))
    if "retention" in lists["rows"][0]:
        # Every command measures the target, the draft and strict for itself: once is enough.
        by_setting = {views.setting_key(row): row for row in reversed(lists["rows"])}
        lists["rows"] = [row for row in lists["rows"] if by_setting[views.setting_key(row)] is row]
    lists["rows"].sort(key=lambda row: families.index(row["family"]))
    return {**lists, "provenance": origin}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, and beside it what else there is of it: its rows as CSV, its figure."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    csv_path, figure_path = (str(path.with_name(f"{path.stem}{suffix}")) for suffix in (".csv", ".png"))
    if drawn := paper_tables.views_of(path.stem):
        drawn.write_csv(csv_path, result)
        drawn.draw(result["rows"], figure_path)
    if path.stem in tables.QUALITY:
        views.write_csv(csv_path, result)
        views.draw(result["rows"], figure_path)
    if path.stem == "R14-parallel":
        race_views.write_csv(csv_path, result)
        race_views.draw(result["rows"], figure_path)
    if path.stem in tables.BY_SHAPE:
        plots.write_csv(csv_path, result)
    if path.stem == "R9":
        plots.draw(result["rows"], figure_path)


def read(path: Path) -> dict[str, Any]:
    """Return a result; rows of a file from before `measured_as` had an engine each."""
    result = json.loads(path.read_text())
    for row in result.get("rows", []):
        if row.keys() >= set(UNPRUNED):
            row.setdefault("measured_as", {name: row[name] for name in UNPRUNED})
    return result


def filled(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return a page with what there are results for between its markers."""

    def body(match: re.Match[str]) -> str:
        opening, name, old, closing = match.groups()
        if name in ("figure", "summary") and results.keys() >= tables.AXES.keys():
            which = (tables.CLAIM, "docs/results/README.md") if name == "figure" else ()
            return opening + tables.figure(results, *which) + closing
        if name == "wall-clock" and paper_tables.WALL_CLOCK in results:
            return opening + paper_tables.wall_clock(results[paper_tables.WALL_CLOCK]) + closing
        body_of = paper_tables.body_of if paper_tables.views_of(name) else tables.body_of
        return opening + (body_of(name, results[name]) if name in results else old) + closing

    return re.sub(r"(<!-- (\S+) -->\n)(.*?)(<!-- /\2 -->)", body, page, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
