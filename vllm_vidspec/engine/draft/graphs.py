"""DraftGraphs: the parts of a draft step as CUDA graphs, in vLLM's own graph manager; without graphs, functions."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

logger = init_logger("vllm.vidspec")

Run = Callable[[], object]
_SPARSE = 4  # sizes of the kind of steps that is not the default: each so many times the one before


@dataclass(frozen=True)
class Part(BatchExecutionDescriptor):
    """What one graph holds: a part of a draft step, for so many requests."""

    name: str = ""
    level: int = 0  # of a tree, where the part is one of its levels
    max_drafts: int = 0  # draft tokens of the step, where the part depends on them
    shape: str = ""  # of a tree's part, whose


def mode_of_draft(mode: CUDAGraphMode) -> CUDAGraphMode:
    """Return the draft's mode where vLLM has resolved the target's to `mode`.

    What a target must run in pieces (`-O1`, a KV connector by layers) is none of its draft's. No graphs at all is the
    user's word, or vLLM's last one, for both.
    """
    return CUDAGraphMode.FULL_DECODE_ONLY if mode else CUDAGraphMode.NONE


@functools.cache
def part(name: str, num_reqs: int, level: int = 0, max_drafts: int = 0, shape: str = "") -> Part:
    return Part(CUDAGraphMode.FULL, num_reqs, num_reqs, name=name, level=level, max_drafts=max_drafts, shape=shape)


class DraftGraphs(CudaGraphManager):
    """Runs the parts of draft steps: as a graph where one was captured, else as the function that would be captured.

    What a part reads and writes has a fixed address, and no Python number of it follows from a step. vLLM's manager
    captures, and drops the graphs after its memory profile.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        mode: CUDAGraphMode,  # what vLLM resolved for the target; see `mode_of_draft`
        max_num_reqs: int,
        mostly_processed: bool = False,  # whether a request that names no sampling parameters has its logits processed
    ):
        mode = mode_of_draft(mode)
        super().__init__(vllm_config, device, mode, decode_query_len=1)
        self._is_capturing, self._mostly_processed = False, mostly_processed
        self.is_wanted = bool(mode)  # whether a step without a graph is a fallback
        sizes = self.compilation_config.cudagraph_capture_sizes or () if mode else ()
        self.sizes = batch_sizes(sizes, max_num_reqs)
        self.max_tokens = self.compilation_config.max_cudagraph_capture_size or 0
        if not self.is_wanted and device.type == "cuda":
            logger.info_once("vidspec: drafts run without CUDA graphs: cudagraph_mode is NONE")

    def _init_candidates(self) -> None:
        """Do nothing: the drafter says which parts there are, and which one runs."""

    @property
    def is_on(self) -> bool:
        """Whether parts are captured, so that they must not depend on a step's Python numbers."""
        return bool(self.sizes)

    def give_up(self, why: str) -> None:
        """Have no graphs: steps run as functions, without padding."""
        if self.is_on:
            logger.warning_once("vidspec: drafts run without CUDA graphs: %s", why)
        self.sizes = []

    def sizes_of(self, width: int, is_processed: bool = False) -> list[int]:
        """Return the numbers of requests that have graphs, of steps whose widest forward has `width` tokens of each.

        No forward in a graph has more tokens than the target's may have. Steps whose logits are processed have graphs
        of their own. Of both kinds the one that is not asked for by default has few sizes: graphs cost memory and
        start-up whether they are replayed or not.
        """
        sizes = [size for size in self.sizes if size * width <= self.max_tokens]
        return sizes if is_processed == self._mostly_processed else sparse(sizes)

    def size_for(self, num_reqs: int, width: int, is_processed: bool = False) -> int:
        """Return to how many requests a step of `num_reqs` is padded: not at all without a graph that holds them."""
        return next((size for size in self.sizes_of(width, is_processed) if size >= num_reqs), num_reqs)

    def capture_parts(self, parts: Iterable[Part], prepare: Callable[[Part], Run]) -> None:
        """Capture parts; `prepare` readies the buffers for a run of padding alone, and returns a part's function."""
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
    """Return the numbers of requests that have graphs: those of vLLM's sizes that are a third more than the one before,
    up to what holds `max_num_reqs`, as a draft step is several graphs, and reads the weights whatever rows are padding.
    """
    most, sizes = min(max_num_reqs, max(capture_sizes, default=0)), [0]
    for size in sorted(capture_sizes):
        if size < most and 3 * size >= 4 * sizes[-1]:
            sizes.append(size)
    return sizes[1:] + [most] * (most > 0)


def sparse(sizes: Sequence[int]) -> list[int]:
    """Return those of ascending sizes that are `_SPARSE` times the one before, and the largest."""
    found: list[int] = []
    for size in sizes:
        if not found or size >= _SPARSE * found[-1] or size == sizes[-1]:
            found.append(size)
    return found
