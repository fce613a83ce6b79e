"""Where the host time of a step is spent: a timer samples the Python stack of the main thread."""

import collections
import contextlib
import signal
from collections.abc import Iterator
from types import CodeType, FrameType

# Between two samples; a sample takes some 3 us itself.
INTERVAL_S = 5e-5
_OURS = ("/vllm_vidspec/", "/vidspec_kernels/")
# Methods that wrap vLLM's own work of a step, which vanilla vLLM does as well.
_WRAPPERS = {
    *("execute_model", "sample_tokens", "sample", "prepare_inputs", "add_requests", "finish_requests"),
    *("_remove_request", "take_draft_token_ids", "__call__", "get_output", "_get_logprobs_tensors"),
    "prepare",  # of positions and attention metadata, in `compat.model`
}
# Entrances of the draft's network, whose layers take the time to launch.
_FORWARD = {"_run", "compute_logits", "embed"}
_FORWARD_FILE = "/draft/model.py"
VANILLA, FORWARD = "vanilla", "draft's layers"
_PARTS_OF_A_KERNEL = ("api.py", "triton.py", "reference.py", "cpu.py")  # are named by their folder
# Frames that say less than their callers.
_UNINFORMATIVE = ("/vidspec_kernels/dispatch.py", "<")


class Samples:
    """Stacks of the main thread, as a timer found them."""

    def __init__(self) -> None:
        self.stacks: collections.Counter[tuple[CodeType, ...]] = collections.Counter()

    def note(self, _signal: int, frame: FrameType | None) -> None:
        """Record the stack that a signal has interrupted."""
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self.stacks[tuple(stack)] += 1
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S)  # not before: a slow machine would never leave this method

    def shares(self) -> dict[str, float]:
        """Return the share of the time by owner; see `owner`."""
        found: collections.Counter[str] = collections.Counter()
        for stack, times in self.stacks.items():
            found[owner(stack)] += times
        return {name: times / found.total() for name, times in found.most_common()}


def owner(stack: tuple[CodeType, ...]) -> str:
    """Return the owner of a sample, given its stack, innermost first: `VANILLA`, `FORWARD`, or `file.py function`."""
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
            entry = f"{file} {name}"
            if not (label or path.endswith(_UNINFORMATIVE[0]) or name.startswith(_UNINFORMATIVE[1])):
                label = entry
        in_vllm = in_vllm or "/vllm/" in path
    return label or entry or VANILLA


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
