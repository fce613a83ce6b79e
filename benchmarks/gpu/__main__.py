"""The GPU runner: checks, kernels beside their floors and peers, and engines of real shapes.

    python -m benchmarks.gpu --smoke          # the checks alone, 26 minutes at most
    python -m benchmarks.gpu                  # kernels and engines, 25 minutes at most
    python -m benchmarks.gpu --half 2         # engines only; kernels are half 1
    python -m benchmarks.gpu --decode         # what decides how fast drafts decode, 14 minutes at most

Each step is a process of its own with its own time-out. A step that fails, crashes or hangs is recorded with its
reason, and the next one runs. The JSON is written after each step. Run it in the clone; needs a Python with torch and
pydantic; without vLLM only the kernels are measured. The repository need not be installed.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import plan
from benchmarks.gpu.plan import PLAN, SECONDS, Step
from benchmarks.gpu.steps import ENVIRONMENT, ROOT

WORKER = ("-c", "from benchmarks.gpu import steps; steps.main()")
OUTCOMES = ("passed", "failed", "unchecked", "skipped")
GRACE_S = 5.0  # for a killed step to end
TRACE_S = 2.0  # for a hanging step to write its stacks
DRY_RUN = "a dry run on a device that computes nothing: its numbers mean nothing"
Record = dict[str, Any]


def run_process(command: Sequence[str], log: Path, timeout_s: float) -> str:
    """Run a command in a group that is killed after `timeout_s`; return "" for status 0, else how it ended."""
    path = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = ENVIRONMENT | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        try:
            status = process.wait(timeout_s)
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            ended = f"crashed ({how}); its last line: {_last_line(log)}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"timed out after {timeout_s:.0f} s; its last line: {_last_line(log)}"
            process.send_signal(signal.SIGUSR1)  # faulthandler writes all stacks to the log
            time.sleep(TRACE_S)
        finally:  # engines start processes of their own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: the next step will report it
                process.wait(GRACE_S)
    return ended


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-1].split())[:200] if lines else "none"


def read_lines(path: Path) -> list[Record]:
    """Return the lines that a step's process has written; its last may be cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def run_step(step: Step, args: argparse.Namespace, work_dir: Path, timeout_s: float) -> Record:
    """Run a step in a process of its own; return its outcome, and the rows that it has written."""
    log, lines, start = work_dir / f"{step.name}.log", work_dir / f"{step.name}.jsonl", time.monotonic()
    lines.unlink(missing_ok=True)
    context = {"work_dir": str(work_dir), "dry_run": args.dry_run, "models": args.models}
    ended = run_process([sys.executable, *WORKER, step.name, str(lines), json.dumps(context)], log, timeout_s)
    written = read_lines(lines)
    found = {"outcome": "failed", "reason": ended or "ended without a verdict", "facts": {}}
    if end := next((line for line in written if line.get("outcome") in OUTCOMES), None):
        found = {name: end[name] for name in found}
        if ended and found["outcome"] != "failed":
            found |= {"outcome": "failed", "reason": f"{ended}, after it had {end['outcome']}"}
    seconds, rows = round(time.monotonic() - start, 2), [line for line in written if line is not end]
    return {"name": step.name, **found, "seconds": seconds, "log": str(log), "rows": rows}


def report(records: list[Record], args: argparse.Namespace, steps: Sequence[Step]) -> Record:
    """Return what is written: steps by outcome, steps to come, the machine, every step, every row."""
    names = {record["name"] for record in records}
    rows = [row for record in records for row in record["rows"]]
    measured = [row for row in rows if row.get("tokens_per_s") is not None]
    vanilla = {row["batch"]: row["tokens_per_s"] for row in measured if row["method"] == "vanilla"}
    for row in measured:
        if row["batch"] in vanilla:
            row["speedup"] = round(row["tokens_per_s"] / vanilla[row["batch"]], 3)
    return {
        **{outcome: [record["name"] for record in records if record["outcome"] == outcome] for outcome in OUTCOMES},
        "to_come": [step.name for step in steps if step.name not in names],
        "note": DRY_RUN if args.dry_run else "",
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *args.argv]),
        "environment": next((r["facts"] for r in records if r["name"] == "environment"), {}),
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "steps": [{key: value for key, value in record.items() if key != "rows"} for record in records],
        "rows": rows,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line, with `steps` to run and by how much their time-outs are scaled."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--smoke", action="store_true", help="the checks")
    parts.add_argument("--decode", action="store_true", help="attention, products and shapes of drafts")
    parts.add_argument("--half", type=int, choices=plan.HALVES, help="1: kernels, 2: engines; default: both")
    parser.add_argument("--out", type=Path, help="the result; default: gpu-smoke.json or gpu-suite.json")
    parser.add_argument("--only", default="", help="names of steps, with commas; default: all")
    parser.add_argument("--models", choices=("auto", *plan.MODELS), default="auto", help="of the measured engines")
    parser.add_argument("--seconds", type=float, help="for all steps together; time-outs scale with it")
    parser.add_argument("--work-dir", help="for logs and made-up checkpoints; default: a new temporary directory")
    parser.add_argument(
        "--dry-run", default="", nargs="?", const="contextlib:nullcontext", metavar="MODULE:NAME",
        help="for a device that computes nothing, which a context manager emulates around engines' steps: checks run "
        "unchecked, what is measured runs once at tiny sizes",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    alone = "smoke" if args.smoke else "decode" if args.decode else None
    args.out = args.out or Path(f"gpu-{alone or 'suite'}.json")
    chosen = [alone] if alone else [part for half, part in plan.HALVES.items() if args.half in (None, half)]
    planned, only = list(dict.fromkeys(step for part in chosen for step in PLAN[part])), args.only.split(",")
    if unknown := set(filter(None, only)) - {step.name for step in planned}:
        parser.error(f"--only: no step {sorted(unknown)[0]!r}; there are {', '.join(step.name for step in planned)}")
    args.steps = [step for step in planned if not args.only or step.name in only]
    args.scale = 1.0 if args.seconds is None else args.seconds / sum(SECONDS[part] for part in chosen)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run steps of the plan; return 1 if one failed."""
    args = parse(argv)
    work_dir = Path(args.work_dir or tempfile.mkdtemp(prefix="vidspec-gpu-"))
    work_dir.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    for step in args.steps:
        record = run_step(step, args, work_dir, args.scale * step.timeout_s)
        records.append(record)
        print(f"{record['outcome']:9} {step.name:26} {record['seconds']:7.1f} s  {record['reason']}", flush=True)
        found = report(records, args, args.steps)
        partial = args.out.with_name(args.out.name + ".part")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(args.out)  # in one step: an interrupted run leaves the one before
    print(", ".join(f"{len(found[outcome])} {outcome}" for outcome in OUTCOMES), f"-> {args.out}")
    return int(bool(found["failed"]))


def command(main: Callable[[], int]) -> None:
    """Exit with a command's status; a terminated command kills its running step."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())


if __name__ == "__main__":
    command(main)
