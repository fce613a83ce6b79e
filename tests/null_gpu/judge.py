"""Compares a decode step on the null GPU with vanilla vLLM's in the same mode; pure, reads measurements."""

import re
import statistics
from collections.abc import Sequence
from typing import Any

# Counters of host-device synchronisation, blocking copies and allocations, with the calls that they add up.
WAITS = {
    "sync": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    "copy.blocking": ("copy.h2d_pageable", "copy.d2h_pageable"),
    "alloc.device": ("cudaMalloc", "cuMemAlloc"),
    "alloc.pinned": ("cudaHostAlloc", "cudaMallocHost"),
    "alloc.physical": ("cuMemCreate",),
}
_OURS = ("vllm_vidspec/", "null_gpu/plants.py")
_THREAD = " _bootstrap_inner"  # the outermost frame of a thread
# vLLM's helpers, whose copies belong to their callers.
_COPY_HELPERS = ("vllm/utils/torch_utils.py", "worker/gpu/buffer_utils.py")
# Counters that must stay zero at all times: of what a device refuses, and of stubs that had to be counted otherwise.
FAULTS = re.compile(r"illegal|bad_grid|nccl\.error|stub:cu(da)?[A-Z]\w*(Launch|Memcpy|Memset|Alloc|Synchronize|Query)")


def total(measured: dict[str, Any], counter: str) -> int:
    """Return a counter's sum over the counted steps."""
    return sum(step.get(counter, 0) for step in measured["steps"])


def per_step(measured: dict[str, Any], counter: str) -> float:
    """Return a counter's median over the counted steps."""
    return statistics.median(step.get(counter, 0) for step in measured["steps"])


def callers(measured: dict[str, Any], counter: str, vanilla: dict[str, Any] | None = None) -> list[tuple[int, str]]:
    """Return count and Python line of a counter's events, most frequent first; not the lines that vanilla has too."""
    known = set(vanilla["lines"]) if vanilla is not None else set()
    rows = [
        (times, key.replace("|", ": ", 1))
        for key, (times, _) in measured["lines"].items()
        if key.startswith(WAITS.get(counter, (counter,))) and key not in known
    ]
    return sorted(rows, reverse=True)


def extra_waits(measured: dict[str, Any], vanilla: dict[str, Any], allowed: Sequence[str] = ()) -> list[str]:
    """Return a complaint for each of `WAITS` more frequent than vanilla's; lines of `allowed` may wait once a step."""
    complaints, steps = [], len(measured["steps"])
    for counter in WAITS:
        # A wait of vanilla's output thread may fall into the step after the last one counted.
        bound = steps * max(total(vanilla, counter) / len(vanilla["steps"]), per_step(vanilla, counter))
        found, lines = total(measured, counter), callers(measured, counter, vanilla)
        for place in allowed:
            found_there = [(times, line) for times, line in lines if _first(line) == place]
            # A wait of our own threads, too, may belong to the step before or after.
            most = steps + any(line.endswith(_THREAD) for _, line in found_there)
            bound += min(most, sum(times for times, _ in found_there))
        if found > bound:
            named = "\n    ".join(f"{times} x {line}" for times, line in lines) or "(no line)"
            complaints.append(f"{counter}: {found} in {steps} decode steps, {bound:g} allowed\n    {named}")
    return complaints


def _first(line: str) -> str:
    """Return `file.py function` of the innermost line of `event: dir/file.py:line function < ...`."""
    path, _, function = line.split(": ", 1)[1].split(" < ")[0].rpartition(" ")
    return f"{path.split('/')[-1].split(':')[0]} {function}"


def unknown_transfers(measured: dict[str, Any], known: Sequence[str]) -> list[str]:
    """Return our lines that copy between host and device, but for known ones (`file.py function`), once a step."""
    steps, found = len(measured["steps"]), []
    for times, line in callers(measured, "copy.h2d") + callers(measured, "copy.d2h"):
        frames = [frame for frame in line.split(": ", 1)[1].split(" < ") if not frame.startswith(_COPY_HELPERS)]
        is_ours = bool(frames) and any(part in frames[0] for part in _OURS)
        if is_ours and not (_first(f": {frames[0]}") in known and times <= steps):
            found.append(f"{times} x {line}")
    return found


def replays(measured: dict[str, Any], function: str) -> int:
    """Return how many graphs were launched below a function in the counted steps."""
    launched = callers(measured, "cudaGraphLaunch")
    return sum(times for times, line in launched if any(frame.endswith(f" {function}") for frame in line.split(" < ")))


def faults(measured: dict[str, Any]) -> list[str]:
    """Return what a device would have refused, at any time."""
    everything = [measured["start"], measured["prefill"], *measured["steps"]]
    names = {name for counts in everything for name in counts if FAULTS.match(name)}
    return sorted(f"{name}: {sum(counts.get(name, 0) for counts in everything)}" for name in names)
