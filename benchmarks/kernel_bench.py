"""What the kernel benchmarks share: timing with quantiles, the bandwidth floor, provenance, CSV / JSON output."""

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing

_COPY_BYTES = 256 * 2**20


def device() -> torch.device:
    """Return the GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def implementations() -> tuple[str, ...]:
    """Return what is measured here: kernel and peer on a GPU, on a CPU only the reference."""
    return ("triton", "torch") if torch.cuda.is_available() else ("torch",)


def measure_us(call: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return the median, 20th and 80th percentile of a call in microseconds (GPU: device time, L2 flushed)."""
    if torch.cuda.is_available():
        median, p20, p80 = triton.testing.do_bench(call, rep=repeats, quantiles=[0.5, 0.2, 0.8])
        return median * 1e3, p20 * 1e3, p80 * 1e3
    call()
    times_us = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start) / 1e3)
    times_us.sort()
    return statistics.median(times_us), times_us[len(times_us) // 5], times_us[len(times_us) * 4 // 5]


def measure_interleaved_us(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return what `measure_us` does for several calls, taken in turn: all meet the same moments of the machine."""
    on_gpu = torch.cuda.is_available()
    flush = torch.empty(_COPY_BYTES if on_gpu else 0, dtype=torch.uint8, device=device())
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    for timed in [False] + [True] * rounds:
        for name, call in calls.items():
            flush.zero_()
            if on_gpu:
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
            if timed:
                times_us[name].append(elapsed_us)
    quantiles = {}
    for name, times in times_us.items():
        times.sort()
        quantiles[name] = (statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5])
    return quantiles


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most memory that a call holds at once beyond what was there, as torch's allocator sees it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Read at the profiler's first use, which otherwise logs two lines to standard error each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for _, num_bytes in sorted(changes, key=lambda change: change[0]):
        held += num_bytes
        peak = max(peak, held)
    return peak


def product_flops_per_us(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the measured rate of a square matrix product."""
    left, right = torch.randn(2, size, size, device=device()).to(dtype)
    median, _, _ = measure_us(lambda: left @ right, repeats=20)
    return 2 * size**3 / median


def bandwidth_bytes_per_us() -> float:
    """Return the measured copy bandwidth of the device (bytes read plus bytes written)."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    median, _, _ = measure_us(lambda: target.copy_(source), repeats=20)
    return 2 * _COPY_BYTES / median


def provenance() -> dict[str, str]:
    """Return what a row needs to be repeated: device, versions, git SHA and command."""
    sha = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "git_sha": sha.stdout.strip() or "unknown",
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the command line that every kernel benchmark has."""
    arguments = argparse.ArgumentParser(description=doc)
    arguments.add_argument("--sizes", default="1,8,64,256,1024", help="requests in the batch, comma-separated")
    arguments.add_argument("--repeats", type=int, default=100, help="calls (CPU) or milliseconds (GPU) per measurement")
    arguments.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    return arguments


def run(
    arguments: argparse.Namespace, kernel: str, cases: Iterable[tuple[int, int, Callable[[str], Callable[[], Any]]]]
) -> list[dict[str, Any]]:
    """Measure every case with every implementation and write the rows.

    Args:
        arguments: Parsed from `parser`.
        kernel: Its name.
        cases: (requests, bytes that must move, function that binds an implementation to a call) of each size.

    Returns:
        The rows.
    """
    where, bandwidth = provenance(), bandwidth_bytes_per_us()
    rows: list[dict[str, Any]] = []
    for num_reqs, num_bytes, bind in cases:
        for impl in implementations():
            median, p20, p80 = measure_us(bind(impl), arguments.repeats)
            rows.append(
                {
                    "kernel": kernel,
                    "impl": impl,
                    "num_reqs": num_reqs,
                    "median": round(median, 3),
                    "p20": round(p20, 3),
                    "p80": round(p80, 3),
                    "floor": round(num_bytes / bandwidth, 6),
                    "unit": "us",
                    "bytes": num_bytes,
                    "bandwidth_gb_per_s": round(bandwidth / 1e3, 1),
                    **where,
                }
            )
    write(arguments, rows)
    if not arguments.json:
        print(f"{kernel} on {where['device']}: microseconds")
        for row in rows:
            print("{impl:>7} {num_reqs:>6} median {median:>9} p20 {p20:>9} p80 {p80:>9} floor {floor}".format(**row))
    return rows


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the rows to the CSV file and, as JSON, to standard output, where asked."""
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if arguments.json:
        print(json.dumps({"rows": rows}))
