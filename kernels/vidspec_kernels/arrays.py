"""Checks of tensors that wrappers share, tensors without memory, and what holds tensors from step to step."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype on the meta device, aligned to 16 bytes iff this one is."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(offset + max(last, 0) + 1, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def check(device: torch.device, **tensors: tuple[Any, ...]) -> None:
    """Assert that tensors are on a device, of unit stride in their last dimension, and as each one's tuple says.

    A tuple is (tensor or None, dtype, a size for each dimension); a size is the least that will do, `[size]` the only
    one. None passes.
    """
    for name, (tensor, dtype, *sizes) in tensors.items():
        if tensor is None:
            continue
        shape = tensor.shape
        assert tensor.dtype == dtype, f"{name}: expected {dtype}, got {tensor.dtype}"
        assert tensor.device == device, f"{name}: expected device {device}, got {tensor.device}"
        assert len(shape) == len(sizes), f"{name}: expected {len(sizes)} dimensions, got shape {list(shape)}"
        for size, least in zip(shape, sizes, strict=True):
            is_right = size >= least if type(least) is int else size == least[0]
            assert is_right, f"{name}: expected shape {sizes}, got {list(shape)}"
        # The cheaper question first: this runs for every tensor of a launch.
        is_dense = tensor.is_contiguous() or tensor.stride(-1) == 1 or shape[-1] <= 1
        assert is_dense, f"{name}: expected unit stride in a row, got {tensor.stride()}"


def check_contiguous(device: torch.device, **tensors: tuple[Any, ...]) -> None:
    check(device, **tensors)
    for name, (tensor, *_) in tensors.items():
        assert tensor is None or tensor.is_contiguous(), f"{name}: expected contiguous rows"


def arrays_of(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Return tensors of a CPU as arrays on the same memory, which loops take without a look; others as they are."""
    return tuple(part if part is None or part.device.type != "cpu" else part.numpy() for part in tensors)


class Tensors:
    """A dataclass of tensors, some of which may be None, all on one device; and of numbers."""

    @functools.cached_property
    def tensors(self) -> tuple[Any, ...]:
        """All of them, in the order of the fields, which is the kernels'."""
        return tuple(value for value in self._values().values() if value is None or isinstance(value, Tensor))

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        return arrays_of(self.tensors)

    @functools.cached_property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @functools.cached_property
    def plans(self) -> dict[Any, Any]:
        """Of launches that write these (see `dispatch.launch`)."""
        return {}

    @functools.cached_property
    def ready(self) -> dict[Any, Any]:
        """Calls that write these (see `dispatch.remember`)."""
        return {}

    def as_meta(self) -> Any:
        values = self._values().items()
        return type(self)(**{name: as_meta(value) if isinstance(value, Tensor) else value for name, value in values})

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
