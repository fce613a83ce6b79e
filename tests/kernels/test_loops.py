"""The compiled loops of a CPU: what they stand for, how they are compiled. What they compute: each kernel's tests."""

import inspect
import sys

import numba
import numpy as np
import pytest
import torch

from vidspec_kernels import dispatch
from vidspec_kernels.compiled import compiled


def references():
    """Return every reference of a kernel by its name."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vidspec_kernels.")]
    named = [item for module in modules for item in vars(module).items() if item[0].endswith("_reference")]
    return {name: value for name, value in named if inspect.isfunction(value)}


def arguments_of(function):
    """Return names, kinds and defaults of what a function takes."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


def test_a_loop_takes_what_its_reference_takes():
    """Catches: an argument that only one of the two has, another default, a loop that stands for nothing."""
    known, twins = references(), dispatch.load_loops()
    assert len(twins) == 17 and set(twins) <= set(known)
    for name, loop in twins.items():
        takes = arguments_of(known[name.removeprefix("bind_")])
        if name.startswith("bind_") and takes[0][0] == "logits":
            takes.pop(0)  # they are given when it runs
        assert arguments_of(loop) == takes, name


def test_without_a_folder_for_the_cache(monkeypatch):
    """Catches: an environment that nobody can write to, in which no server starts."""
    njit, asked = numba.njit, []

    def without_cache(signature, cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(signature, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    loop = compiled("int64[:]", "int64")(lambda values: values[0] + 1)
    assert loop(np.array([41])) == 42 and asked == [True, False]


def test_without_numba(monkeypatch):
    """Catches: a reference that is taken for the loop that was asked for; kernels that need numba to be imported."""
    monkeypatch.setattr(dispatch, "load_loops", dict)
    reference, cpu = references()["draw_reference"], torch.device("cpu")
    assert dispatch.on_host("auto", cpu, reference) is reference
    with pytest.raises(ImportError, match="numba"):
        dispatch.on_host("numba", cpu, reference)
