#!/usr/bin/env python3
"""The GPU suite: our kernels beside their floors and peers, then engines of real shapes, in 18 minutes on one GPU.

    python scripts/gpu_suite.py --json gpu-suite.json              # both halves
    python scripts/gpu_suite.py --json gpu-suite.json --half 2     # one of them; the other's rows in the file stay
    python scripts/gpu_suite.py --page                             # write docs/gpu-measured.md from the committed file

Every step is a process of its own under a time-out of its own (`gpu_smoke.py`); one that fails is a row with its
reason, and the next one runs. The JSON is written after each of them. Needs a Python with torch; without vLLM the
kernels alone are measured.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_smoke as smoke
import gpu_suite_rows as rows

ROOT = smoke.ROOT
RESULT, PAGE = ROOT / "docs" / "results" / "gpu-suite.json", ROOT / "docs" / "gpu-measured.md"
Step = smoke.Step
# A kernel pays some 8 s for imports, and what compiles cold 5 s a size; FlexAttention 20 s, so peers come last. An
# engine pays a minute: imports, its start, prompts that all requests show.
_KERNEL_S = {"tree_attention": 50, "visual_relevance": 30, "candidates": 35}
STEPS: dict[int, tuple[Step, ...]] = {
    1: (
        Step("machine", 20),
        *(Step(f"kernel-{name}", _KERNEL_S.get(name, 15)) for name in rows.KERNELS),
        *(Step(f"peers-{name}", 60) for name in rows.WITH_PEERS),
    ),
    2: (Step("machine", 20), *(Step(f"engine-{name}", 95) for name in rows.ENGINES)),
}
# Of each half; time-outs grow with --seconds.
SECONDS = {half: sum(step.timeout_s for step in steps) for half, steps in STEPS.items()}
DRY_RUN = "a dry run on a device that computes nothing: its numbers mean nothing"


def planned(step: str, batches: Sequence[int] = rows.BATCHES) -> list[dict[str, Any]]:
    """Return what a step is to give at the least: a row of its kernel, one of its engine at each batch size."""
    kind, _, name = step.partition("-")
    if kind in ("kernel", "peers"):
        return [{"kernel": name}]
    return [{"engine": name, "batch": batch} for batch in batches] if kind == "engine" else []


def run(
    half: int, steps: Sequence[Step], args: argparse.Namespace, keep: Callable, say: Callable = print
) -> list[dict[str, Any]]:
    """Run steps of a half; `keep` the records after each, with `rows`, and return them.

    A dry run has one process for all of them, because nothing that it starts has to be protected from the others.
    """
    scale, records = args.seconds / sum(SECONDS.values()), []
    work_dir = smoke.folder_of(args)
    groups = [steps] if args.dry_run else [[step] for step in steps]
    limits = smoke.budgets(sum(step.timeout_s for step in group) * scale for group in groups)
    for group, limit in zip(groups, limits, strict=True):
        label = f"half-{half}" if args.dry_run else group[0].name
        log, result = work_dir / f"{label}.log", work_dir / f"{label}.json"
        for old in (result, work_dir / "rows.jsonl"):
            old.unlink(missing_ok=True)
        verdict = smoke.run_step(command_of(group, result, work_dir, args), result, log, limit)
        found = written(work_dir / "rows.jsonl")
        for step in group:
            record = record_of(step, half, verdict, found, rows.TINY_BATCHES if args.dry_run else rows.BATCHES)
            records.append(record | {"log": str(log) if log.exists() else None})
            say(f"{record['outcome']:9} {step.name:26} {record['seconds']:7.1f} s  {record['reason']}")
        keep(records)
    return records


def command_of(group: Iterable[Step], result: Path, work_dir: Path, args: argparse.Namespace) -> list[str]:
    """Return what starts the steps of a group."""
    names = ",".join(step.name for step in group)
    command = [sys.executable, rows.__file__, names, "--result", str(result), "--work-dir", str(work_dir)]
    command += ["--models", args.models, *(["--dry-run"] if args.dry_run else [])]
    return command + (["--around", args.around] if args.around else [])


def written(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a process has written, but for one that it was killed in."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def record_of(
    step: Step, half: int, verdict: dict[str, Any], found: list[dict[str, Any]], batches: Sequence[int]
) -> dict[str, Any]:
    """Return what became of a step: how it ended, and a row for whatever was planned.

    Args:
        step: Which.
        half: Of which half.
        verdict: On its process, of `gpu_smoke.run_step`; counts where the step has not said itself how it ended.
        found: Lines of the process.
        batches: Of its engine.
    """
    own = [line for line in found if line["step"] == step.name]
    ends = [line for line in own if "end" in line]
    outcome, reason, seconds = verdict["outcome"], verdict["reason"], verdict.get("seconds", 0.0)
    if ends:
        outcome, reason, seconds = ends[-1]["end"], ends[-1]["reason"], ends[-1]["seconds"]
    elif outcome == "passed":  # the process says so, the step says nothing
        outcome, reason = "failed", "it left no word"
    kept = [{name: value for name, value in line.items() if name != "end"} for line in own if "end" not in line]
    for wanted in planned(step.name, batches):
        if not any(wanted.items() <= row.items() for row in kept):
            kept.append({"step": step.name, **wanted, "outcome": outcome, "reason": reason or "it left no row"})
    facts = kept if step.name == "machine" else []
    return {
        "name": step.name, "half": half, "outcome": outcome, "reason": reason, "seconds": seconds,
        "rows": [] if facts else kept, "facts": facts[0] if facts else {},
    }  # fmt: skip


# ---- the JSON --------------------------------------------------------------------------------------------------------


def report(records: list[dict[str, Any]], args: argparse.Namespace, old: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is written: every row, every step, the machine; of a half that was not run, what `old` has of it."""
    half_of = {record["name"]: record["half"] for record in records if record["name"] != "machine"}
    halves = sorted(set(half_of.values()))
    machine = next((record["facts"] for record in records if record["facts"]), {})
    found = {
        "note": DRY_RUN if args.dry_run else "",
        "command": shlex.join(["python", f"scripts/{Path(__file__).name}", *args.argv]),
        "git_sha": smoke._git_sha(),
        "halves": {str(half): machine | {"seconds": _seconds(records, half)} for half in halves},
        "steps": [{k: v for k, v in record.items() if k not in ("rows", "facts")} for record in records],
        "rows": with_speedups([row | {"half": record["half"]} for record in records for row in record["rows"]]),
    }
    return found if old is None else merged(old, found)


