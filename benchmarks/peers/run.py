"""Measure what we do beside what others do, in one run: attention of trees, and draft decoding.

python benchmarks/peers/run.py --out peers.json [--only attention] [--dry-run]

Writes the rows as JSON and, beside it, the two tables as markdown. On a GPU the sizes are real ones, on a CPU tiny.
Attention (`attention.py`): the implementations are called in turn, and each is first compared with float64. Drafting
(`engines.py`): engines of their own take turns. `--dry-run` runs everything at tiny sizes on a device that computes
nothing: it compares no values, and both files note that their numbers mean nothing.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_BENCHMARKS), str(_BENCHMARKS.parent)]
# ruff: noqa: E402
import bench_kernels
from kernel_cases import tree_attention
from markdown import table

from peers import attention, engines
from vllm_vidspec.tools.provenance import provenance

ON_GPU = bench_kernels.ON_GPU
TOLERANCE = 3e-2 if ON_GPU else 1e-5
TINY_AXES = {"shape": ["4x2x32"], "context": [200], "num_reqs": [2], "nodes": [8]}
MEANINGLESS = "a dry run on a device that computes nothing: these numbers mean nothing"
_ATTENTION = ("case", "impl", "median", "ratio", "floor", "max_error", "note")
_DRAFTING = ("batch_size", "method", "propose_ms", "propose_ratio", "propose_host_ms", "step_ms", "step_ratio", "note")


def attention_rows(axes: dict[str, list[Any]], rounds: int, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per case and implementation, with its time as a multiple of ours and its error against float64.

    Raises:
        RuntimeError: Something that is measured computes something else.
    """
    for size in bench_kernels.sizes_of(axes, []):
        name = " ".join(f"{axis}={value}" for axis, value in size.items())
        errors = {} if dry_run else errors_of(name, size)
        rows = list(bench_kernels.rows_of(tree_attention.case(**size), rounds, graphs=False))
        for row in rows:
            ratio = row["median"] and round(row["median"] / rows[0]["median"], 3)
            yield {"case": name, **row, "ratio": ratio, "max_error": errors.get(row["impl"])}


def errors_of(name: str, size: dict[str, Any]) -> dict[str, float]:
    """Return by implementation how far a case is from float64."""
    shape = map(int, size["shape"].split("x"))
    inputs = attention.Inputs(size["context"], size["num_reqs"], size["nodes"], *shape)
    exact, errors = inputs.exact(), {}
    for impl, (call, tokens) in attention.bind(inputs)[0].items():
        errors[impl] = float((tokens(call()).double() - exact).abs().max())
        if not errors[impl] < TOLERANCE:
            raise RuntimeError(f"{impl} at {name} is {errors[impl]} off: it computes something else")
    return errors


def markdown(found: dict[str, Any]) -> str:
    """Return the tables."""
    origin = found["provenance"]
    lines = ["# Beside others", "", f"{origin['device']}, {origin['date']}"]
    if found["note"]:
        lines += ["", f"**{found['note']}.**"]
    for title, key, columns in (
        ("Attention of trees, one layer, us", "attention", _ATTENTION),
        ("Drafting, ms a step", "drafting", _DRAFTING),
    ):
        if rows := found[key]:
            lines += ["", f"## {title}", "", table(columns, rows).rstrip()]
    return "\n".join(lines) + "\n"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("peers.json"), help="the tables go beside it, as .md")
    parser.add_argument("--only", choices=("attention", "drafting"))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a device that computes nothing")
    parser.add_argument("--rounds", type=int, default=3, help="engines of each method, in turn")
    parser.add_argument("--calls", type=int, default=21, help="of each implementation of attention per case")
    parser.add_argument("--methods", default=",".join(engines.METHODS), help="of drafting")
    parser.add_argument("--draft-shape", choices=engines.SHAPES, default="3b" if ON_GPU else "tiny")
    parser.add_argument("--num-tokens", type=int, default=5, help="K")
    parser.add_argument("--batch", default="1,8,32" if ON_GPU else "1,4")
    parser.add_argument("--context", type=int, default=8000 if ON_GPU else 64, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=50 if ON_GPU else 5, help="decode steps that are timed")
    parser.add_argument("--engine-args", default="{}", help="arguments of vllm.LLM, a JSON object")
    parser.add_argument("--around", help="MODULE:NAME of a context manager that steps run in")
    options = parser.parse_args(argv)
    options.batch = [int(size) for size in options.batch.split(",")]
    options.methods = options.methods.split(",")
    options.engine_args = ({} if ON_GPU else {"dtype": "float32"}) | json.loads(options.engine_args)
    if options.dry_run:
        options.draft_shape, options.batch, options.context, options.steps = "tiny", [1], 32, 2
        options.rounds = options.calls = 1
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, write both files and return what the JSON holds."""
    options = arguments(argv)
    axes = TINY_AXES if options.dry_run or not ON_GPU else tree_attention.AXES
    found: dict[str, Any] = {"note": MEANINGLESS if options.dry_run else "", "attention": [], "drafting": []}
    if options.only != "drafting":
        for row in attention_rows(axes, options.calls, options.dry_run):
            found["attention"].append(row)
            print(f"{row['case']} {row['impl']}: {row['note'] or row['median']}", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    if options.only != "attention":
        found["drafting"] = engines.measure(options, lambda line: print(line, flush=True))
    found["provenance"] = provenance()
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))
    return found


if __name__ == "__main__":
    main()
