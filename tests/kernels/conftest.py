"""Kernel tests run the Triton kernels on the GPU, and under the Triton interpreter where there is none."""

import importlib
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated: before any test module imports vidspec_kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def branches(monkeypatch):
    """Return a function that watches a kernel module and returns the list of branches ("triton", "torch") that ran."""

    def watch(name: str) -> list[str]:
        module = importlib.import_module(f"vidspec_kernels.{name}")
        ran: list[str] = []
        kernel = getattr(module, f"_{name}_kernel")
        reference = getattr(module, f"{name}_reference")

        class Kernel:
            def __getitem__(self, grid):
                ran.append("triton")
                return kernel[grid]

        def watched_reference(*args, **kwargs):
            ran.append("torch")
            return reference(*args, **kwargs)

        monkeypatch.setattr(module, f"_{name}_kernel", Kernel())
        monkeypatch.setattr(module, f"{name}_reference", watched_reference)
        return ran

    return watch
