"""Measure the kernels against their peers, beside the floor of the device.

python benchmarks/bench_kernels.py [draw tree_attention ...] [--sizes num_reqs=1,8 nodes=25] [--json]

Those that read the vocabulary, the KV cache or stored states; the others are bound by the latency of a launch, and are
measured as parts of a step (`bench_overheads.py`, the engines of the GPU suite). A kernel's cases are a file of
`kernel_cases/`: its axes with sizes, which `--sizes` replaces, and what it is measured against. On a GPU "triton" is
the kernel, on a CPU "torch" is its reference. A case's implementations are called in turn, so that other load on the
machine affects all of them. The floor is the larger of two times: `traffic`, the bytes that must move at the copy
bandwidth, and `product`, the operations at the rate of a square matrix product. Both rates are measured beside each
case, because a shared machine's change by the minute.
"""

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_vidspec.tools.provenance import provenance

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
IMPL = "triton" if ON_GPU else "numba"  # of a kernel that has no peer: on a CPU its loop
KERNELS = ("draw", "candidates", "guidance_scores", "visual_relevance", "tree_attention")
_COPY_BYTES, _PRODUCT_SIZE = 256 * 2**20, 1024


@dataclass
class Case:
    calls: dict[str, Callable[[], Any]]  # What is measured, by implementation; ours is the first
    num_bytes: int  # What must be read and written
    flops: int = 0  # Operations of its products
    dtype: torch.dtype = torch.float32  # Of these products
    # Of some implementations, how what a call returns becomes a tensor to be compared with ours.
    results: dict[str, Callable[[Any], torch.Tensor]] = field(default_factory=dict)
    # Why implementations that are not among the calls do not run here.
    notes: dict[str, str] = field(default_factory=dict)


def measure_us(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return median, 20th and 80th percentile of calls taken in turn, in microseconds (GPU: device time, cold L2)."""
    flush = torch.empty(_COPY_BYTES if ON_GPU else 0, dtype=torch.uint8, device=DEVICE)
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    for is_timed in [False] + [True] * rounds:
        for name, call in calls.items():
            flush.zero_()
            if ON_GPU:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                end.synchronize()
                elapsed_us = begin.elapsed_time(end) * 1e3
            else:
                start = time.perf_counter_ns()
                call()
                elapsed_us = (time.perf_counter_ns() - start) / 1e3
            if is_timed:
                times_us[name].append(elapsed_us)
    quantiles = {}
    for name, times in times_us.items():
        times.sort()
        quantiles[name] = (statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5])
    return quantiles


def rates(dtype: torch.dtype, size: int) -> tuple[float, float]:
    """Return what the device does in a microsecond: bytes read and written by a copy, operations of a product."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    left, right = torch.randn(2, size, size, device=DEVICE).to(dtype)
    times = measure_us({"copy": lambda: target.copy_(source), "product": lambda: left @ right}, 20)
    return 2 * _COPY_BYTES / times["copy"][0], 2 * size**3 / times["product"][0]


def rows_of(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    found = {impl: result(case.calls[impl]()).float().clone() for impl, result in case.results.items()}
    differences = {impl: float((result - next(iter(found.values()))).abs().max()) for impl, result in found.items()}
    bandwidth, rate = rates(case.dtype, _PRODUCT_SIZE)
    traffic, product = case.num_bytes / bandwidth, case.flops / rate
    times = measure_us(case.calls, rounds)
    for impl in (*case.calls, *case.notes):
        figures = [round(time, 3) for time in times[impl]] if impl in times else [None] * 3
        yield {
            "impl": impl,
            **dict(zip(("median", "p20", "p80"), figures, strict=True)),
            "unit": "us",
            "floor": round(max(traffic, product), 6),
            "traffic": round(traffic, 6),
            "product": round(product, 6),
            "bytes": case.num_bytes,
            "flops": case.flops,
            "max_difference": differences.get(impl),
            "note": case.notes.get(impl, ""),
            "bandwidth_gb_per_s": round(bandwidth / 1e3, 1),
        }


def sizes_of(axes: dict[str, list[Any]], given: list[str]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the axes' values, of which "name=value,value" replaces those of its axis."""
    axes = dict(axes)
    for name, _, values in (text.partition("=") for text in given):
        if name in axes:
            axes[name] = [type(axes[name][0])(value) for value in values.split(",")]
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=KERNELS, help=f"of {', '.join(KERNELS)}; default: all")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="AXIS=VALUES", help="values, comma-separated")
    parser.add_argument("--rounds", type=int, help="calls of each implementation per case")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    modules = {kernel: importlib.import_module(f"kernel_cases.{kernel}") for kernel in options.kernels}
    axes = {name for module in modules.values() for name in module.AXES}
    if unknown := {text.partition("=")[0] for text in options.sizes} - axes:
        parser.error(f"no axis {', '.join(sorted(unknown))}; there are {', '.join(sorted(axes))}")
    rows: list[dict[str, Any]] = []
    for kernel, module in modules.items():
        for size in sizes_of(module.AXES if ON_GPU else module.TINY, options.sizes):
            label = {"kernel": kernel, "case": " ".join(f"{name}={value}" for name, value in size.items())}
            for row in rows_of(module.case(**size), options.rounds or module.ROUNDS):
                rows.append(label | row)
                if not options.json:
                    show(rows[-1])
    if options.json:
        print(json.dumps({"rows": rows, "provenance": provenance()}))
    return rows


def show(row: dict[str, Any]) -> None:
    figures = row["note"] or "median {median:>10} p20 {p20:>10} p80 {p80:>10}".format(**row)
    floor = "floor {floor} us (traffic {traffic}, product {product})".format(**row)
    print(f"{row['kernel']} {row['case']} {row['impl']:>14}: {figures} {floor}", flush=True)


if __name__ == "__main__":
    # The cases import this module: it is one.
    sys.modules["bench_kernels"] = sys.modules["__main__"]
    main()
