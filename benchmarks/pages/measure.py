"""Measure again what the pages say.

    python -m benchmarks.pages.measure                         # every row of the notebook, by its own commands
    python -m benchmarks.pages.measure --only R1,R6            # these rows; R9 is R9-sage, too
    python -m benchmarks.pages.measure --only restarts         # needs root for full file systems
    python -m benchmarks.pages.measure --only faults           # ten minutes
    python -m benchmarks.pages.measure --only coexistence --rows LoRA,Ray   # root for the row of two nodes

A row's commands print its tables, and their results are kept as JSON in --out: the notebook keeps its dated ones. The
other three are recorded in docs/results and written on their pages. What is not as it should be is written as seen, and
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

from benchmarks.pages import __main__ as builder
from benchmarks.pages.results import RESULTS, ROOT, read
from vllm_vidspec.tools.provenance import provenance

# ---- rows of the notebook --------------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """Return the command lines of every row of the notebook: those below a heading such as R1 or R16-loose."""
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for part in re.split("^##+ ", re.sub(r"\s*\\\n\s+", " ", page.read_text()), flags=re.MULTILINE)[1:]:
            name, _, text = part.partition("\n")
            lines = re.findall(r"^    ((?:vidspec (?:bench|demo)|python)\b.*)$", text, re.MULTILINE)
            if lines and re.fullmatch(r"R\d[\w.-]*", name):
                found[name] = lines
    return found


def chosen(names: str, known: Iterable[str]) -> list[str]:
    """Return the results that comma-separated names mean: R9 is R9-sage, too."""
    wanted, known = names.split(","), list(known)
    if unknown := [name for name in wanted if name not in {*known, *(one.split("-")[0] for one in known)}]:
        raise SystemExit(f"no result is called {unknown[0]!r}; there are {', '.join(known)}")
    return [name for name in known if name in wanted or name.split("-")[0] in wanted]


def run_commands(name: str, lines: Iterable[str], out: Path) -> None:
    """Run a row's command lines; their results go to `out`, numbered where there are several."""
    out.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(lines, 1):
        program, *words = shlex.split(line)
        start = [sys.executable, *([] if program == "python" else ["-m", "vllm_vidspec.cli"])]
        if subprocess.run([*start, *words, "--json", str(out / f"{name}-{number}.json")], cwd=ROOT).returncode:
            raise SystemExit(f"failed: {line}")


# ---- cases that are recorded one by one ------------------------------------------------------------------------------


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
    """Run vidspec beside vLLM's other features; return whether each verdict is the expected one."""
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


# Name -> its record in docs/results, and what runs it.
RUNS: dict[str, tuple[str, Callable[[Path, str], bool]]] = {
    "restarts": ("reliability-restarts", run_restarts),
    "faults": ("reliability-faults", run_faults),
    "coexistence": ("coexistence", run_coexistence),
}


def main() -> int:
    lines = commands()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(lines), help="comma-separated names of rows and sections")
    parser.add_argument("--rows", default="", help="beginnings of rows of restarts and coexistence, comma-separated")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder for results of the notebook's rows")
    options = parser.parse_args()
    good = True
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in chosen(options.only, [*lines, *RUNS]):
        if name not in RUNS:
            run_commands(name, lines[name], options.out)
            continue
        import conftest  # noqa: F401  # the environment of engines

        result, run = RUNS[name]
        good &= run(RESULTS / f"{result}.json", options.rows)
        read.cache_clear()
        builder.write()
    return int(not good)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    status = main()
    sys.stdout.flush()
    os._exit(status)  # engines of this process may leave threads behind
