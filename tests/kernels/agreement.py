"""What every operation's tests share: equal calls by kernel and by loop, kernels with a planted mistake."""

import contextlib
import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

CPU = torch.device("cpu")
# Attributes and arguments that hold no results.
SKIPPED = {"ready", "known", "arrays", "adopted_arrays", "observed_arrays", "tensors", "addresses", "scratch"}


def make_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, layout, device, poison):
    """Keys and values full of poison: "flash" as a GPU backend stores them, "cpu" as the CPU engine ("vec") does."""
    if layout == "flash":
        cache = torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), poison, dtype=dtype, device=device)
        return cache[:, 0], cache[:, 1]
    cache = torch.full((num_blocks, num_kv_heads, 2 * block_size, head_size), poison, dtype=dtype, device=device)
    keys, values = cache.chunk(2, dim=2)
    block_stride, head_stride, _, _ = keys.stride()
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return keys.as_strided(shape, (block_stride, 1, head_stride, block_size)), values.permute(0, 2, 1, 3)


def tensors_in(value, name=""):
    """Return every tensor of arguments or results by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = ()
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):  # no launch plans
        items = value.items()
    elif hasattr(value, "_asdict"):
        items = value._asdict().items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif type(value).__module__.startswith("vidspec_kernels"):
        items = vars(value).items()
    parts = [tensors_in(part, f"{name}.{key}") for key, part in items if key not in SKIPPED]
    return {path: tensor for part in parts for path, tensor in part.items()}


def left_by(impl, case, device, *sizes, **more):
    """Return the tensors that a call of `case(device, ...)`, a wrapper and its arguments, returns and leaves."""
    wrapper, arguments = case(device, *sizes, **more)
    found = tensors_in({"result": wrapper(**arguments, impl=impl)} | arguments)
    assert found
    return {name: tensor.cpu() for name, tensor in found.items()}


def agree(case, device, *sizes, atol=0.0, **more):
    """Assert that the kernel leaves what a CPU leaves, whatever was there before (best a sentinel); return it."""
    kernel, loop = left_by("triton", case, device, *sizes, **more), left_by("auto", case, CPU, *sizes, **more)
    assert kernel.keys() == loop.keys()
    for name, tensor in loop.items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(kernel[name], tensor, rtol=0, atol=atol, equal_nan=True, msg=message)
    return loop


@contextlib.contextmanager
def mutated(folder, owner, name, *edits):
    """Replace some text, every occurrence, of the file in which a module's kernel or reference is written.

    The module's other kernels from that file are replaced with it.
    """
    origin = _origin(getattr(owner, name))
    source = Path(sys.modules[origin].__file__).read_text()
    for old, new in edits:
        assert old in source, f"the mutation no longer applies: {old}"
        source = source.replace(old, new)
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        kernels = [key for key, value in vars(owner).items() if key.endswith("_kernel") and _origin(value) == origin]
        for key in {name, *kernels}:
            patch.setattr(owner, key, getattr(module, key))
        yield


def _origin(function):
    """Return the name of the module in which a function or a kernel is written."""
    return getattr(function, "fn", function).__module__
