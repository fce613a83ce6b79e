"""Records what torch does while a graph is captured, and does it again on the same memory with what was frozen.

An entry is one operator, or one launch: a function that takes tensors and runs as a whole, as a kernel does. While a
recording is open two modes watch torch: one sees every operator and records it, the other sees the Python functions
that would read a tensor's contents on the host. Those are errors that name the line, as CUDA refuses them.

A replay runs no Python of the product. Tensors are the recorded ones, by their memory; numbers, shapes and everything
else that Python decided are those of the capture. Memory that was allocated under capture belongs to the graph: it is
filled with garbage when the capture ends and after each replay, so nothing else can live on it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

GARBAGE = 0x5A5A_5A5A  # of integers: no index, no slot and no length

_ROOT = Path(__file__).parents[2]
_OWN = {str(Path(__file__).parent / name) for name in ("recorder.py", "launches.py", "attention.py", "graphs.py")}
_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "numpy",
          "__array__", "cpu", "data_ptr")  # fmt: skip
# Operators that leave memory as they find it.
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Sizes and branches that the device must tell; in inference mode composite operators arrive whole and carry no tag.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COUNTED = {"nonzero_numpy", "is_nonzero"}
_MASKS = (torch.bool, torch.uint8)


class CaptureError(RuntimeError):
    """Something under capture that a CUDA graph cannot hold; says where."""

    def __init__(self, what: str):
        super().__init__(f"{what}, under capture, at {_line()}")


class ReplayError(RuntimeError):
    """A replay whose kernels would read past what was captured."""


def _line() -> str:
    """Return file:line of the innermost frame that is neither the emulator's nor a library's."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(_ROOT)) and path not in _OWN and "site-packages" not in path:
            return f"{Path(path).relative_to(_ROOT)}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        frame = frame.f_back
    return "a line outside the repository"


