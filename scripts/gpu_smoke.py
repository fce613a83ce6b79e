#!/usr/bin/env python3
"""The first minutes on a GPU: runs every step of `gpu_smoke_steps.py` in a process of its own and writes one JSON.

A step that fails, crashes or hangs costs its own time and nothing else: the others run. The JSON is written after each
of them. Needs the standard library and a Python that can import vLLM; the repository need not be installed.

    python scripts/gpu_smoke.py --out smoke.json
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS_FILE = Path(__file__).with_name("gpu_smoke_steps.py")
OUTCOMES = ("passed", "failed", "unchecked", "skipped")
# No step may hold up the others for longer than this beyond its own time-out.
GRACE_S = 5.0
LAST_WORDS_S = 0.5


@dataclass(frozen=True)
class Step:
    """One step: its name, which is also that of its function, how long it may take, and whether it needs a GPU."""

    name: str
    timeout_s: float
    needs_cuda: bool = True


# What is most worth knowing first. An engine pays some 15 s for imports and its start, one of real shapes a minute.
STEPS = (
    Step("environment", 30, needs_cuda=False),
    Step("doctor", 15, needs_cuda=False),
    Step("compile", 40),
    Step("kernels", 70),
    Step("identity-qwen2.5-vl", 70, needs_cuda=False),
    Step("real-chain", 90),
    Step("sync-debug", 45),
    Step("self-draft-bf16", 25),
    Step("real-vanilla", 60),
    Step("real-tree-static", 60),
    Step("two-ranks", 45),
    Step("identity-llava-onevision", 50, needs_cuda=False),
)
SECONDS = sum(step.timeout_s for step in STEPS)  # for all of them, unless the user gives more: time-outs grow with it

# What an engine process needs where nothing is set up; what is set stays.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    # vLLM's attention for fp32 says nothing of its products, which are TF32 then: texts would differ by rounding alone.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def environment() -> dict[str, str]:
    """Return the environment of a step: this one's, with the repository in front of the path."""
    path = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return ENVIRONMENT | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}


def run_step(command: Sequence[str], result: Path, log: Path, timeout_s: float) -> dict[str, Any]:
    """Run one step in a process group of its own.

    Args:
        command: What to start; it writes `result`, a JSON object with `outcome`, `reason` and `facts`.
        result: Where its verdict will be.
        log: Where its output goes.
        timeout_s: After this many seconds the whole group is killed.

    Returns:
        `outcome` (one of OUTCOMES), `reason` (one line, empty where it passed), `facts` and `seconds`. A process that
        ends without a verdict, or with another than its exit status, has failed.
    """
    start, said = time.monotonic(), ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(),
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status, said = None, _last_line(log)
            process.send_signal(signal.SIGUSR1)  # it writes where it is
            time.sleep(LAST_WORDS_S)
        finally:
            _kill_group(process)
    verdict = _verdict(result, status, timeout_s, said or _last_line(log))
    return verdict | {"seconds": round(time.monotonic() - start, 2)}


