"""CUDA graphs on the CPU: what vLLM's graph manager captures with, replaced by the recorder.

The manager, and whatever derives from it, stays vLLM's: which graphs there are, the warm-up before a capture, capture
and replay run its own code.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock
from weakref import WeakSet

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

from tests.graph_emulator.attention import attention_as_on_a_gpu
from tests.graph_emulator.launches import kernels_as_entries
from tests.graph_emulator.recorder import Recording
from vllm_vidspec.engine.draft.backend import LocalBackend

SIZES = (1, 2, 4, 8)  # numbers of requests that are captured
MAX_TOKENS = 512  # of a forward in a graph


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    alive: ClassVar[WeakSet["Graph"]] = WeakSet()

    def __init__(self, *_args: Any, **_kwargs: Any):
        self.recording = Recording(foreign=self._is_anothers)
        Graph.alive.add(self)

    def _is_anothers(self, address: int) -> bool:
        return any(graph is not self and graph.recording.owns(address) for graph in Graph.alive)

    def replay(self) -> None:
        """Run what was captured."""
        self.recording.replay()


def capture(graph: Graph, *_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager:
    """Stand in for `torch.cuda.graph`."""
    return graph.recording.open()


@contextlib.contextmanager
def emulated_graphs() -> Iterator[None]:
    """Let graphs be captured and replayed on the CPU; entered before the engine is built."""
    nothing, init = contextlib.nullcontext, LocalBackend.make_graphs

    def make_with_graphs(self: Any, _mode: CUDAGraphMode) -> Any:
        compilation = self._vllm_config.compilation_config
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(SIZES), 512
        return init(
            self, CUDAGraphMode.PIECEWISE
        )  # of the target: what is captured of a draft is not the target's matter

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", capture),
            (LocalBackend, "make_graphs", make_with_graphs),
            (cudagraph_utils, "graph_capture", lambda **_: nothing()),
            (cudagraph_utils, "capture_pool", lambda *_: nothing()),
            (cudagraph_utils, "current_stream", lambda: None),
            (type(current_platform), "get_global_graph_pool", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(kernels_as_entries())
        stack.enter_context(attention_as_on_a_gpu())
        yield
