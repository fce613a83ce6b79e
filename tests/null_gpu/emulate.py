"""Computes on the host what kernels would compute on a GPU, so that what the host reads from the device is plausible.

Three parts: blocks of PyTorch's caching allocator read as zeros; Triton kernels also run in Triton's interpreter;
PyTorch's operators also run on the CPU. All of them work on the null GPU's memory, which is host memory, and none calls
the null runtime: its counters stay those of the engine. Replays of a `Graph` are computed too. Compiled kernels
(attention, norms, vLLM's own operators) and replays of any other graph write nothing, so an engine's logits mean
nothing, and neither does its acceptance.

A kernel that cannot be emulated is noted in `failed` once, and does nothing.
"""

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.runtime.interpreter as triton_interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import JITFunction

from null_gpu import device
from vidspec_kernels.dispatch import LaunchPlan

# Kernels whose results no host code reads, slow in the interpreter; top-p does not end on meaningless logits.
_LEAVE_KERNELS = re.compile(
    r"mrope|rotary|^triton_|_attn_|attention|merge|relevance|guidance|row_stats|visual|rms|silu|topp|candidates|mm_input"
)
_LEAVE_OPERATORS = re.compile(
    r"aten::(empty|new_empty|resize|set_|record_stream|_pin|is_pinned|_local_scalar|detach|alias|lift|_unsafe_view"
    r"|_reshape_alias|view)"
)
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
_MOST_ELEMENTS = 1 << 22

failed: dict[str, str] = {}  # the error by kernel or operator
_is_on = False
_recording: "Graph | None" = None  # the graph that is being captured


def zero_blocks() -> None:
    """Let every block of PyTorch's caching allocator read as zeros from here on, on every device."""
    torch.cuda.init()  # the allocators of the devices have to exist
    ctypes.CDLL("libnullgpu_torch.so").ng_zero_blocks()


@contextlib.contextmanager
def emulating() -> Iterator[None]:
    global _is_on
    _install()
    _is_on = True
    try:
        with _Operators():
            yield
    finally:
        _is_on = False


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the memory of a tensor of the null GPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())


def _note(name: str, error: BaseException) -> None:
    if name not in failed:
        failed[name] = repr(error)[:300]
        sys.stderr.write(f"[null GPU] not emulated: {name}: {failed[name]}\n")


class _Guarded:
    """The interpreter's memory access, which refuses pointers outside all memory: garbage must not end the process."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def load(self, pointers, mask, *rest):
        _check_pointers(pointers, mask)
        return self._real.load(pointers, mask, *rest)

    def store(self, pointers, value, mask):
        _check_pointers(pointers, mask)
        return self._real.store(pointers, value, mask)


def _check_pointers(pointers, mask) -> None:
    used = pointers[mask.astype(bool)] if mask is not None else pointers
    if used.size and not all(device.where(int(pointer)) for pointer in (used.min(), used.max())):
        raise RuntimeError("a pointer outside all device and pinned memory")


_run, _call, _launch = JITFunction.run, JITFunction.__call__, LaunchPlan.__call__
_interpreted: dict[int, tuple] = {}
_depth = 0  # of interpreted kernels that call each other


def to_host(tree: Any) -> Any:
    """Return a structure in which each tensor of the null GPU is a CPU tensor on the same memory."""
    return tree_map(lambda leaf: alias(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf, tree)


def to_device(tree: Any) -> Any:
    """Return a structure with a copy on the null GPU of each CPU tensor in it; nothing is counted as a transfer."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_cuda:
            return leaf
        out = torch.empty_like(leaf, device="cuda")
        alias(out).copy_(leaf)
        return out

    with _disable_current_modes():
        return tree_map(moved, tree)


def launched(function: Callable) -> Callable:
    """Return a function of host tensors as a kernel of the null GPU; nothing of it is counted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for leaf in tree_flatten((args, kwargs))[0]:
            is_host = isinstance(leaf, torch.Tensor) and not leaf.is_cuda
            assert not (is_host and leaf.ndim), f"a kernel was given a host tensor of {list(leaf.shape)}"
        args, kwargs = to_host((args, kwargs))  # of a graph: its containers and numbers are those of the capture
        with _disable_current_modes():
            out = to_device(function(*args, **kwargs))
        if _recording is not None:
            result = to_host(out)
            _recording.own += tensors_of(result)
            _recording.launches.append(lambda: _refill(result, function(*args, **kwargs)))
        return out

    return run


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _refill(out: Any, result: Any) -> None:
    for real, value in zip(tensors_of(out), tensors_of(result), strict=True):
        assert real.shape == value.shape, f"a kernel gives {list(value.shape)}, captured were {list(real.shape)}"
        real.copy_(value)


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph whose replay does again, on the same memory, what was captured; it runs no Python of the product."""

    @contextlib.contextmanager
    def capture(self, pool: Any = None) -> Iterator[None]:
        """Capture what runs within. It is also computed once, as in the warm-up before a capture, which a GPU omits."""
        global _recording
        self.launches: list[Callable[[], None]] = []
        self.own: list[torch.Tensor] = []
        self.num_replays = 0
        with torch.cuda.graph(self, pool):
            _recording = self
            try:
                yield
            finally:
                _recording = None
        self._spoil()

    def replay(self) -> None:
        self.num_replays += 1
        with _disable_current_modes():
            for launch in self.launches:
                launch()
        self._spoil()

    def _spoil(self) -> None:
        """Fill the graph's own memory with what cannot be taken for a result: NaN, or a number that is no index."""
        with _disable_current_modes():
            for memory in self.own:
                if memory.is_floating_point():
                    memory.fill_(float("nan"))
                else:
                    memory.fill_(memory.dtype == torch.bool or 0x5A5A5A5A & torch.iinfo(memory.dtype).max)


