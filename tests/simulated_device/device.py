"""A device that is not the host: it computes with the CPU, refuses host tensors and counts what crosses.

Its tensors say that they live on "cuda:0", so the product takes every branch that it takes on a GPU: torch instead of
numpy, pinned memory, events, no reading back. Their memory is a host tensor that only this module sees. A mode for
torch functions stands in where Python's own entry points of torch would look for a CUDA driver (indexing, `.item()`,
factories); a mode for operators sees the rest, also what torch functions do inside.

What follows CUDA's rules:

- An operator takes tensors of one device. Host tensors without dimensions may be operands of pointwise operators.
- `t[rows] = 3` copies the number from the host and waits; `t[:n] = 3` and `t[mask] = 3` are fills.
- A boolean mask as an index, `nonzero` and their kin wait for a count.
- Copies are asynchronous only out of or into pinned memory, and only if asked to be.

Triton kernels cannot run on it: their wrappers take their references, in torch, and what these cross is not counted,
for on a GPU they are one launch each.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

import vidspec_kernels
import vllm_vidspec

DEVICE = torch.device("cuda", 0)
MIXED = "Expected all tensors to be on the same device"

# The kinds of crossing. Asynchronous, through pinned memory:
UPLOAD, DOWNLOAD = "upload", "download"
STAGED_UPLOAD = "staged upload"  # asks not to wait, but is not pinned: the host copies it first
# The host waits:
BLOCKING_UPLOAD, BLOCKING_DOWNLOAD = "blocking upload", "blocking download"
SCALAR_UPLOAD, HOST_INDEX, ITEM, MASK = "scalar upload", "host index", "item", "mask"
EVENT_WAIT, DEVICE_WAIT = "event wait", "device wait"
WAITING = {BLOCKING_UPLOAD, BLOCKING_DOWNLOAD, SCALAR_UPLOAD, HOST_INDEX, ITEM, MASK, EVENT_WAIT, DEVICE_WAIT}

_HERE = str(Path(__file__).parent / "device.py")
_PRODUCT = {package.__name__: str(Path(package.__path__[0])) for package in (vidspec_kernels, vllm_vidspec)}
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Crossing:
    """One crossing between host and device: its kind and the Python line that caused it."""

    kind: str
    function: str
    line: str


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `host` is its memory."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        assert not isinstance(host, DeviceTensor)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE,
        )  # fmt: skip
        tensor.host = host
        return tensor

    def __repr__(self, **_options: Any) -> str:
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a device that is switched off")


def to_host(tree: Any) -> Any:
    """Return a structure with the memory of every device tensor in it; not counted."""
    return tree_map(lambda leaf: leaf.host if isinstance(leaf, DeviceTensor) else leaf, tree)


def to_device(tree: Any) -> Any:
    """Return a structure with every host tensor in it as one of the device, on the same memory; not counted."""
    return tree_map(
        lambda leaf: DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) and not is_device(leaf) else leaf, tree
    )


def is_device(value: Any) -> bool:
    """Whether a value is a tensor of the device."""
    return isinstance(value, DeviceTensor)


def is_host(value: Any) -> bool:
    """Whether a value is a tensor of the host."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)


