"""dispatch: which way a launch takes to the device; the CPU twins, what they take and how they are compiled."""

import gc
import importlib.util
import weakref
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch

from vidspec_kernels import dispatch
from vidspec_kernels.compiled import compiled

CUDA = torch.device("cuda", 1)


class Kernel:
    """Stands in for a jitted kernel; `launches` says how each launch came: by itself, or by what it had compiled."""

    arg_names = ("a", "b", "A", "B")

    def __init__(self, compiles=True):
        self.launches, self.compiles = [], compiles

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            self.launches.append(("kernel", grid, args, kwargs))
            return Compiled(self) if self.compiles else None

        return run


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launches.append(("hooked", grid, args, {}))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args):
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert stream == "stream of 1" and launch_metadata is enter_hook is exit_hook is None
        self.kernel.launches.append(("compiled", (x, y, z), args, {}))


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(dispatch, "driver", SimpleNamespace(active=active))


def test_known_launches_go_to_the_compiled_kernel():
    """Catches: constants out of order, a grid of fewer dimensions than it takes, a key or holder that is not asked."""
    kernel, plans = Kernel(), {}
    for key, number in ((1, 5), (1, 6), (2, 7), (1, 8)):
        dispatch.launch(kernel, (number, 2), CUDA, (number, None), {"A": 3, "B": 4}, plans, key)
    dispatch.launch(kernel, (9,), CUDA, (9, None), {"A": 3, "B": 4}, {}, 1)
    first = {"A": 3, "B": 4, "enable_fp_fusion": True}
    assert kernel.launches == [
        ("kernel", (5, 2), (5, None), first), ("compiled", (6, 2, 1), (6, None, 3, 4), {}),
        ("kernel", (7, 2), (7, None), first), ("compiled", (8, 2, 1), (8, None, 3, 4), {}),
        ("kernel", (9,), (9, None), first),
    ]  # fmt: skip


def test_a_plan_keeps_what_stays():
    """Catches: an old value of what changes; a tensor that is gone, its address another's; tuples as they are."""
    kernel, plans = Kernel(), {}
    stays = torch.zeros(3)
    address, alive = stays.data_ptr(), weakref.ref(stays)
    dispatch.launch(kernel, (1,), CUDA, (5, (stays, 7)), {"A": 3, "B": 4}, plans, 1, changing=("a",))
    dispatch.launch(kernel, (2,), CUDA, (6, (stays, 7)), {"A": 3, "B": 4}, plans, 1, changing=("a",))
    del kernel.launches[0], stays
    gc.collect()
    assert alive() is not None
    plan = dispatch.known(plans, kernel, 1)
    plan((3, 2), 8)
    assert [args for _, _, args, _ in kernel.launches] == [(6, (address, 7), 3, 4), (8, (address, 7), 3, 4)]
    number, (tensor, seven), *constants = plan.arguments(9)
    assert tensor is alive() and [number, seven, *constants] == [9, 7, 3, 4]
    with pytest.raises(ValueError, match="zip"):
        plan((3, 2))


def test_hooks_are_called():
    """Catches: a profiler that asks Triton for launches and hears of none."""
    kernel, plans, hook = Kernel(), {}, lambda _: None
    for _ in range(2):
        dispatch.launch(kernel, (2,), CUDA, (5, None), {}, plans)
        dispatch.knobs.runtime.launch_enter_hook.add(hook)
    dispatch.knobs.runtime.launch_enter_hook.remove(hook)
    assert [(how, grid) for how, grid, *_ in kernel.launches] == [("kernel", (2,)), ("hooked", (2, 1, 1))]


@pytest.mark.parametrize(("device", "compiles"), [(CUDA, False), (torch.device("cpu"), True)])
def test_what_is_not_kept(device, compiles):
    """Catches: the interpreter's launches, or those of a hook that compiles nothing, taken for compiled ones."""
    kernel, plans = Kernel(compiles), {}
    for _ in range(2):
        dispatch.launch(kernel, (1,), device, (), {}, plans)
    assert [how for how, *_ in kernel.launches] == ["kernel", "kernel"] and not plans


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
    """Catches: loops that need numba to be run; an absent array of another type or of no length."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loop = compiled("int64[:], float32[:, :], boolean[:], int64", "int64")(lambda a, b, c, n: (a, b, c, n))
    given, absent, flags, number = loop(torch.tensor([41]), None, None, 7)
    assert given.tolist() == [41] and number == 7
    assert (absent.shape, absent.dtype, flags.dtype) == ((0, 0), np.float32, bool)