def _is_lost() -> bool:
    """Return whether a capture is under way that is no `Graph`'s: its replays compute nothing."""
    return _recording is None and torch.cuda.is_current_stream_capturing()


def _do(launch: Callable[[], None]) -> None:
    """Run a launch on the host, and with each replay of the graph that is being captured."""
    launch()
    if _recording is not None:
        _recording.launches.append(launch)


def _install() -> None:
    if JITFunction.run is _run:
        triton_interpreter._interpreter = _Guarded(triton_interpreter._interpreter)
        JITFunction.run, JITFunction.__call__ = _run_both, _call_inside
        LaunchPlan.__call__ = _launch_both


def _interpret(function: JITFunction) -> InterpretedFunction:
    if id(function) not in _interpreted:
        _interpreted[id(function)] = (InterpretedFunction(function.fn), function)  # the second keeps the id its own
    return _interpreted[id(function)][0]


def _run_both(self, *args, grid, warmup, **kwargs):
    """Launch a kernel on the null GPU, then interpret it."""
    if _depth:
        return _interpret(self).run(*args, grid=grid, warmup=False, **kwargs)
    kernel = _run(self, *args, grid=grid, warmup=warmup, **kwargs)
    if not warmup:
        _emulate(self, grid, args, kwargs)
    return kernel


def _launch_both(self, grid, *changing):
    """Launch a kernel of ours that is known on the null GPU, then interpret it."""
    _launch(self, grid, *changing)
    _emulate(self.compiled.src.fn, grid, tuple(self.arguments(*changing)), {})


def _emulate(function: JITFunction, grid: tuple[int, ...], args: tuple, kwargs: dict) -> None:
    name = function.fn.__name__
    if not _is_on or _is_lost() or _LEAVE_KERNELS.search(name):
        return
    values, named = to_host((args, kwargs))  # tensors may come in tuples

    def launch() -> None:
        global _depth
        _depth += 1
        try:
            with _disable_current_modes():
                _interpret(function).run(*values, grid=grid, warmup=False, **named)
        except Exception as error:
            _note(name, error.__cause__ or error)
        finally:
            _depth -= 1

    _do(launch)


def _call_inside(self, *args, **kwargs):
    if not _depth:
        return _call(self, *args, **kwargs)
    scope = _patch_lang(self.fn)  # InterpretedFunction.__call__ never takes its patches back
    try:
        return _interpret(self).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


class _Operators(TorchDispatchMode):
    """Runs every operator on the null GPU, then once more on the CPU where its tensors are on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if not torch.compiler.is_compiling() and args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
            if name in _INDEXING:
                args = (args[0], [part for index in args[1] for part in _mask_to_indices(index)], *args[2:])
            elif name == "aten::nonzero":
                return _nonzero(args[0])
        out = function(*args, **kwargs)
        if _can_run(function, name, args, kwargs, out):
            _do(_on_host(function, name, args, kwargs, out))
        return out


def _can_run(function, name: str, args, kwargs, out) -> bool:
    if function.namespace != "aten" or function.is_view or _LEAVE_OPERATORS.match(name):
        return False
    if torch.compiler.is_compiling() or _is_lost():
        return False
    leaves = (*tree_flatten((args, kwargs))[0], *tree_flatten(out)[0])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors)
    return plain and any(t.is_cuda for t in tensors) and all(t.numel() <= _MOST_ELEMENTS for t in tensors)


def _on_host(function, name, args, kwargs, out) -> Callable[[], None]:
    """Return an operator as a launch on the memory of its operands and its result."""

    def on_host(value):
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return to_host(value)

    values = tree_map(on_host, {key: value for key, value in kwargs.items() if key != "pin_memory"})
    operands, result = tree_map(on_host, args), to_host(out)
    if _recording is not None and not function._schema.is_mutable:
        _recording.own += tensors_of(result)

    def launch() -> None:
        try:
            found = function(*operands, **values)
            if not function._schema.is_mutable:
                _refill(result, found)
        except Exception as error:
            _note(name, error)

    return launch


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Return `mask.nonzero()` by the real values, with the wait that CUDA has inside for its size."""
    torch.cuda.current_stream().synchronize()
    found = alias(mask).nonzero()
    out = torch.empty(found.shape, dtype=torch.int64, device=mask.device)
    alias(out).copy_(found)
    return out


def _mask_to_indices(index) -> list:
    """Return an index as a list: the positions of a boolean mask's true elements, else the index itself."""
    if not (isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)):
        return [index]
    return list(index.nonzero(as_tuple=True)) if not index.is_cuda else list(_nonzero(index).unbind(1))
