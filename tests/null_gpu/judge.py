"""What a decode step on the null GPU may do beside what vanilla does in the same mode; pure, reads measurements."""

import statistics
from collections.abc import Sequence
from typing import Any

# What keeps the host waiting, or takes memory: nothing of it may be ours.
WAITS = {
    "sync": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    "copy.blocking": ("copy.h2d_pageable", "copy.d2h_pageable"),
    "alloc.device": ("cudaMalloc", "cuMemAlloc"),
    "alloc.pinned": ("cudaHostAlloc", "cudaMallocHost"),
    "alloc.physical": ("cuMemCreate",),
}
_OURS = ("vllm_vidspec/", "null_gpu/plants.py")
_THREAD = " _bootstrap_inner"  # the end of a line that a thread of its own has waited on
# vLLM's helpers that copy for whoever calls them.
_ERRAND_BOYS = ("vllm/utils/torch_utils.py", "worker/gpu/buffer_utils.py")
# What must not happen at all, at no time.
FAULTS = ("illegal", "bad_grid", "nccl.error")


def total(measured: dict[str, Any], counter: str) -> int:
    """Return a counter's sum over the counted steps."""
    return sum(step.get(counter, 0) for step in measured["steps"])


def per_step(measured: dict[str, Any], counter: str) -> float:
    """Return a counter's median over the counted steps."""
    return statistics.median(step.get(counter, 0) for step in measured["steps"])


def culprits(measured: dict[str, Any], counter: str, vanilla: dict[str, Any] | None = None) -> list[tuple[int, str]]:
    """Return how often and from where a counter was counted, the most frequent first; without vanilla's own lines."""
    known = set(vanilla["lines"]) if vanilla is not None else set()
    rows = [
        (times, key.replace("|", ": ", 1))
        for key, (times, _) in measured["lines"].items()
        if key.startswith(WAITS.get(counter, (counter,))) and key not in known
    ]
    return sorted(rows, reverse=True)


def waits_of_ours(measured: dict[str, Any], vanilla: dict[str, Any], allowed: Sequence[str] = ()) -> list[str]:
    """Return one complaint per kind of wait that is more frequent per step than vanilla's, with the lines to blame.

    Args:
        measured: A configuration of ours.
        vanilla: Vanilla vLLM in the same mode.
        allowed: `file.py function` of lines that may wait once per step.
    """
    complaints, steps = [], len(measured["steps"])
    for counter in WAITS:
        # A wait of vanilla's own output thread may fall into the step behind the last that is counted.
        bound = steps * max(total(vanilla, counter) / len(vanilla["steps"]), per_step(vanilla, counter))
        found, lines = total(measured, counter), culprits(measured, counter, vanilla)
        for place in allowed:
            found_there = [(times, line) for times, line in lines if _first(line) == place]
            # As of vanilla's thread: a wait of ours on a thread of its own may be of the step before or behind.
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


def crossings_of_ours(measured: dict[str, Any], known: Sequence[str]) -> list[str]:
    """Return the lines of ours that copy between host and device, beside known ones that do once per step at most.

    Args:
        measured: A configuration of ours.
        known: `file.py function` of lines that may.
    """
    steps, found = len(measured["steps"]), []
    for times, line in culprits(measured, "copy.h2d") + culprits(measured, "copy.d2h"):
        frames = [frame for frame in line.split(": ", 1)[1].split(" < ") if not frame.startswith(_ERRAND_BOYS)]
        is_ours = bool(frames) and any(part in frames[0] for part in _OURS)
        if is_ours and not (_first(f": {frames[0]}") in known and times <= steps):
            found.append(f"{times} x {line}")
    return found


def replays(measured: dict[str, Any], function: str) -> int:
    """Return how many graphs a function has launched in the counted steps, directly or not."""
    launched = culprits(measured, "cudaGraphLaunch")
    return sum(times for times, line in launched if any(frame.endswith(f" {function}") for frame in line.split(" < ")))


def faults(measured: dict[str, Any]) -> list[str]:
    """Return what a device would have refused at any time."""
    everything = [measured["start"], measured["prefill"], *measured["steps"]]
    names = {name for counts in everything for name in counts if name.startswith(FAULTS)}
    return sorted(f"{name}: {sum(counts.get(name, 0) for counts in everything)}" for name in names)
