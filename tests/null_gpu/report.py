"""The table of decode steps on the null GPU in docs/notebook/gpu.md; pure, reads measurements.

python -m null_gpu.report RESULTS.json            # print the tables
python -m null_gpu.report RESULTS.json PAGE.md    # and write them between the page's marks
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.pages.__main__ import written
from null_gpu import judge
from vllm_vidspec.tools.tables import markdown

# Columns per step, each the sum of some counters.
PER_STEP = {
    "launches": ("launch",),
    "launches_runtime": ("launch.cudaLaunchKernel", "launch.cudaLaunchKernelExC", "launch.cudaLaunchCooperativeKernel"),
    "launches_driver": ("launch.cuLaunchKernelEx", "launch.cuLaunchKernel"),
    "launches_cublas": ("launch.cublas",),
    "launches_nccl": ("launch.nccl",),
    "graphs": ("graph.launch",),
    "graph_kernels": ("graph.kernels",),
    "syncs": ("sync",),
    "blocking_copies": ("copy.blocking",),
    "pinned_h2d": ("copy.h2d_pinned",),
    "pinned_d2h": ("copy.d2h_pinned",),
    "d2d": ("copy.d2d",),
}


def summary(measured: dict[str, Any], vanilla: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's medians per decode step beside vanilla vLLM's in the same mode and run."""
    times, start = sorted(measured["host_ms"]), measured["start"]
    captured = {"captured_graphs": start.get("graph.instantiate"), "captured_kernels": start.get("captured.kernel")}
    return {
        "name": measured["name"],
        "steps": len(measured["steps"]),
        **{name: sum(judge.per_step(measured, counter) for counter in counters) for name, counters in PER_STEP.items()},
        "allocations": sum(judge.total(measured, name) for name in judge.WAITS if name.startswith("alloc")),
        "host_ms": round(statistics.median(times), 2),
        "vanilla_host_ms": round(statistics.median(vanilla["host_ms"]), 2),
        "host_ms_p20": times[len(times) // 5],
        "host_ms_p80": times[len(times) * 4 // 5],
        "start_s": measured["start_s"],
    } | ({"memory": measured["extra"]["memory"], **captured} if "memory" in measured["extra"] else {})


def what_ran(measured: dict[str, Any]) -> dict[str, int]:
    """Return of one configuration: faults, captured graphs, their kernels, tokens, what was drafted and accepted."""
    counted = measured["extra"]["counted"]
    return {
        "faults": len(judge.faults(measured)),
        "graphs": measured["start"].get("graph.instantiate", 0),
        "kernels": measured["start"].get("captured.kernel", 0),
        "tokens": measured["tokens"],
        "drafted": counted.get("draft_tokens", 0),
        "accepted": counted.get("accepted_tokens", 0),
        "skipped": sum(number for name, number in counted.items() if name.startswith("skipped_")),
    }


COLUMNS = {
    "per decode step": "{name}",
    "launches (runtime / Triton / cuBLAS / NCCL)": "{launches:g} ({launches_runtime:g} / {launches_driver:g} / "
    "{launches_cublas:g} / {launches_nccl:g})",
    "graphs (kernels)": "{graphs:g} ({graph_kernels:g})",
    "syncs": "{syncs:g}",
    "blocking copies": "{blocking_copies:g}",
    "pinned copies up / down": "{pinned_h2d:g} / {pinned_d2h:g}",
    "device copies": "{d2d:g}",
    "allocations": "{allocations:g}",
}
TIMES = {"host ms (vanilla's)": "{host_ms:.1f} ({vanilla_host_ms:.1f})"}
WHOLE = {
    "captured at the start (kernels)": "{captured_graphs:,} ({captured_kernels:,})",
    "GiB of weights, target + draft": "{target:.1f} + {draft:.1f}",
    "KV cache + draft's pool": "{kv_cache:.1f} + {draft_pool:.1f}",
    "embeddings": "{vision:.1f}",
    "of graphs": "{graph_pools:.2f}",
    "other tensors": "{others:.1f}",
    "host": "{host:.1f}",
}


def table(rows: list[dict[str, Any]], whole: bool = False) -> str:
    """Return the rows of `summary` as a Markdown table, those of whole models or the others."""
    columns = COLUMNS | (WHOLE if whole else TIMES)
    shown = [row for row in rows if ("memory" in row) == whole]
    cells = [row | {owner: size / 2**30 for owner, size in row.get("memory", {}).items()} for row in shown]
    return markdown([*columns], [[cell.format(**row) for cell in columns.values()] for row in cells])


def section(results: dict[str, Any], whole: bool = False) -> str:
    """Return a table and its provenance, as a page shows them."""
    origin = results["provenance"]
    versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("vllm", "torch", "triton"))
    commit = f"commit {origin['git_sha'][:10]}" if origin["git_sha"] else "no commit"
    changes = " with local changes" if origin["git_dirty"] else ""
    cpu = f"{origin['cpu']}, {origin['num_cpus']} cores"
    return f"{table(results['rows'], whole)}\n\n{origin['date'][:10]}, {commit}{changes}, {versions}, {cpu}."


def main() -> None:
    """Print the tables that there are rows for; with a page, write them there."""
    results = json.loads(Path(sys.argv[1]).read_text())
    for whole in sorted({"memory" in row for row in results["rows"]}):
        print(section(results, whole))
        for page in map(Path, sys.argv[2:]):
            mark = "null-gpu-whole" if whole else "null-gpu"
            page.write_text(written(page.read_text(), {mark: lambda whole=whole: section(results, whole)}))


if __name__ == "__main__":
    main()
