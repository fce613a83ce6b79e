"""Measure what the pages of docs/ say, keep it as JSON in docs/results, and write the pages from it.

    python -m vidspec_tools.pages.measure                         # commands of pages that have no JSON file yet
    python -m vidspec_tools.pages.measure --only R1,R6 --force    # these again; R9 is R9-sage, too, `paper` all papers
    python -m vidspec_tools.pages.measure --only restarts         # needs root for full file systems
    python -m vidspec_tools.pages.measure --only faults           # ten minutes
    python -m vidspec_tools.pages.measure --only coexistence --rows LoRA,Ray   # root for the row of two nodes

The commands are those in front of a result's marker on its page. What is not as it should be is written as seen, and
the command fails.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vidspec_tools.pages import __main__ as builder
from vidspec_tools.pages.reliability import RECORDS
from vidspec_tools.pages.tables import DOCS, RESULTS, ROOT, Result
from vidspec_tools.views import acceptance, quality, versus
from vllm_vidspec.tools.provenance import provenance

# ---- commands of pages -----------------------------------------------------------------------------------------------

PAGES = (RESULTS / "README.md", DOCS / "paper-tables.md")
# Results that have a figure drawn from all their commands.
FIGURES: dict[str, Callable[[Any, str], None]] = {
    **dict.fromkeys(("R3", "R9"), acceptance.draw),
    **dict.fromkeys(("R12", "R16-loose"), quality.draw),
    "R14-parallel": versus.draw,
}


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


def run_command(command: str) -> Result:
    """Run what follows `vidspec`, or `python`, and return its result."""
    program = [] if command.startswith(("-m ", "benchmarks/")) else ["-m", "vllm_vidspec.cli"]
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


# ---- other records ---------------------------------------------------------------------------------------------------


def record(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with where they come from; they name no folder of this machine."""
    text = json.dumps({"rows": rows, "provenance": provenance()}, indent=1).replace(f"{ROOT}/", "")
    path.write_text(text + "\n")


def run_faults(path: Path, wanted: str) -> bool:
    """Let everything on the draft's side fail once; return whether all answers were right and all was counted."""
    command = [sys.executable, "-m", "tests.engine.faults"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    rows = json.loads(line.removeprefix("RESULT "))
    record(path, rows)
    return all(row["fine"] for row in rows)


def run_rows(
    path: Path,
    cases: Iterable[Any],
    wanted: str,
    key: Callable[[Any], Any],
    run: Callable[[Any, Path], tuple[dict, bool]],
) -> bool:
    """Run cases one after another, and record each as it is seen beside those of earlier runs.

    Those run whose names begin as `wanted` says, comma-separated, and what was never run. `key` tells a case or a
    recorded row from the others; `run` runs a case in a folder and returns its row, and whether it is as it should be.
    """
    rows = {key(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    good = True
    for case in cases:
        if key(case) in rows and not case.name.startswith(tuple(wanted.split(","))):
            continue
        print(f"{case.name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="vs") as folder:  # short: sockets lie in it
            row, is_right = run(case, Path(folder))
        print(f"  {'' if is_right else 'NOT AS EXPECTED: '}{row}", flush=True)
        good &= is_right
        rows[key(case)] = row
        record(path, [rows[key(one)] for one in cases if key(one) in rows])
    return good


def _reason(error: Exception, folder: Path, limit: int) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}".splitlines()[0].replace(str(folder), "…")[:limit]


def run_restarts(path: Path, wanted: str) -> bool:
    """Kill and restart servers; return whether every case was as it should be."""
    from tests.serve import restarts

    def run(case: Any, folder: Path) -> tuple[dict, bool]:
        try:
            seen, is_right = case.run(folder), True
        except Exception as error:
            seen, is_right = _reason(error, folder, 600), False
        return {"case": case.name, "seen": seen, "is_right": is_right}, is_right

    key = lambda case: case["case"] if isinstance(case, dict) else case.name  # noqa: E731
    return run_rows(path, restarts.CASES, wanted, key, run)


def run_coexistence(path: Path, wanted: str) -> bool:
    from tests.engine import coexistence

    def run(row: Any, folder: Path) -> tuple[dict, bool]:
        try:
            seen = row.run(folder)
        except Exception as error:
            seen = coexistence.Seen("broken", _reason(error, folder, 200))
        is_right = seen.verdict == row.expected and re.search(row.says, seen.detail) is not None
        return {"feature": row.feature, "setting": row.setting, **seen._asdict()}, is_right

    def key(row: Any) -> tuple[str, str]:
        return (row["feature"], row["setting"]) if isinstance(row, dict) else (row.feature, row.setting)

    return run_rows(path, coexistence.ROWS, wanted, key, run)


RUNS = {"restarts": run_restarts, "faults": run_faults, "coexistence": run_coexistence}


def main() -> int:
    lines = commands_by_name()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(lines), help="comma-separated names of results and sections")
    parser.add_argument("--force", action="store_true", help="run commands again that have a JSON file")
    parser.add_argument("--rows", default="", help="beginnings of rows of restarts and coexistence, comma-separated")
    options = parser.parse_args()
    good = True
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in chosen(options.only, [*lines, *RUNS]):
        path = RESULTS / f"{name}.json"
        if name in RUNS:
            import conftest  # noqa: F401  # the environment of engines

            good &= RUNS[name](RESULTS / f"{RECORDS[name][0]}.json", options.rows)
        elif options.force or not path.exists():
            write(path, merge([run_command(line) for line in lines[name]]))
    sys.argv[1:] = []
    builder.main()
    return int(not good)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    status = main()
    sys.stdout.flush()
    os._exit(status)  # engines of this process may leave threads behind
