"""A kernel's implementations; "torch on a GPU" is the text that GPUs run instead of numpy, on tensors of the CPU."""

import sys

import pytest
import torch

IMPLS = ["triton", "torch", "torch on a GPU"]
# Of kernels that have a compiled loop for the CPU.
IMPLS_AND_LOOP = [*IMPLS, "numba"]


def by(impl, wrapper):
    """Return a kernel's wrapper bound to one of `IMPLS_AND_LOOP`."""

    def run(**arguments):
        with pytest.MonkeyPatch.context() as patch:
            if impl == "torch on a GPU":
                folder = wrapper.__module__.rpartition(".")[0]
                for module in [module for name, module in sys.modules.items() if name.startswith(folder)]:
                    patch.setattr(module, "array_module", lambda device: torch, raising=False)
                    patch.setattr(module, "as_array", lambda tensor: tensor, raising=False)
            return wrapper(**arguments, impl="torch" if impl == "torch on a GPU" else impl)

    return run


def branch(impl, device):
    """Return which implementation "auto" or another name runs on a device's tensors, of a kernel that has a loop."""
    if device.type == "cuda":
        return {"auto": "triton", "numba": "torch"}.get(impl, impl)
    return "numba" if impl == "auto" else impl
