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
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vidspec_tools.pages import __main__ as builder
from vidspec_tools.pages import commands
from vidspec_tools.pages.reliability import RECORDS
from vidspec_tools.pages.tables import RESULTS, ROOT
from vllm_vidspec.tools.provenance import provenance


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
    lines = commands.commands_by_name()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(lines), help="comma-separated names of results and sections")
    parser.add_argument("--force", action="store_true", help="run commands again that have a JSON file")
    parser.add_argument("--rows", default="", help="beginnings of rows of restarts and coexistence, comma-separated")
    options = parser.parse_args()
    good = True
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in commands.chosen(options.only, [*lines, *RUNS]):
        path = RESULTS / f"{name}.json"
        if name in RUNS:
            import conftest  # noqa: F401  # the environment of engines

            good &= RUNS[name](RESULTS / f"{RECORDS[name][0]}.json", options.rows)
        elif options.force or not path.exists():
            commands.write(path, commands.merge([commands.run(line) for line in lines[name]]))
    sys.argv[1:] = []
    builder.main()
    return int(not good)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    status = main()
    sys.stdout.flush()
    os._exit(status)  # engines of this process may leave threads behind
