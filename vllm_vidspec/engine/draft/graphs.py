"""DraftGraphs: the parts of a draft step as CUDA graphs, in vLLM's own graph manager; without graphs, functions."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

Run = Callable[[], object]


@dataclass(frozen=True)
class Part(BatchExecutionDescriptor):
    """What one graph holds: a part of a draft step, for so many requests.

    Attributes:
        name: Of the part.
        level: Of a tree, where the part is one of its levels.
        max_drafts: Draft tokens of the step, where the part depends on them.
    """

    name: str = ""
    level: int = 0
    max_drafts: int = 0


@functools.cache
def part(name: str, num_reqs: int, level: int = 0, max_drafts: int = 0) -> Part:
    """Return the key of a part for `num_reqs` requests, padding included."""
    return Part(CUDAGraphMode.FULL, num_reqs, num_reqs, name=name, level=level, max_drafts=max_drafts)


class DraftGraphs(CudaGraphManager):
    """Runs the parts of draft steps: as a graph where one was captured, else as the function that would be captured.

    What a part reads and writes has a fixed address, and no Python number of it follows from a step. vLLM's manager
    captures, in its pool, with its collectives registered; it also drops the graphs after its memory profile.

    Args:
        vllm_config: vLLM's.
        device: Of the draft.
        mode: What vLLM resolved for the target; the draft has graphs if whole forwards of the target have.
        max_num_reqs: Most requests of a step.
    """

    def __init__(self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode, max_num_reqs: int):
        is_on = mode.decode_mode() == CUDAGraphMode.FULL
        super().__init__(
            vllm_config,
            device,
            CUDAGraphMode.FULL_DECODE_ONLY if is_on else CUDAGraphMode.NONE,
            decode_query_len=1,
        )
        self._is_capturing = False
        sizes = self.compilation_config.cudagraph_capture_sizes or () if is_on else ()
        self.sizes = batch_sizes(sizes, max_num_reqs)
        self.max_tokens = self.compilation_config.max_cudagraph_capture_size or 0

    def _init_candidates(self) -> None:
        """Do nothing: the drafter says which parts there are, and which one runs."""

    @property
    def is_on(self) -> bool:
        """Whether parts are captured, so that they must not depend on a step's Python numbers."""
        return bool(self.sizes)

    def give_up(self) -> None:
        """Have no graphs: steps run as functions, without padding."""
        self.sizes = []

    def sizes_of(self, width: int) -> list[int]:
        """Return the numbers of requests that have graphs, of steps whose widest forward has `width` tokens of each.

        No forward in a graph has more tokens than the target's may have.
        """
        return [size for size in self.sizes if size * width <= self.max_tokens]

    def size_for(self, num_reqs: int, width: int) -> int:
        """Return to how many requests a step of `num_reqs` is padded: not at all without a graph that holds them."""
        return next((size for size in self.sizes_of(width) if size >= num_reqs), num_reqs)

    def capture_parts(self, parts: Iterable[Part], prepare: Callable[[Part], Run]) -> None:
        """Capture parts.

        Args:
            parts: What to capture.
            prepare: Makes the buffers ready for a run of nothing but padding; returns the part's function.
        """
        self._capture_descs = {CUDAGraphMode.FULL: sorted(parts, key=lambda key: -key.num_tokens)}

        def create(key: Part, warmup: bool) -> Callable[[CUDAGraphMode], object]:
            run = prepare(key)
            return lambda _: run()

        self._is_capturing = True
        try:
            self.capture(create, "Capturing draft CUDA graphs")  # type: ignore[arg-type]
        finally:
            self._is_capturing = False

    def run(self, key: Part, function: Run) -> bool:
        """Run a part; return whether by its graph. A part inside another that is being captured becomes part of it."""
        if self._is_capturing or key not in self.graphs:
            function()
            return False
        self.run_fullgraph(key)
        return True


def batch_sizes(capture_sizes: Sequence[int], max_num_reqs: int) -> list[int]:
    """Return the numbers of requests that have graphs.

    Those of vLLM's sizes that are a third more than the one before, up to what holds `max_num_reqs`: a draft step is
    several graphs where vLLM has one, and reads the weights however many rows are padding.
    """
    most, sizes = min(max_num_reqs, max(capture_sizes, default=0)), [0]
    for size in sorted(capture_sizes):
        if size < most and 3 * size >= 4 * sizes[-1]:
            sizes.append(size)
    return sizes[1:] + [most] * (most > 0)
