"""How a kernel is timed beside its peers: a case, calls in turn, and the floor of the device at that minute."""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
IMPL: Any = "triton" if ON_GPU else "numba"  # of a kernel that has no peer: on a CPU its loop
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


def _rows_of(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
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


def sizes_of(axes: dict[str, list[Any]], given: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the axes' values, of which "name=value,value" replaces those of its axis."""
    axes = dict(axes)
    for name, _, values in (text.partition("=") for text in given):
        if name in axes:
            axes[name] = [type(axes[name][0])(value) for value in values.split(",")]
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def rows(
    kernel: str, given: Sequence[str] = (), rounds: int | None = None, tiny: bool = not ON_GPU
) -> Iterator[dict[str, Any]]:
    """Measure a kernel; yield a row for each case and implementation.

    `given` replaces sizes as in `sizes_of`, `rounds` those of the kernel's file.
    """
    module = importlib.import_module(f"benchmarks.kernels.{kernel}")
    for size in sizes_of(module.TINY if tiny else module.AXES, given):
        keys = {"kernel": kernel, "case": " ".join(f"{name}={value}" for name, value in size.items())}
        for row in _rows_of(module.case(**size), rounds or module.ROUNDS):
            yield keys | row