class Recording:
    """One captured graph.

    Attributes:
        current: The recording that is open, if one is.
        entries: What a replay runs, in order, each with the name of what it does.
        num_replays: So far.
    """

    current: ClassVar["Recording | None"] = None

    def __init__(self, foreign: Callable[[int], bool] = lambda _: False):
        """`foreign`: whether an address is memory of another graph."""
        self.entries: list[tuple[str, Callable[[], None]]] = []
        self.num_replays = 0
        self._foreign = foreign
        self._own: dict[int, torch.Tensor] = {}  # by address, all of a storage that was allocated under capture
        self._host: dict[int, torch.Tensor] = {}  # by address, tensors that were made of Python's data under capture

    def owns(self, address: int) -> bool:
        """Whether a storage was allocated under this capture."""
        return address in self._own

    # ---- capture ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Record what runs within."""
        assert Recording.current is None, "a capture within a capture"
        with torch.inference_mode(), mock.patch.object(torch, "from_numpy", self._maker(torch.from_numpy)):
            Recording.current = self
            try:
                with _Operators(self), _Functions(self):
                    yield
            finally:
                Recording.current = None
            self._spoil()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run what is not recorded: the inside of a launch."""
        Recording.current = None
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                yield
        finally:
            Recording.current = self

    def launch(self, name: str, run: Callable[..., Any], tensors: Iterable[torch.Tensor], *args: Any, **kwargs: Any):
        """Run a function as one entry and return what it returns.

        Args:
            name: Of the kernel.
            run: Takes `args` and `kwargs`, whose containers and numbers are frozen.
            tensors: All that it may read or write, also those inside objects among its arguments.
        """
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        known = self.check(name, tensors)
        with self.suspended():
            result = run(*args, **kwargs)
            self.record(name, lambda: run(*args, **kwargs), result, known)
        return result

    def check(self, name: str, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the addresses of an entry's operands; raise if one is not the graph's to read."""
        known = set()
        for tensor in tensors:
            address = _address(tensor)
            if address in self._host:
                raise CaptureError(f"{name} takes a tensor that was made of the host's data")
            if self._foreign(address):
                raise CaptureError(f"{name} takes memory that belongs to another graph")
            known.add(address)
        return known

    def record(self, name: str, run: Callable[[], Any], result: Any, known: set[int], is_mutable: bool = True) -> None:
        """Add an entry.

        Args:
            name: For errors.
            run: Does it again.
            result: What it returned under capture; parts on memory of their own are filled again on replay.
            known: Addresses of its operands.
            is_mutable: Whether it writes to its operands.
        """
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        new = [i for i, leaf in enumerate(leaves) if _address(leaf) not in known]
        for i in new:
            self.own(leaves[i])
        if not new:
            if is_mutable:
                self.entries.append((name, run))
            return  # a view needs no work
        kept = [leaves[i] for i in new]

        def refill() -> None:
            again = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, torch.Tensor)]
            for tensor, i in zip(kept, new, strict=True):
                if again[i].shape != tensor.shape:
                    raise ReplayError(f"{name} gives {list(again[i].shape)}, captured were {list(tensor.shape)}")
                if again[i].data_ptr() != tensor.data_ptr():
                    tensor.copy_(again[i])

        self.entries.append((name, refill))

    def own(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's memory was allocated under capture."""
        if (address := _address(tensor)) and address not in self._own:
            whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            self._own[address] = whole

    def hosted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a tensor was made of the host's data under capture: it may be looked at, but no kernel takes it."""
        if address := _address(tensor):
            self._host[address] = tensor
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made of the host's data under capture."""
        return _address(tensor) in self._host

    def _maker(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            if Recording.current is None:
                return make(*args, **kwargs)
            with self.suspended():
                return self.hosted(make(*args, **kwargs))

        return run

    # ---- replay ----------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Do all of it again; the graph's own memory holds garbage before and after."""
        assert Recording.current is None, "a replay within a capture"
        with torch.inference_mode():
            for _, run in self.entries:
                run()
        self._spoil()
        self.num_replays += 1

    def _spoil(self) -> None:
        with torch.inference_mode():
            for memory in self._own.values():
                spoil(memory)


def spoil(memory: torch.Tensor) -> None:
    """Fill a tensor with what cannot be taken for a result: NaN, or a number that is no index."""
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    elif memory.dtype == torch.bool:
        memory.fill_(True)
    else:
        memory.fill_(GARBAGE & torch.iinfo(memory.dtype).max)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins; 0 for one without memory."""
    return tensor.untyped_storage().data_ptr()


class _Operators(TorchDispatchMode):
    """Records operators."""

    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recording = kwargs or {}, self._recording
        name = func.overloadpacket.__name__
        if whole := INSIDE.get(f"{func.namespace}::{name}"):
            # Python behind an operator: what it calls is recorded, not the operator, whose Python reads what is global.
            with self, _Functions(recording):
                return whole(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if operands and all(map(recording.is_host, operands)):  # the host's own work, done once
            return tree_map_only(torch.Tensor, recording.hosted, func(*args, **kwargs))
        self._refuse(func, name, args, kwargs)
        known = recording.check(name, operands)
        result = func(*args, **kwargs)
        if name in _UNINITIALISED:
            recording.own(result)
        elif name == "lift_fresh":
            pass
        else:
            recording.record(name, lambda: func(*args, **kwargs), result, known, func._schema.is_mutable)
        return result

    @staticmethod
    def _refuse(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise where the host would have to know what the device computes."""
        is_count = (name == "where" and len(args) == 1) or (
            name == "repeat_interleave" and kwargs.get("output_size") is None
        )
        if name in ("index", "index_put", "index_put_"):
            masks = [i for i in args[1] if i is not None and i.dtype in _MASKS]
            is_fill = name != "index" and len(masks) == len(args[1]) == 1 and args[2].ndim == 0
            if masks and not is_fill:
                raise CaptureError(f"{name} by a mask waits for a count")
        elif _TAGS & set(func.tags) or name in _COUNTED or is_count:
            raise CaptureError(f"{name} waits for the device")


# Operators that are Python: "namespace::name" -> the function behind, called in its place under capture.
INSIDE: dict[str, Callable] = {}


class _Functions(TorchFunctionMode):
    """Refuses the functions of torch that look into a tensor from Python."""

    def __init__(self, recording: Recording):
        super().__init__()
        tensor = torch.Tensor
        self._handlers: dict[Any, Callable] = {
            read: _reader(recording, name, read) for name in _READS for read in (getattr(tensor, name),)
        }
        for make in (torch.tensor, torch.as_tensor, torch.asarray):
            self._handlers[make] = _maker_of(recording, make)
        self._handlers[tensor.__getitem__] = self._get
        self._handlers[tensor.__setitem__] = self._set

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handlers.get(func, func)(*args, **(kwargs or {}))

    @staticmethod
    def _get(x: torch.Tensor, index: Any) -> torch.Tensor:
        _check_index(index)
        return x[index]

    @staticmethod
    def _set(x: torch.Tensor, index: Any, value: Any) -> None:
        _check_index(index)
        parts = index if isinstance(index, tuple) else (index,)
        gathers = any(isinstance(part, torch.Tensor) and part.dtype not in _MASKS for part in parts)
        if gathers and not isinstance(value, torch.Tensor):
            raise CaptureError("a number is assigned by index: it is copied from the host")
        x[index] = value


def _reader(recording: Recording, name: str, read: Callable) -> Callable:
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if recording.is_host(tensor):
            return read(tensor, *args, **kwargs)
        raise CaptureError(f"the host reads a tensor by .{name}()")

    return run


def _maker_of(recording: Recording, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return make(data, *args, **kwargs)
        with recording.suspended():
            return recording.hosted(make(data, *args, **kwargs))

    return run


def _check_index(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list | np.ndarray):
            raise CaptureError("an index is a list of the host's")
        if isinstance(part, torch.Tensor) and part.ndim == 0 and part.dtype not in _MASKS:
            raise CaptureError("an index of no dimension is read as a number")
