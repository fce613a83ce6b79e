"""Drafting that pays, by default: decode speed over vanilla vLLM and over fixed numbers of drafts, cell by cell.

    python benchmarks/bench_never_slower.py --tokens 256,4096 --drafts bundled,untrained --batches 1,4 --pads 0

A cell is a video's length, a draft, a batch size, and whether the target is padded with no-op layers to so many drafts'
cost. In each cell vanilla, the controller (`adaptive_tokens`, the default) and fixed chains answer the same requests in
interleaved rounds; the first rounds, in which the controller learns, are shown apart. A file of finished cells lets a
stopped run go on.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import load_file, save_file

from vidspec_tools.bench import parallel, scaling
from vidspec_tools.bench.acceptance import identical_frac
from vidspec_tools.bench.methods import SEQUENTIAL
from vidspec_tools.bench.trials import VANILLA_VARIANT, Variant, Workload
from vllm_vidspec import assets
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import silent
from vllm_vidspec.tools.provenance import provenance

FAMILY = "qwen2.5-vl"
DRAFTS = {"bundled": (FAMILY, "draft"), "far": (FAMILY, assets.FAR), "plain": (assets.PLAIN, "draft"), "untrained": ()}
CONTROLLER = "controller"
LEARNING = 2  # rounds that are shown apart


def untrained(folder: Path) -> str:
    """Write the bundled draft with made-up weights; return its directory."""
    import torch

    source = Path(pairs.checkpoint(FAMILY, "draft"))
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    random = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(weight.shape, generator=random).to(weight.dtype) * 0.05 if weight.ndim > 1 else weight
        for name, weight in load_file(weights).items()
    }
    save_file(made, weights, metadata={"format": "pt"})
    return str(folder)


def variants(fixed: tuple[int, ...], pads: float) -> list[Variant]:
    """Return vanilla, the controller and each fixed chain."""
    most = {"num_speculative_tokens": max(fixed), "pruner": "specvlm", "adaptive_tokens": True}
    return [
        VANILLA_VARIANT,
        Variant(CONTROLLER, SEQUENTIAL, most),
        *(
            Variant(f"chain of {k}", SEQUENTIAL, most | {"num_speculative_tokens": k, "adaptive_tokens": False})
            for k in fixed
        ),
    ]


def measure(benchmark: scaling.ScalingBenchmark, workload: Workload, engines: list[Variant]) -> list[dict[str, Any]]:
    """Let every engine answer each round's requests in turn; return a row of each."""
    answers: list[list[dict[str, Any]]] = [[] for _ in engines]
    with ExitStack() as stack:
        sessions = [stack.enter_context(EngineSession(benchmark.job(workload, engine))) for engine in engines]
        for number in range(benchmark.rounds):
            indices = list(range(number * benchmark.batch_size, (number + 1) * benchmark.batch_size))
            command = {"command": "batch", "indices": indices, "sampling": benchmark.sampling, "seed": benchmark.seed}
            order = range(len(engines)) if number % 2 == 0 else reversed(range(len(engines)))
            for place in order:
                answers[place].append(sessions[place].ask(dict(command)))
    vanilla = [scaling.by_round(one) for one in answers[0]]
    rows = []
    for engine, rounds in zip(engines, answers, strict=True):
        found = [scaling.by_round(one) for one in rounds]
        speedups = [ours["tokens_per_s"] / its["tokens_per_s"] for ours, its in zip(found, vanilla, strict=True)]
        delays = [1e3 * (ours["ttft_s"] - its["ttft_s"]) for ours, its in zip(found, vanilla, strict=True)]
        last = rounds[-1]["metrics"]
        rows.append(
            {
                "engine": engine.method,
                "speedup": statistics.median(speedups[LEARNING:]),
                "speedup_first": speedups[0],
                "tokens_per_s": statistics.median(one["tokens_per_s"] for one in found[LEARNING:]),
                "ttft_ms": 1e3 * statistics.median(one["ttft_s"] for one in found[LEARNING:]),
                "ttft_more_ms": statistics.median(delays[LEARNING:]),
                "verify_steps_last": 0 if last is None else last["drafts"],
                "accepted_last": 0 if last is None else last["accepted_tokens"],
                "identical_frac": identical_frac(scaling.token_ids(rounds), scaling.token_ids(answers[0])),
            }
        )
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cells that the file does not have yet; return all of them."""
    path = Path(args.json)
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    known = {(cell["tokens"], cell["draft"], cell["batch"], cell["pads"]) for cell in cells}
    fixed = tuple(int(k) for k in args.fixed.split(","))
    with tempfile.TemporaryDirectory(prefix="vidspec-untrained-") as folder:
        path_of_untrained = untrained(Path(folder)) if "untrained" in args.drafts else ""
        for pads in map(float, args.pads.split(",")):
            for name in args.drafts.split(","):
                family, draft = DRAFTS[name] or (FAMILY, path_of_untrained)
                for tokens in map(int, args.tokens.split(",")):
                    for batch in map(int, args.batches.split(",")):
                        if (tokens, name, batch, pads) in known:
                            continue
                        benchmark = scaling.ScalingBenchmark(
                            families=(family,), axis="video_tokens", values=(float(tokens),), inflate=(pads,),
                            batch_size=batch, rounds=args.rounds, max_tokens=args.max_tokens, draft=draft,
                        ).at(tokens)  # fmt: skip
                        workload = parallel.workload_for(benchmark, family, pads, silent)
                        rows = measure(benchmark, workload, variants(fixed, pads))
                        cell = {
                            "tokens": tokens,
                            "draft": name,
                            "batch": batch,
                            "pads": pads,
                            "max_tokens": args.max_tokens,
                        }
                        cells.append(cell | {"rows": rows})
                        path.write_text(json.dumps({"cells": cells, "provenance": provenance()}, indent=1) + "\n")
                        print(line(cells[-1]), flush=True)
    return cells


HEAD = (
    "| video tokens | draft | batch | target padded to | best fixed over vanilla | controller over vanilla | over best "
    "fixed | first round | time to first token | whole answers over vanilla | tokens per verify step |\n|"
    + " ---: |"
    * 11
)


def line(cell: dict[str, Any]) -> str:
    """Return a cell as a row of a page's table."""
    vanilla, ours, *fixed = cell["rows"]
    best = max((vanilla, *fixed), key=lambda row: row["speedup"])
    steps = ours["verify_steps_last"]
    length = f"{1 + ours['accepted_last'] / steps:.2f}" if steps else "rests"
    figures = [
        f"{cell['tokens']:,}",
        cell["draft"],
        str(cell["batch"]),
        f"{cell['pads']:g} drafts" if cell["pads"] else "-",
        f"{best['speedup']:.2f} ({best['engine']})",
        *(f"{value:.2f}" for value in (ours["speedup"], ours["speedup"] / best["speedup"], ours["speedup_first"])),
        f"{ours['ttft_more_ms']:+.1f} of {vanilla['ttft_ms']:.0f} ms",
        f"{whole_s(cell, vanilla) / whole_s(cell, ours):.2f}",
        length,
    ]
    return f"| {' | '.join(figures)} |"


def whole_s(cell: dict[str, Any], row: dict[str, Any]) -> float:
    """Return the seconds of a round's answers, from the request on."""
    return 1e-3 * row["ttft_ms"] + (cell["max_tokens"] - 1) * cell["batch"] / row["tokens_per_s"]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="256,1024,4096,14848")
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--pads", default="0,9", help="forwards of the draft that one of the target costs; 0: as it is")
    parser.add_argument("--fixed", default="5,2")
    parser.add_argument("--rounds", type=int, default=LEARNING + 5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", default="docs/results/never-slower.json", help="finished cells, which are kept")
    cells = run(parser.parse_args())
    print("\n".join([HEAD, *map(line, cells)]))


if __name__ == "__main__":
    main()
