#!/usr/bin/env python3
"""The GPU runner: checks (`smoke`), then kernels beside their floors and peers, and engines of real shapes.

    python scripts/gpu_smoke.py --out gpu-smoke.json               # the checks alone, 26 minutes at most
    python scripts/gpu_suite.py --json gpu-suite.json              # kernels and engines, 25 minutes at most
    python scripts/gpu_suite.py --json engines.json --half 2       # engines only; kernels are half 1

Each step is a process of its own with its own time-out. A step that fails, crashes or hangs is recorded with its
reason, and the next one runs. The JSON is written after each step. Needs a Python with torch and pydantic; without vLLM
only the kernels are measured. The repository need not be installed.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_plan

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("gpu_steps.py")
OUTCOMES = ("passed", "failed", "unchecked", "skipped")
GRACE_S = 5.0  # for a killed step to end
TRACE_S = 2.0  # for a hanging step to write its stacks
DRY_RUN = "a dry run on a device that computes nothing: its numbers mean nothing"
Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step: its name in `gpu_steps.step_of`, and its time-out."""

    name: str
    timeout_s: float


# A kernel takes some 8 s for imports and 5 s a size to compile; FlexAttention takes 20 s.
_KERNEL_S = {"tree_attention": 140, "visual_relevance": 30, "candidates": 35}
ENVIRONMENT_STEP = Step("environment", 20)
# By part, the most informative steps first. An H100's host starts an engine of bundled models in 20 to 40 s, one of
# real shapes in 40 to 100 s, with torch.compile in three minutes.
PLAN: dict[str, tuple[Step, ...]] = {
    "smoke": (
        ENVIRONMENT_STEP,
        Step("kernels", 135),
        Step("identity-qwen2.5-vl", 150),
        Step("real-chain", 300),
        Step("sync-debug", 100),
        Step("self-draft-bf16", 75),
        Step("real-vanilla", 240),
        Step("real-tree-static", 300),
        Step("two-ranks", 90),
        Step("identity-llava-onevision", 150),
    ),
    "kernels": (ENVIRONMENT_STEP, *(Step(f"kernel-{name}", _KERNEL_S.get(name, 15)) for name in gpu_plan.KERNELS)),
    "engines": (ENVIRONMENT_STEP, *(Step(f"engine-{name}", 200) for name in gpu_plan.ENGINES)),
}
HALVES = {1: "kernels", 2: "engines"}
SECONDS = {part: sum(step.timeout_s for step in steps) for part, steps in PLAN.items()}

# Defaults for an engine process; what is already set stays.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    # vLLM's fp32 attention names no precision, so Triton would use TF32 and texts would differ by rounding.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return ENVIRONMENT | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}


def run_process(command: Sequence[str], log: Path, timeout_s: float) -> str:
    """Run a command in a group that is killed after `timeout_s`; return "" for status 0, else how it ended."""
    last_line = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(),
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status, last_line = None, _last_line(log)
            process.send_signal(signal.SIGUSR1)  # faulthandler writes all stacks to the log
            time.sleep(TRACE_S)
        finally:
            _kill_group(process)
    if status == 0:
        return ""
    if status is None:
        ended = f"timed out after {timeout_s:.0f} s"
    else:
        ended = f"crashed ({f'signal {signal.Signals(-status).name}' if status < 0 else f'exit status {status}'})"
    return f"{ended}; its last line: {last_line or _last_line(log)}"


