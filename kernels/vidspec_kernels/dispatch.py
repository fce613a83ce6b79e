"""Dispatch: whether a wrapper launches its Triton kernel or runs its reference, and what both of them share."""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Impl = Literal["auto", "triton", "torch"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """Return whether to launch the kernel.

    Args:
        impl: "auto" takes the kernel for CUDA and meta tensors (see `launcher`) and the reference elsewhere; "triton"
            forces the kernel (on CPU tensors it needs TRITON_INTERPRET=1); "torch" forces the reference.
        device: Where the tensors live.

    Raises:
        ValueError: `impl` is none of the three.
    """
    if impl not in ("auto", "triton", "torch"):
        raise ValueError(f"impl must be auto, triton or torch, got {impl!r}")
    return impl == "triton" or (impl == "auto" and device.type in ("cuda", "meta"))


def launcher(kernel: Any, grid: tuple[int, ...], device: torch.device) -> Callable[..., Any]:
    """Return what launches a kernel on a device; on "meta", what compiles the variant of a launch and launches nothing.

    A product and a sum are fused where both are of floats, which Triton's next releases do on demand only.

    So a wrapper that is called with meta tensors of a launch's shapes, strides, dtypes and alignment prepares that
    launch: it is compiled for the current CUDA device and loaded onto it, and the first real one waits for neither.
    """
    run = functools.partial(_prepare, kernel, grid) if device.type == "meta" else kernel[grid]
    return functools.partial(run, enable_fp_fusion=True)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    plans: dict[Any, Any],
    key: Hashable = None,
    options: dict[str, int] | None = None,
) -> None:
    """Launch a kernel as `launcher` does; a launch that is known already goes to the compiled kernel itself.

    Triton finds the variant of a launch by looking at every argument, which takes the host longer than the launch. What
    holds a kernel's persistent tensors keeps the variants of its launches.

    Args:
        kernel: Jitted.
        grid: Programs.
        device: Of the tensors.
        args: What is not known when it is compiled, in the kernel's order.
        constants: What is, in the kernel's order, behind `args`.
        plans: Of the holder; filled here.
        key: With the holder and the constants' values it must settle all that Triton's variants depend on: which
            arguments are None, their dtypes, and of those that are not exempt (`do_not_specialize...`) the alignment,
            or the number.
        options: Triton's, as num_warps; settled by the key too.
    """
    if device.type == "cuda":
        known = plans.get((kernel, key))
        if known is not None:
            known[(*grid, 1, 1)[:3]](*args, *constants.values())
            return
    compiled = launcher(kernel, grid, device)(*args, **constants, **(options or {}))
    if device.type == "cuda" and compiled is not None:
        plans[kernel, key] = compiled


def _prepare(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    compiled = kernel.warmup(*args, grid=grid, **kwargs)
    # Triton loads a kernel at its first launch, which may be under capture.
    compiled._init_handles()


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype on the meta device, aligned to 16 bytes iff this one is."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(offset + max(last, 0) + 1, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(frozen=True)
class DeviceLimits:
    """What a grid and a tile are made for.

    Attributes:
        num_sms: Streaming multiprocessors.
        shared_bytes: Shared memory of a multiprocessor.
        shared_bytes_per_program: The most of it that one program may have.
        capability: Compute capability, 89 for 8.9.
    """

    num_sms: int
    shared_bytes: int
    shared_bytes_per_program: int
    capability: int


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a CUDA device, for "meta" of the current one; an H200's on a CPU."""
    if device.type == "cpu":
        return DeviceLimits(132, 228 * 1024, 227 * 1024, 90)
    properties = torch.cuda.get_device_properties(device if device.type == "cuda" else torch.cuda.current_device())
    return DeviceLimits(
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,
        10 * properties.major + properties.minor,
    )


def shared_bytes_per_program(limits: DeviceLimits, programs_per_sm: int) -> int:
    """Return the shared memory that each of so many programs on a multiprocessor can have, less the driver's KB."""
    return min(limits.shared_bytes // programs_per_sm - 1024, limits.shared_bytes_per_program)


def array_module(device: torch.device) -> ModuleType:
    """Return numpy for the CPU, else torch: what references work on small arrays of that device with.

    A numpy call costs a third of a torch call on arrays this small, and the CPU engine runs the references in every
    step. Both modules have the names and the rules that are used, so there is one text for both.
    """
    return np if device.type == "cpu" else torch


def as_array(tensor: Tensor) -> Any:
    """Return a tensor as an array of its `array_module`, on the same memory."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def at_most(array: Any, bound: int) -> Any:
    """Return the array with larger entries replaced by the bound (numpy's own clip costs five times as much)."""
    return np.minimum(array, bound) if isinstance(array, np.ndarray) else array.clamp(max=bound)


def at_least(array: Any, bound: int) -> Any:
    """Return the array with smaller entries replaced by the bound."""
    return np.maximum(array, bound) if isinstance(array, np.ndarray) else array.clamp(min=bound)


def check_vector(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, min_len: int = 0) -> None:
    """Assert that a tensor is a vector of unit stride, dtype and device as given, with at least `min_len` entries."""
    assert tensor.dtype == dtype, f"{name}: expected {dtype}, got {tensor.dtype}"
    assert tensor.device == device, f"{name}: expected device {device}, got {tensor.device}"
    assert tensor.ndim == 1, f"{name}: expected one dimension, got shape {list(tensor.shape)}"
    # The cheaper question first: this runs for every vector of every launch.
    assert not min_len or tensor.shape[0] >= min_len, f"{name}: expected at least {min_len} entries"
    assert tensor.stride(0) == 1 or tensor.shape[0] <= 1, f"{name}: expected stride 1, got {tensor.stride(0)}"