class SimulatedDevice(contextlib.AbstractContextManager):
    """The device, while it is switched on.

    Attributes:
        crossings: All since it was switched on, in order.
    """

    def __init__(self) -> None:
        self.crossings: list[Crossing] = []
        self._pinned: dict[int, torch.Tensor] = {}  # by address of the storage; kept alive, so that none is used again
        self._is_launching = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "SimulatedDevice":
        for module, name, stand_in in self._stand_ins():
            self._stack.enter_context(mock.patch.object(module, name, stand_in))
        self._operators = _Operators(self)
        self._stack.enter_context(self._operators)
        self._stack.enter_context(_Functions(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        yield torch.cuda, "Event", lambda *_args, **_kwargs: _Event(self)
        for module in (torch.cuda, torch.accelerator):
            yield module, "synchronize", lambda *_args: self.cross(DEVICE_WAIT)
        # Not by its function: an engine on the CPU, which ran in this process before, leaves one of its own.
        yield torch.Tensor, "pin_memory", lambda x, *_args: self.pin(x.clone())
        for name, module in list(sys.modules.items()):
            if name.startswith("vidspec_kernels.") and hasattr(module, "use_triton"):
                yield module, "use_triton", lambda impl, device: False
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm_vidspec.") and hasattr(module, "async_tensor_h2d"):
                yield module, "async_tensor_h2d", self.upload

    # ---- counting --------------------------------------------------------------------------------------------------

    def cross(self, kind: str) -> None:
        """Count a crossing; its line is the innermost one that is neither ours nor torch's."""
        if self._is_launching:
            return
        found = None
        frame = sys._getframe(1)
        while frame is not None:
            path, code = frame.f_code.co_filename, frame.f_code
            if code.co_name.endswith("_reference") and path.startswith(_PRODUCT["vidspec_kernels"]):
                return
            if found is None and path != _HERE and not path.startswith(_TORCH) and "contextlib" not in path:
                found = Crossing(kind, code.co_qualname, f"{Path(path).name}:{frame.f_lineno}")
            frame = frame.f_back
        assert found is not None
        self.crossings.append(found)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter]:
        """Count what crosses within: (function, kind) -> times, filled in at the end."""
        first, counts = len(self.crossings), Counter()
        yield counts
        counts.update((crossing.function, crossing.kind) for crossing in self.crossings[first:])

    # ---- what is not torch -----------------------------------------------------------------------------------------

    def launch(self, kernel: Callable) -> Callable:
        """Return a function that does with device tensors what `kernel` does with host tensors, as one launch.

        It takes no host tensor, except ones without dimensions, and it writes through its arguments.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            for leaf in tree_iter((args, kwargs)):
                assert not (is_host(leaf) and leaf.ndim), f"a kernel was given a host tensor of {list(leaf.shape)}"
            self._is_launching = True
            try:
                with _both_modes_off():
                    return to_device(kernel(*to_host(args), **to_host(kwargs)))
            finally:
                self._is_launching = False

        return run

    def upload(
        self, data: Any, device: Any = None, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Do what vLLM's `async_tensor_h2d` does: through pinned memory, without waiting."""
        self.cross(UPLOAD)
        with _both_modes_off():
            host = torch.as_tensor(data).to(dtype or (None if out is None else out.dtype), copy=True)
            if out is None:
                return DeviceTensor(host)
            to_host(out).copy_(host)
            return out

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """Let a host tensor be pinned."""
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether a host tensor is a view of pinned memory."""
        return host.untyped_storage().data_ptr() in self._pinned

    def copied(self, source: torch.Tensor, target: torch.Tensor | None, non_blocking: bool) -> None:
        """Count a copy between host and device, if it is one; a target that is None is new, and pageable."""
        if is_device(source):
            if not is_device(target):
                is_async = non_blocking and target is not None and self.is_pinned(target)
                self.cross(DOWNLOAD if is_async else BLOCKING_DOWNLOAD)
        elif target is None or is_device(target):
            is_async = UPLOAD if self.is_pinned(source) else STAGED_UPLOAD
            self.cross(is_async if non_blocking else BLOCKING_UPLOAD)


class _Event:
    """A CUDA event of a device that is always done."""

    def __init__(self, device: SimulatedDevice):
        self._device = device

    def record(self, *_: Any) -> None:
        """Record."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.cross(EVENT_WAIT)


@contextlib.contextmanager
def _both_modes_off() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


# ---- operators -------------------------------------------------------------------------------------------------------

# Operators whose result has a size that the device must tell.
_COUNTED = {"nonzero", "nonzero_numpy", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
_READS_HOST_SCALAR = {"fill_", "index_put_", "index_put", "masked_fill", "masked_fill_", "where"}


class _Operators(TorchDispatchMode):
    """Runs operators on the memory of device tensors."""

    def __init__(self, device: SimulatedDevice):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(is_device, tensors)):
            if not _is_ours(kwargs.get("device")):
                return func(*args, **kwargs)
            # The number of a `where`; what a user creates comes through its function.
            assert func is torch.ops.aten.scalar_tensor.default, f"{func} was reached without its function"
            return DeviceTensor(func(*args, **{**kwargs, "device": torch.device("cpu")}))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        target = kwargs.get("device")
        if target is not None and not _is_ours(target):
            assert name == "_to_copy", f"{func} from the device to the host"
            self._device.copied(tensors[0], None, kwargs.get("non_blocking", False))
            return func(*to_host(args), **kwargs)
        if name == "copy_":
            self._device.copied(tensors[1], tensors[0], bool(args[2]) if len(args) > 2 else False)
        else:
            self._check(func, name, tensors)
        if name == "_local_scalar_dense":
            self._device.cross(ITEM)
            return func(*to_host(args))
        if self._must_count(func, name, args, kwargs):
            self._device.cross(MASK)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        known = {id(to_host(tensor)): tensor for tensor in tensors}
        out = func(*to_host(args), **to_host(kwargs))
        return tree_map(lambda leaf: known[id(leaf)] if id(leaf) in known else to_device(leaf), out)

    @staticmethod
    def _check(func: Any, name: str, tensors: list[torch.Tensor]) -> None:
        """Raise where operands live on two devices and CUDA would refuse them."""
        for tensor in filter(is_host, tensors):
            if tensor.ndim or not (torch.Tag.pointwise in func.tags or name in _READS_HOST_SCALAR):
                raise _mixed(f"{func}, host tensor of shape {list(tensor.shape)}")

    @staticmethod
    def _must_count(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        if name in ("index", "index_put", "index_put_"):
            return any(is_device(index) and index.dtype in _MASKS for index in args[1])
        return name in _COUNTED or (name == "repeat_interleave" and kwargs.get("output_size") is None)


# ---- functions -------------------------------------------------------------------------------------------------------

_MASKS = (torch.bool, torch.uint8)
_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero")


class _Functions(TorchFunctionMode):
    """Stands in for the functions of torch that would look for a driver before an operator is reached."""

    def __init__(self, device: SimulatedDevice):
        super().__init__()
        self._device = device
        tensor = torch.Tensor
        self._handlers: dict[Any, Callable] = {
            tensor.__getitem__: self._get,
            tensor.__setitem__: self._set,
            tensor.to: self._to,
            # Python's own entry of these looks for a driver; the operator behind it does not.
            tensor.copy_: torch.ops.aten.copy_.default,
            tensor.__invert__: torch.ops.aten.bitwise_not.default,
            tensor.nonzero: torch.ops.aten.nonzero.default,
            tensor.contiguous: lambda x: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format),
            tensor.data_ptr: lambda x: to_host(x).data_ptr(),
            tensor.is_pinned: lambda x, *_: is_host(x) and device.is_pinned(x),
        }
        for make in (torch.tensor, torch.as_tensor, torch.asarray):
            self._handlers[make] = self._maker(make)
        for name in _READS:
            self._handlers[getattr(tensor, name)] = self._reader(getattr(tensor, name))
        for convert in (tensor.numpy, tensor.__array__):
            self._handlers[convert] = self._converter(convert)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._handlers:
            return self._handlers[func](*args, **kwargs)
        if "device" not in kwargs and "pin_memory" not in kwargs:
            return func(*args, **kwargs)
        # A factory: its memory is made here, wherever it shall be.
        like = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        device = kwargs.pop("device", None)
        is_ours = _is_ours(device) if device is not None else is_device(like)
        is_pinned = kwargs.pop("pin_memory", False)
        out = func(*to_host(args), **to_host(kwargs), device="cpu")
        if is_ours:
            return to_device(out)
        return self._device.pin(out) if is_pinned else out

    def _reader(self, read: Callable) -> Callable:
        def run(x: torch.Tensor, *args: Any) -> Any:
            if is_device(x):
                self._device.cross(BLOCKING_DOWNLOAD if read is torch.Tensor.tolist else ITEM)
            return read(to_host(x), *args)

        return run

    @staticmethod
    def _converter(convert: Callable) -> Callable:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> np.ndarray:
            if is_device(x):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            return convert(x, *args, **kwargs)

        return run

    def _maker(self, make: Callable) -> Callable:
        """`torch.tensor` and its kin: the device's new memory is filled from the host, which waits."""

        def run(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if is_device(data):
                assert device is None or _is_ours(device), f"{make.__name__} from the device to the host"
                return self._to(data, **kwargs) if kwargs else data
            out = make(data, *args, **kwargs)
            if _is_ours(device):
                self._device.cross(BLOCKING_UPLOAD)
                return DeviceTensor(out)
            return self._device.pin(out) if pin_memory else out

        return run

    def _to(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        dtype = dtype or x.dtype
        if is_host(x) and _is_ours(device):
            self._device.copied(x, None, non_blocking)
            return DeviceTensor(x.to(dtype, copy=True))
        if is_host(x) or device is None or _is_ours(device):
            return x.to(dtype, copy=True) if copies or dtype != x.dtype else x
        self._device.copied(x, None, non_blocking)
        return to_host(x).to(dtype, copy=True)

    def _get(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        return to_device(to_host(x)[self._indices(x, index)]) if is_device(x) else x[self._indices(x, index)]

    def _set(self, x: torch.Tensor, index: Any, value: Any) -> None:
        is_gather = any(map(_is_list, index if isinstance(index, tuple) else (index,)))
        is_number = not isinstance(value, torch.Tensor) or (is_host(value) and value.ndim == 0)
        if is_gather and is_number and _is_mask(index):  # masked_fill: neither counts nor copies
            to_host(x)[to_host(index)] = to_host(value)
            return
        host_index = self._indices(x, index)
        if is_gather and isinstance(value, torch.Tensor) and not is_number and is_device(x) != is_device(value):
            raise _mixed("the value of an index assignment")
        if is_gather and is_number and is_device(x):
            self._device.cross(SCALAR_UPLOAD)
        elif isinstance(value, torch.Tensor) and not is_number and is_device(x) != is_device(value):
            self._device.copied(value, x, non_blocking=False)
        to_host(x)[host_index] = to_host(value)

    def _indices(self, x: torch.Tensor, index: Any) -> Any:
        """Return an index for the memory of `x`, and count what of it crosses."""
        for part in index if isinstance(index, tuple) else (index,):
            if is_device(part):
                if is_host(x):
                    raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
                if part.dtype in _MASKS:
                    self._device.cross(MASK)
                elif part.ndim == 0:  # taken for a Python number
                    self._device.cross(ITEM)
            elif is_device(x) and _is_list(part):
                self._device.cross(HOST_INDEX)
        return to_host(index)


def _is_list(index: Any) -> bool:
    """Whether a part of an index names places one by one."""
    return isinstance(index, list | np.ndarray) or (isinstance(index, torch.Tensor) and index.ndim > 0)


def _is_mask(index: Any) -> bool:
    return is_device(index) and index.dtype == torch.bool


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _mixed(what: str) -> RuntimeError:
    return RuntimeError(f"{MIXED}, but found at least two devices, cuda:0 and cpu! ({what})")
