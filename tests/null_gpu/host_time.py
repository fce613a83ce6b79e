"""Whose Python the host time of a step is spent in: a timer samples the stack; touches signals and nothing else.

    python -m null_gpu.host_time [--steps N] [--top N] NAME...

prints, for each of `CASES`, the milliseconds of a decode step and where those of ours go, by function.
"""

import argparse
import collections
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# Between two samples; a sample takes some 3 us itself.
INTERVAL_S = 5e-5
_STEPS_AT_ONCE = 10  # of one set of requests, which must not end meanwhile
_OURS = ("/vllm_vidspec/", "/vidspec_kernels/")
# Ours that wrap vLLM's own work of a step: what vLLM does inside them is vanilla's as well.
_WRAPPERS = {
    *("execute_model", "sample_tokens", "sample", "prepare_inputs", "add_requests", "finish_requests"),
    *("_remove_request", "take_draft_token_ids", "__call__", "get_output", "_get_logprobs_tensors"),
    "prepare",  # of positions and attention metadata, in `compat.model`
}
# Where ours enters the draft's network: what its layers take to launch is the draft's.
_FORWARD = {"_run", "compute_logits", "embed"}
_FORWARD_FILE = "/draft/model.py"
VANILLA, FORWARD = "vanilla", "draft's layers"
# Frames that say less than their callers.
_PARTS_OF_A_KERNEL = ("api.py", "triton.py", "reference.py", "cpu.py")  # are named by their folder
_NOBODY = ("/vidspec_kernels/dispatch.py", "<")


class Samples:
    """Stacks of the main thread, as a timer has found them."""

    def __init__(self) -> None:
        self.stacks: collections.Counter[tuple[CodeType, ...]] = collections.Counter()

    def note(self, _signal: int, frame: FrameType | None) -> None:
        """Take the stack that a signal has interrupted."""
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self.stacks[tuple(stack)] += 1
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S)  # not before: a slow machine would never leave this method

    def shares(self, is_by_entry: bool = False) -> dict[str, float]:
        """Return the share of the time by owner: `VANILLA`, `FORWARD`, or `file.py function` of ours; see `owner`."""
        found: collections.Counter[str] = collections.Counter()
        for stack, times in self.stacks.items():
            found[owner(stack, is_by_entry)] += times
        return {name: times / found.total() for name, times in found.most_common()}


def owner(stack: tuple[CodeType, ...], is_by_entry: bool = False) -> str:
    """Return whose time a sample is, given its stack, innermost first.

    Args:
        stack: Of the sample.
        is_by_entry: Name the function of ours that vLLM has called, not the innermost one.
    """
    label, entry, in_vllm = "", "", False
    for code in stack:
        path, name = code.co_filename, code.co_name
        if any(part in path for part in _OURS):
            if in_vllm and not label and name in _WRAPPERS:
                return VANILLA
            if name in _FORWARD and path.endswith(_FORWARD_FILE):
                return FORWARD
            folder, _, file = path.rpartition("/")
            if file in _PARTS_OF_A_KERNEL:
                file = f"{folder.rpartition('/')[2]}.py"
            found = f"{file} {name}"
            entry = entry if entry and name in _WRAPPERS else found
            if not label and not (path.endswith(_NOBODY[0]) or name.startswith(_NOBODY[1])):
                label = found
        in_vllm = in_vllm or "/vllm/" in path
    return (entry if is_by_entry else label or entry) or VANILLA


@contextlib.contextmanager
def sampling(seen: Samples) -> Iterator[None]:
    """Sample the main thread's stack."""
    before = signal.signal(signal.SIGALRM, seen.note)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL_S)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def own_ms(shares: dict[str, float], step_ms: float) -> float:
    """Return the milliseconds of a step that are neither vanilla's nor the draft's layers'."""
    return step_ms * sum(share for name, share in shares.items() if name not in (VANILLA, FORWARD))


def profile(session: Any, num_steps: int) -> tuple[float, Samples]:
    """Return the median milliseconds of a session's decode step, not sampled, and samples of others."""
    times, seen = [], Samples()
    while len(times) < num_steps:
        with session.decoding(**session.case.sampling):
            session.probe("emulate", False)
            for _ in range(_STEPS_AT_ONCE):
                begun = time.perf_counter()
                session.step()
                times.append((time.perf_counter() - begun) * 1e3)
            with sampling(seen):
                for _ in range(_STEPS_AT_ONCE):
                    session.step()
    return statistics.median(times), seen


def main() -> int:
    """Print where each case's host time goes."""
    from null_gpu import emulate
    from null_gpu.cases import CASES
    from null_gpu.engine_run import Measured, start

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CASES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--top", type=int, default=25, help="functions of ours to name")
    options = parser.parse_args()
    emulate.zero_blocks()
    for name in options.names:
        session = start(CASES[name], Measured(name))
        step_ms, seen = profile(session, options.steps)
        session.close()
        print(f"{name}: {step_ms:.3f} ms a step, ours {own_ms(seen.shares(), step_ms):.3f} ms", flush=True)
        for title, shares in (("called by vLLM", seen.shares(is_by_entry=True)), ("innermost", seen.shares())):
            print(f"  {title}", flush=True)
            for label, share in list(shares.items())[: options.top]:
                print(f"  {1e3 * step_ms * share:9.1f} us  {label}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
