"""Kernel launches as entries of a graph: our wrappers, and the numpy twins of vLLM's kernels.

A wrapper runs its loop or its reference on the CPU, which no mode of torch sees. Under capture each call is one entry,
done again as a whole on replay, with its tensors' contents of then and its numbers of the capture.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import torch

import vidspec_kernels  # noqa: F401 - all of its modules
from tests.graph_emulator.recorder import Recording

_NO_KERNELS = {"dispatch", "warm_up", "cpu", "compiled"}


def entry(function: Callable) -> Callable:
    """Return a function that is one entry wherever it is called under capture."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recording = Recording.current
        if recording is None:
            return function(*args, **kwargs)
        return recording.launch(function.__qualname__, function, tensors_of((args, kwargs)), *args, **kwargs)

    call.is_entry = True
    return call


def tensors_of(tree: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield all tensors that a function can reach from its arguments: of containers, and of the product's objects."""
    seen = set() if seen is None else seen
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value, seen)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value, seen)
    elif type(tree).__module__.startswith(("vidspec_kernels", "vllm_vidspec")):
        yield from tensors_of(getattr(tree, "__dict__", {}), seen)


def wrappers() -> dict[FunctionType, Callable]:
    """Return every public wrapper of our kernels with its stand-in."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vidspec_kernels.") or module_name.rpartition(".")[2] in _NO_KERNELS:
            continue
        for name, value in vars(module).items():
            is_own = inspect.isfunction(value) and value.__module__ == module.__name__
            if is_own and not name.startswith("_") and not name.endswith("_reference"):
                found[value] = entry(value)
    return found


@contextlib.contextmanager
def kernels_as_entries() -> Iterator[None]:
    """Let kernels be entries wherever the product calls them; before an engine is built."""
    importlib.import_module("vllm_vidspec.engine.runner")  # what is imported later is not replaced
    from vllm_vidspec.engine.cpu import kernels as twins

    stand_ins = wrappers()
    with contextlib.ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith(("vllm_vidspec", "vidspec_kernels")):
                continue
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in stand_ins:
                    stack.enter_context(mock.patch.object(module, name, stand_ins[value]))
        for twin in (twins.Twin, *twins.Twin.__subclasses__()):
            stack.enter_context(mock.patch.object(twin, "_launch", entry(twin._launch)))
        yield