def _kill_group(process: subprocess.Popen) -> None:
    """Kill what is left of a step: engines start processes of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: the next step will report it
        process.wait(GRACE_S)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def read_lines(path: Path) -> list[Record]:
    """Return the complete JSON lines that a process has written; its last may be cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def run_step(step: Step, args: argparse.Namespace, work_dir: Path, timeout_s: float) -> Record:
    """Run a step in a process of its own; return its outcome, and the rows that it has written."""
    log, lines, start = work_dir / f"{step.name}.log", work_dir / f"{step.name}.jsonl", time.monotonic()
    lines.unlink(missing_ok=True)
    context = {"work_dir": str(work_dir), "dry_run": args.dry_run, "models": args.models, "around": args.around}
    command = [sys.executable, str(WORKER), step.name, str(lines), json.dumps(context)]
    ended = run_process(command, log, timeout_s)
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
    return {
        **{outcome: [record["name"] for record in records if record["outcome"] == outcome] for outcome in OUTCOMES},
        "to_come": [step.name for step in steps if step.name not in names],
        "note": DRY_RUN if args.dry_run else "",
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *args.argv]),
        "environment": next((r["facts"] for r in records if r["name"] == "environment"), {}),
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "steps": [{key: value for key, value in record.items() if key != "rows"} for record in records],
        "rows": with_speedups([row for record in records for row in record["rows"]]),
    }


def with_speedups(rows: list[Record]) -> list[Record]:
    """Return rows with `speedup`: tokens per second relative to vanilla of the same batch size."""
    measured = [row for row in rows if row.get("tokens_per_s") is not None]
    vanilla = {row["batch"]: row["tokens_per_s"] for row in measured if row["method"] == "vanilla"}
    for row in measured:
        if row["batch"] in vanilla:
            row["speedup"] = round(row["tokens_per_s"] / vanilla[row["batch"]], 3)
    return rows


def write_json(path: Path, found: Record) -> None:
    """Replace a file in one step, so that an interrupted run leaves the one before."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


def parse(argv: Sequence[str] | None, parts: Sequence[str], out: str) -> argparse.Namespace:
    """Return the command line; by default these parts run and `out` is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", "--out", type=Path, default=Path(out), help="the result")
    parser.add_argument("--only", default="", help="names of steps, with commas; default: all")
    parser.add_argument("--models", choices=("auto", *gpu_plan.MODELS), default="auto", help="of the measured engines")
    parser.add_argument("--seconds", type=float, help="for all steps together; time-outs scale with it")
    parser.add_argument("--work-dir", help="for logs and made-up checkpoints; default: a new temporary directory")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="for a device that computes nothing: checks run unchecked, what is measured runs once at tiny sizes",
    )  # fmt: skip
    parser.add_argument("--around", default="", metavar="MODULE:NAME", help="a context manager for engines' steps")
    if len(parts) > 1:
        parser.add_argument("--half", type=int, choices=HALVES, help="1: kernels, 2: engines; default: both")
    parser.set_defaults(half=None)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    args.parts = [HALVES[args.half]] if args.half else list(parts)
    args.seconds = args.seconds or sum(SECONDS[part] for part in args.parts)
    names = list(dict.fromkeys(step.name for part in args.parts for step in PLAN[part]))
    if unknown := set(filter(None, args.only.split(","))) - set(names):
        parser.error(f"--only: no step {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    return args


def main(argv: Sequence[str] | None = None, parts: Sequence[str] = tuple(HALVES.values()), out: str = "") -> int:
    """Run the steps of some parts of the plan; return 1 if one failed."""
    args = parse(argv, parts, out or "gpu-suite.json")
    planned = dict.fromkeys(step for part in args.parts for step in PLAN[part])
    steps = [step for step in planned if not args.only or step.name in args.only.split(",")]
    work_dir = Path(args.work_dir or tempfile.mkdtemp(prefix="vidspec-gpu-"))
    work_dir.mkdir(parents=True, exist_ok=True)
    scale = args.seconds / sum(SECONDS[part] for part in args.parts)
    records: list[Record] = []
    for step in steps:
        record = run_step(step, args, work_dir, scale * step.timeout_s)
        records.append(record)
        print(f"{record['outcome']:9} {step.name:26} {record['seconds']:7.1f} s  {record['reason']}", flush=True)
        found = report(records, args, steps)
        write_json(args.json, found)
    print(", ".join(f"{len(found[outcome])} {outcome}" for outcome in OUTCOMES), f"-> {args.json}")
    return int(bool(found["failed"]))


def command(main: Callable[[], int]) -> None:
    """Exit with a command's status; a terminated command kills its running step."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())


if __name__ == "__main__":
    command(main)
