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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import __main__ as builder
from benchmarks.pages.results import RESULTS, ROOT, read
from vllm_vidspec.tools.provenance import provenance

Row = dict[str, Any]

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


def record(path: Path, rows: list[Row]) -> None:
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
    cases: Sequence[Any],
    wanted: str,
    label: Callable[[Any], Row],
    judge: Callable[[Any, Any, str], tuple[Row, bool]],
) -> bool:
    """Run cases one after another, and record each as it is seen beside those of earlier runs.

    Those run whose names begin as `wanted` says, comma-separated, and what was never run. `label` is what tells a
    case's row from others. `judge` returns the rest of it, and whether that is as it should be, from what a case
    returned, or why it raised.
    """
    labels = [label(case) for case in cases]
    key = lambda row: tuple(row[name] for name in labels[0])  # noqa: E731
    rows = {key(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    good = True
    for case, own in zip(cases, labels, strict=True):
        if key(own) in rows and not case.name.startswith(tuple(wanted.split(","))):
            continue
        print(f"{case.name} ...", flush=True)
        seen, reason = None, ""
        with tempfile.TemporaryDirectory(prefix="vs") as folder:  # short: sockets lie in it
            try:
                seen = case.run(Path(folder))
            except Exception as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}".splitlines()[0].replace(folder, "…")
        found, is_right = judge(case, seen, reason)
        print(f"  {'' if is_right else 'NOT AS EXPECTED: '}{found}", flush=True)
        good &= is_right
        rows[key(own)] = own | found
        record(path, [rows[key(one)] for one in labels if key(one) in rows])
    return good


def run_restarts(path: Path, wanted: str) -> bool:
    """Kill and restart servers; return whether every case was as it should be."""
    from tests.serve.restarts import CASES

    def judge(case: Any, seen: str, reason: str) -> tuple[Row, bool]:
        return {"seen": reason[:600] or seen, "is_right": not reason}, not reason

    return run_rows(path, CASES, wanted, lambda case: {"case": case.name}, judge)


def run_coexistence(path: Path, wanted: str) -> bool:
    """Run vidspec beside vLLM's other features; return whether each verdict is the expected one."""
    from tests.engine.coexistence import ROWS, Seen

    def judge(case: Any, seen: Seen, reason: str) -> tuple[Row, bool]:
        seen = Seen("broken", reason[:200]) if reason else seen
        return seen._asdict(), seen.verdict == case.expected and re.search(case.says, seen.detail) is not None

    return run_rows(path, ROWS, wanted, lambda case: {"feature": case.feature, "setting": case.setting}, judge)


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
