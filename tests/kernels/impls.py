"""The implementations of a kernel: the last is the text that GPUs run instead of numpy, on tensors of the CPU."""

import sys

import pytest
import torch

IMPLS = ["triton", "torch", "torch on a GPU"]


def by(impl, wrapper):
    """Return a kernel's wrapper bound to one of `IMPLS`."""

    def run(**arguments):
        with pytest.MonkeyPatch.context() as patch:
            if impl == "torch on a GPU":
                module = sys.modules[wrapper.__module__]
                patch.setattr(module, "array_module", lambda device: torch)
                patch.setattr(module, "as_array", lambda tensor: tensor)
            return wrapper(**arguments, impl="triton" if impl == "triton" else "torch")

    return run