def _seconds(records: list[dict[str, Any]], half: int) -> float:
    return round(sum(record["seconds"] for record in records if record["half"] == half), 1)


def with_speedups(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with `speedup`: tokens a second as a multiple of vanilla's in the same mode and batch size."""
    vanilla = {
        (row["graphs"], row["batch"]): row["tokens_per_s"]
        for row in found
        if row.get("method") == "vanilla" and row["outcome"] == "measured"
    }

    def speedup(row: dict[str, Any]) -> dict[str, Any]:
        base = vanilla.get((row.get("graphs"), row.get("batch")))
        if not base or row["outcome"] != "measured":
            return {}
        return {"speedup": round(row["tokens_per_s"] / base, 3)}

    return [row | speedup(row) for row in found]


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the new file with the halves that only the old one has, of the same commit on a GPU of the same name.

    Raises:
        ValueError: They do not belong together.
    """
    missing = [half for half in old["halves"] if half not in new["halves"]]
    if not missing:
        return new
    gpus = {half.get("gpu") for file in (old, new) for half in file["halves"].values()}
    if old["git_sha"] != new["git_sha"] or len(gpus) > 1 or old["note"] != new["note"]:
        raise ValueError("the other half in that file is of another commit, GPU or kind of run: give another --json")
    keep = {int(half) for half in missing}
    return new | {
        "halves": {half: old["halves"][half] for half in missing} | new["halves"],
        **{key: [one for one in old[key] if one["half"] in keep] + new[key] for key in ("steps", "rows")},
        "command": f"{old['command']}; {new['command']}",
    }


# ---- the page --------------------------------------------------------------------------------------------------------

_HEAD = """# Measured on a GPU

Written by `python scripts/gpu_suite.py --page` from `docs/results/gpu-suite.json`, which `make bench-gpu` makes
([how](gpu.md#gpu-suite)).

"""
_NOTHING = """**No GPU has run this suite yet**: there is no `docs/results/gpu-suite.json`, and so no figure here.
What kernels should take is modelled in [kernels.md](kernels.md); what the host does in a step is counted on a
[null GPU](gpu.md#null-gpu).
"""
_KERNELS = """## Kernels

**Measured**: medians in µs with a cold L2 cache, beside the floor of the same device at the same minute, the larger of
what must be moved at the rate of a copy and what must be multiplied at the rate of a square product.

"""
_ENGINES = """## Engines

**Measured**: ms of a decode step, ms of its drafting, with made-up weights over a KV cache of noise. **Forced**: the
acceptance length, at what is published of the method, and so tokens per second and what they are of vanilla's.
**Published**: the speedup in the same table (ParallelVLM, Table 1: Qwen2.5-VL 32B and 7B, VideoDetailCaption, 8 L40S).

"""


def render(found: dict[str, Any] | None) -> str:
    """Return the page of a file's rows, or of the absence of a file.

    Raises:
        ValueError: The file is of a dry run.
    """
    if found is None:
        return _HEAD + _NOTHING
    if found["note"]:
        raise ValueError(found["note"])
    text = _HEAD + f"`{found['command']}`, commit {(found['git_sha'] or 'unknown')[:10]}.\n\n"
    for half, machine in found["halves"].items():
        versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        text += f"Half {half}: {machine.get('gpu')}, {machine.get('date')}, {machine['seconds']} s; {versions}.\n\n"
    kernels = [row for row in found["rows"] if "kernel" in row]
    engines = [row for row in found["rows"] if "engine" in row]
    if kernels:
        text += _KERNELS + table(("kernel", "case", "what", "µs", "floor", "of it"), map(_kernel_cells, kernels))
    if engines:
        heads = (
            "engine",
            "batch",
            "models",
            "step ms",
            "draft ms",
            "length (wanted)",
            "tokens/s",
            "x vanilla",
            "published x",
        )
        text += _ENGINES + table(heads, map(_engine_cells, engines))
    return text.rstrip("\n") + "\n"


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with an empty line behind it."""
    body = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
    return f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n{body}\n"


def _kernel_cells(row: dict[str, Any]) -> list[str]:
    name, case, what = f"`{row['kernel']}`", row.get("case", ""), row.get("impl", "")
    if row["outcome"] != "measured":
        return [name, case, what, f"{row['outcome']}: {row['reason']}", "", ""]
    return [
        name,
        case,
        what,
        f"{row['median']:.1f}",
        f"{row['floor']:.2f}",
        f"{100 * row['floor'] / row['median']:.0f} %",
    ]


def _engine_cells(row: dict[str, Any]) -> list[str]:
    name, batch = row["engine"], str(row["batch"])
    if row["outcome"] != "measured":
        return [name, batch, row.get("models", ""), f"{row['outcome']}: {row['reason']}", *[""] * 5]
    spread = f"{row['step_ms']:.2f} ({row['step_ms_low']:.2f} to {row['step_ms_high']:.2f})"
    forced = "forced " if row["acceptance"] == "forced" else ""
    length = f"{forced}{row['acceptance_length']:.2f}"
    if row["acceptance_length_wanted"]:
        length += f" ({row['acceptance_length_wanted']:.2f}, {row['tau_of']})"
    drafting = "" if row["propose_ms"] is None else f"{row['propose_ms']:.2f}"
    speedup = f"{forced}{row['speedup']:.2f}" if "speedup" in row else ""
    published = row.get("published_speedup")
    return [
        name, batch, row["models"], spread, drafting, length, f"{forced}{row['tokens_per_s']:.1f}", speedup,
        "" if published is None else f"{published:.2f}",
    ]  # fmt: skip


def stored() -> dict[str, Any] | None:
    """Return the committed result, None where no GPU has made one."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else None


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-suite.json"), help="what was measured")
    parser.add_argument("--half", type=int, choices=tuple(SECONDS), help="1: kernels, 2: engines; default: both")
    parser.add_argument("--only", default="", help="names of steps, with commas; default: all")
    parser.add_argument(
        "--models", choices=("auto", *rows.MODELS), default="auto", help="of the engines; default: auto"
    )
    parser.add_argument("--seconds", type=float, default=sum(SECONDS.values()), help="for both halves together")
    parser.add_argument("--work-dir", help="where logs and made-up checkpoints go; default: a new temporary directory")
    parser.add_argument(
        "--dry-run", action="store_true", help="everything once, tiny, on a device that computes nothing"
    )
    parser.add_argument("--around", default="", metavar="MODULE:NAME", help="a context manager that engines step in")
    parser.add_argument("--page", action="store_true", help="write docs/gpu-measured.md and do nothing else")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    names = [step.name for steps in STEPS.values() for step in steps]
    if unknown := set(filter(None, args.only.split(","))) - set(names):
        parser.error(f"--only: no step {sorted(unknown)[0]!r}; there are {', '.join(dict.fromkeys(names))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; return 1 if a step failed."""
    args = parse(argv)
    if args.page:
        PAGE.write_text(render(stored()))
        return 0
    only = set(filter(None, args.only.split(",")))
    old = json.loads(args.json.read_text()) if args.half and args.json.exists() else None
    records: list[dict[str, Any]] = []

    def keep(of_half: list[dict[str, Any]]) -> dict[str, Any]:
        found = report([*records, *of_half], args, old)
        smoke.write_json(args.json, found)
        return found

    for half in [args.half] if args.half else SECONDS:
        steps = [step for step in STEPS[half] if not only or step.name in only]
        if only - {"machine"} and not any(step.name != "machine" for step in steps):
            continue
        records += run(half, steps, args, keep)
    found = keep([])
    counts = [sum(row["outcome"] == outcome for row in found["rows"]) for outcome in ("measured", "refused")]
    print(f"{len(found['rows'])} rows, {counts[0]} measured, {counts[1]} refused -> {args.json}")
    return 1 if any(record["outcome"] == "failed" for record in records) else 0


if __name__ == "__main__":
    smoke.command(main)
