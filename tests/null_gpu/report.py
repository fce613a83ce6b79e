"""Prints the table of what a decode step does on the null GPU, as docs/gpu.md has it; reads engine_run's results.

python -m null_gpu.report RESULTS.json
"""

import json
import statistics
import sys
from typing import Any

from null_gpu import judge

COLUMNS = {
    "launches": lambda m: judge.per_step(m, "launch"),
    "of these by the runtime / Triton / cuBLAS": lambda m: " / ".join(
        f"{sum(judge.per_step(m, name) for name in names):g}"
        for names in (
            ("launch.cudaLaunchKernel", "launch.cudaLaunchKernelExC"),
            ("launch.cuLaunchKernelEx", "launch.cuLaunchKernel"),
            ("launch.cublas",),
        )
    ),
    "graphs (kernels)": lambda m: (
        f"{judge.per_step(m, 'graph.launch'):g} ({judge.per_step(m, 'graph.kernels'):g})"
        if judge.total(m, "graph.launch")
        else "0"
    ),
    "waits": lambda m: judge.per_step(m, "sync"),
    "blocking copies": lambda m: judge.per_step(m, "copy.blocking"),
    "pinned copies up / down": lambda m: (
        f"{judge.per_step(m, 'copy.h2d_pinned'):g} / {judge.per_step(m, 'copy.d2h_pinned'):g}"
    ),
    "device copies": lambda m: judge.per_step(m, "copy.d2d"),
    "allocations": lambda m: sum(judge.total(m, name) for name in judge.WAITS if name.startswith("alloc")),
    "host ms": lambda m: round(statistics.median(m["host_ms"]), 1) if m["host_ms"] else "",
}


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each configuration that ran."""
    lines = [f"| per decode step | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for measured in results:
        if measured["steps"]:
            cells = [format(value, "g") if isinstance(value, float | int) else value for value in _row(measured)]
            lines.append(f"| {measured['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _row(measured: dict[str, Any]) -> list[Any]:
    return [column(measured) for column in COLUMNS.values()]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(table(json.load(file)["rows"]))
