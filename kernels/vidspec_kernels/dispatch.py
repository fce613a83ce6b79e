"""Whether an operation launches its Triton kernel or runs on the host; how kernels are launched."""

import functools
import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_Function = TypeVar("_Function", bound=Callable[..., Any])
Impl = Literal["auto", "triton", "numba", "torch"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """Return whether to launch the kernel.

    Args:
        impl: "auto" takes the kernel for CUDA and meta tensors (see `launcher`) and what `on_host` returns elsewhere;
            "triton" forces the kernel (on CPU tensors it needs TRITON_INTERPRET=1), "numba" the loop of CPU tensors,
            "torch" the reference of those operations that have one in torch.
        device: Where the tensors live.

    Raises:
        ValueError: `impl` is none of the four.
    """
    if impl not in ("auto", "triton", "numba", "torch"):
        raise ValueError(f"impl must be auto, triton, numba or torch, got {impl!r}")
    return impl == "triton" or (impl == "auto" and device.type in ("cuda", "meta"))


def on_host(impl: Impl, device: torch.device, name: str, reference: _Function | None = None) -> Any:
    """Return what runs where no kernel is launched: on a CPU the loop of this name in the folder's `cpu.py`.

    `impl` "torch", and any other device, get the reference. Both take the same arguments.

    Raises:
        ValueError: The operation has no reference in torch.
    """
    if device.type == "cpu" and impl != "torch":
        return load_loops()[name]
    if reference is None:
        raise ValueError(f"impl must be auto, triton or numba: {name} on {device} has no reference in torch")
    return reference


@functools.cache
def load_loops() -> dict[str, Any]:
    """Return what each folder's `cpu.py` has, by name.

    The first call in an environment compiles the loops, which takes some ten seconds, later ones one: a server calls it
    before it serves.
    """
    found: dict[str, Any] = {}
    for path in Path(__file__).parent.glob("*/cpu.py"):
        found |= vars(importlib.import_module(f"vidspec_kernels.{path.parent.name}.cpu"))
    return found


def launcher(kernel: Any, grid: tuple[int, ...], device: torch.device) -> Callable[..., Any]:
    """Return what launches a kernel on a device; on "meta", what compiles the variant of a launch and launches nothing.

    A product and a sum are fused where both are of floats, which Triton's next releases do on demand only.

    So a wrapper that is called with meta tensors of a launch's shapes, strides, dtypes and alignment prepares that
    launch: it is compiled for the current CUDA device and loaded onto it, and the first real one waits for neither.
    """
    run = functools.partial(_prepare, kernel, grid) if device.type == "meta" else kernel[grid]
    return functools.partial(run, enable_fp_fusion=True)


class LaunchPlan:
    """A launch that was made before: its compiled kernel, and what stays of its arguments.

    Triton finds the variant of a launch by looking at every argument, which takes the host longer than the launch.
    What holds a kernel's persistent tensors therefore keeps plans of its launches, by kernel and key (see `launch`). A
    plan goes to the compiled kernel itself. It keeps the tensors that stay alive, and hands over their addresses.

    Args:
        kernel: Jitted.
        compiled: Its variant, loaded.
        device: Index of the CUDA device.
        args: Of the launch, in the kernel's order.
        constants: What was known when it was compiled, behind `args`.
        changing: Places in `args` of what is given anew at every launch.
    """

    def __init__(
        self, kernel: Any, compiled: Any, device: int, args: tuple[Any, ...], constants: tuple[Any, ...],
        changing: Sequence[int],
    ):  # fmt: skip
        self.kernel = kernel
        self.compiled = compiled
        self.changing = changing
        self._device = device
        self._args = [None if place in changing else arg for place, arg in enumerate(args)] + [*constants]
        self._packed = [_address(arg) for arg in self._args]

    def __call__(self, grid: tuple[int, ...], *changing: Any) -> None:
        """Launch on the current stream, with new values of what changes."""
        args, compiled = self._packed.copy(), self.compiled
        for place, value in zip(self.changing, changing, strict=True):
            args[place] = value
        if _is_hooked():
            compiled[(*grid, 1, 1)[:3]](*args)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(self._device)
        # As Triton's own `run` ends, without what only hooks look at.
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)

    def arguments(self, *changing: Any) -> list[Any]:
        """Return all arguments of a launch, tensors as tensors: for what emulates kernels."""
        args = self._args.copy()
        for place, value in zip(self.changing, changing, strict=True):
            args[place] = value
        return args


def known(plans: dict[Any, Any], kernel: Any, key: Hashable) -> LaunchPlan | None:
    """Return the plan of a launch that `launch` has made under a key, None where it has not.

    Kernels by their identity, which a plan keeps alive: Triton's own hash of one costs as much as a launch.
    """
    return plans.get((id(kernel), key))


def _address(value: Any) -> Any:
    """Return an argument as a compiled kernel takes it, a tensor as its address; tuples of arguments are arguments."""
    if isinstance(value, tuple):
        return tuple(map(_address, value))
    return value.data_ptr() if isinstance(value, Tensor) else value


def _is_hooked() -> bool:
    """Return whether a profiler, say, has hooked Triton's launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], constants: dict[str, Any],
    plans: dict[Any, Any], key: Hashable = None, options: Mapping[str, int] | None = None,
    changing: tuple[str, ...] | None = None,
) -> None:  # fmt: skip
    """Launch a kernel as `launcher` does; a launch made before goes by its `LaunchPlan`.

    A wrapper that knows what stays of its arguments may ask `known` first, and leave out making, and checking, all the
    others.

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
        changing: Names in the kernel of those `args` that the holder and the key do not settle; None: all.
    """
    if device.type == "cuda":
        plan = known(plans, kernel, key)
        if plan is not None:
            plan(grid, *(args if changing is None else (args[place] for place in plan.changing)))
            return
    compiled = launcher(kernel, grid, device)(*args, **constants, **(options or {}))
    if device.type == "cuda" and compiled is not None:
        places = range(len(args)) if changing is None else [kernel.arg_names.index(name) for name in changing]
        index = driver.active.get_current_device() if device.index is None else device.index
        plans[id(kernel), key] = LaunchPlan(kernel, compiled, index, args, tuple(constants.values()), places)


def _prepare(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    compiled = kernel.warmup(*args, grid=grid, **kwargs)
    # Triton loads a kernel at its first launch, which may be under capture.
    compiled._init_handles()


def remember(ready: dict[Any, Any], key: Hashable, run: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
    """Keep a call that was found right, bound to what runs it: such a call is neither looked at nor bound again.

    Looking at six tensors takes the host longer than the work of a small step. What holds a wrapper's persistent
    tensors keeps these calls, and each call its tensors: no other can come to lie where one was, and pass for it.

    Args:
        ready: Of the holder; a thousand calls at most.
        key: The call's numbers, `impl` among them, and its tensors by their identity.
        run: What runs it.
        tensors: Which those are.

    Returns:
        What `ready` has by this key from now on: `run`, and the tensors.
    """
    if len(ready) >= 1024:
        ready.clear()
    ready[key] = (run, tensors)
    return ready[key]
