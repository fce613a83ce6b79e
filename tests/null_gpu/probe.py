"""Measures one process of an engine: emulation, trace, counters; over vLLM's `collective_rpc` if there are several."""

import contextlib
from typing import Any

import torch

from null_gpu import device, emulate

# The stand-in of cuDNN has no plans for a convolution to offer: PyTorch's own is launched in its place.
torch.backends.cudnn.enabled = False

TRACED = ("sync", "copy", "alloc", "illegal", "graph")


class Probe:
    def __init__(self) -> None:
        self._emulating = contextlib.ExitStack()
        self._tracing = contextlib.ExitStack()
        self._seen: dict[str, list[int]] = {}

    def emulate(self, on: bool) -> None:
        self._emulating.close()
        if on:
            self._emulating.enter_context(emulate.emulating())

    def trace(self, on: bool) -> dict[str, list[int]]:
        """Begin or end a trace; return the lines so far, see `device.trace`."""
        self._tracing.close()
        lines = dict(self._seen)
        if on:
            self._seen = self._tracing.enter_context(device.trace(*TRACED))
        return lines

    def counters(self) -> dict[str, int]:
        return dict(device.counters())

    def not_emulated(self) -> dict[str, str]:
        return dict(emulate.failed)


class WorkerProbe:
    """vLLM's `worker_extension_cls`: gives every worker a probe of its own process."""

    def null_gpu(self, name: str, *args: Any) -> Any:
        if not hasattr(self, "_null_gpu_probe"):
            self._null_gpu_probe = Probe()
            emulate.zero_blocks()
        return getattr(self._null_gpu_probe, name)(*args)