def _kill_group(process: subprocess.Popen) -> None:
    """End whatever is left of a step; engines start processes of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: the next step will say so
        process.wait(GRACE_S)


def _verdict(result: Path, status: int | None, timeout_s: float, said: str) -> dict[str, Any]:
    if status is None:
        return _failed(f"timed out after {timeout_s:.0f} s", said)
    try:
        verdict = json.loads(result.read_text())
        outcome, facts = verdict["outcome"], verdict["facts"]
        assert outcome in OUTCOMES
    except (OSError, ValueError, KeyError, AssertionError):
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return _failed(f"crashed ({how})", said)
    if status != 0 and outcome != "failed":
        return _failed(f"ended with status {status} after it had {outcome}", said) | {"facts": facts}
    return {"outcome": outcome, "reason": verdict.get("reason", ""), "facts": facts}


def _failed(reason: str, said: str) -> dict[str, Any]:
    """Return a verdict on a step that gave none itself, with the last line that it wrote."""
    return {"outcome": "failed", "reason": reason + (f"; its last line: {said}" if said else ""), "facts": {}}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def budgets(timeouts: Iterable[float]) -> Iterator[float]:
    """Yield the seconds of each step as its turn comes: its own, and as many of what those before it have left.

    So together they take no longer than the sum, whoever hangs, and nobody is cut short by another.
    """
    until = time.monotonic()
    for timeout_s in timeouts:
        until += timeout_s
        yield max(timeout_s, min(2 * timeout_s, until - time.monotonic()))


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder of logs and made-up checkpoints."""
    folder = Path(args.work_dir or tempfile.mkdtemp(prefix="vidspec-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a file at once, so that whoever is cut off leaves the one before."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


def run_all(
    steps: Sequence[Step], args: argparse.Namespace, steps_file: Path, keep: Callable, say: Callable = print
) -> list[dict[str, Any]]:
    """Run the steps one after another; `keep` the records after each, and return them."""
    records: list[dict[str, Any]] = []
    work_dir, scale = folder_of(args), args.seconds / SECONDS
    for step, limit in zip(steps, budgets(step.timeout_s * scale for step in steps), strict=True):
        log, result = work_dir / f"{step.name}.log", work_dir / f"{step.name}.json"
        result.unlink(missing_ok=True)
        record: dict[str, Any] = {"outcome": "skipped", "reason": "no CUDA", "facts": {}, "seconds": 0.0}
        if not step.needs_cuda or args.device != "cpu":
            command = [
                sys.executable, str(steps_file), step.name, "--result", str(result), "--device", args.device,
                "--work-dir", str(work_dir), *(["--skip-numbers"] if args.skip_numbers else []),
                *(["--around", args.around] if args.around else []),
            ]  # fmt: skip
            record = run_step(command, result, log, limit)
        record = {"name": step.name, **record, "log": str(log) if log.exists() else None}
        records.append(record)
        keep(records)
        say(f"{record['outcome']:9} {step.name:26} {record['seconds']:7.1f} s  {record['reason']}")
    return records


def report(
    records: list[dict[str, Any]], args: argparse.Namespace, seconds: float, steps: Sequence[Step]
) -> dict[str, Any]:
    """Return what is written: verdicts by outcome, steps still to come, the machine, the versions, every record."""
    by_name = {record["name"]: record for record in records}
    return {
        **{outcome: [r["name"] for r in records if r["outcome"] == outcome] for outcome in OUTCOMES},
        "to_come": [step.name for step in steps if step.name not in by_name],
        "device": args.device,
        "numbers_checked": not args.skip_numbers,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_sha": _git_sha(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "environment": by_name.get("environment", {}).get("facts", {}),
        "steps": records,
    }


def _git_sha() -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gpu-smoke.json", help="the JSON that says what passed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--only", default="", help="names of steps, with commas; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together")
    parser.add_argument("--work-dir", help="where logs and made-up checkpoints go; default: a new temporary directory")
    parser.add_argument(
        "--skip-numbers", action="store_true",
        help="for a device that computes nothing: steps run, what they compute is reported as unchecked",
    )  # fmt: skip
    parser.add_argument(
        "--around", default="", metavar="MODULE:NAME",
        help="a context manager for engines to run in, once they have started, on a device that has to be emulated",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if unknown := set(filter(None, args.only.split(","))) - {step.name for step in STEPS}:
        parser.error(f"--only: no step {sorted(unknown)[0]!r}; there are {', '.join(step.name for step in STEPS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the smoke test; return 1 if anything failed."""
    args, start = parse(argv), time.monotonic()
    chosen = [step for step in STEPS if not args.only or step.name in args.only.split(",")]

    def keep(records: list[dict[str, Any]]) -> dict[str, Any]:
        found = report(records, args, time.monotonic() - start, chosen)
        write_json(Path(args.out), found)
        return found

    written = keep(run_all(chosen, args, STEPS_FILE, keep))
    print(", ".join(f"{len(written[outcome])} {outcome}" for outcome in OUTCOMES), f"-> {args.out}")
    return 1 if written["failed"] else 0


def command(main: Callable[[], int]) -> None:
    """Run a command to its exit status; one that is ended takes the step under way with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())


if __name__ == "__main__":
    command(main)
