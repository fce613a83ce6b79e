"""Kernel tests run the Triton kernels on the GPU, and under the Triton interpreter where there is none."""

import importlib
import itertools
import math
import os
import random
import sys

import pytest
import torch

pytest.register_assert_rewrite(
    *(f"tests.kernels.{name}" for name in ("accept_requests", "attention_case", "relevance_inputs"))
)

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated: before any test module imports vidspec_kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_generate_tests(metafunc):
    """Run each test that asks for `impl` by all of its module's implementations."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "impl" in metafunc.fixturenames and not any("impl" in names for names in given):
        metafunc.parametrize("impl", getattr(metafunc.module, "IMPLS", ["triton", "numba"]))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def branches(monkeypatch):
    """Return what watches an operation and returns the branches that ran: "triton", "numba", "torch"."""

    def watch(name: str, kernels=(), reference=None) -> list[str]:
        import vidspec_kernels  # once the interpreter is asked for

        module = sys.modules[getattr(vidspec_kernels, name).__module__]
        ran: list[str] = []

        class Watched:
            """A kernel, a loop or a reference, which notes each use of it."""

            def __init__(self, own, what):
                self.own, self.what = own, what

            def __getitem__(self, grid):
                ran.append(self.what)
                return self.own[grid]

            def __call__(self, *args, **kwargs):
                ran.append(self.what)
                return self.own(*args, **kwargs)

            def bind(self, *args):
                ran.append(self.what)
                return self.own.bind(*args)

        named = dict.fromkeys(kernels or [f"_{name}_kernel"], "triton")
        for attribute, what in (named | ({reference: "torch"} if reference else {})).items():
            monkeypatch.setattr(module, attribute, Watched(getattr(module, attribute), what))
        loops = vidspec_kernels.dispatch.load_loops()
        for loop in {name, f"bind_{name}"} & loops.keys():
            monkeypatch.setitem(loops, loop, Watched(loops[loop], "numba"))
        return ran

    return watch


@pytest.fixture
def any_program_order(monkeypatch):
    """Run every kernel of the test in order and shuffled; what it leaves must be the same, bit for bit.

    What is a race on a GPU shows here as a result that depends on the order. A kernel that gets its tensors by address
    runs once, shuffled, and the test's own check judges it. Returns the list of (kernel, programs) that ran.
    """
    if torch.cuda.is_available():
        pytest.skip("orders are the interpreter's")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, in_order = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
    ran: list[tuple[str, int]] = []

    def run(self, args, kwargs, seed):
        set_dim, set_idx = type(builder).set_grid_dim, type(builder).set_grid_idx
        places = iter(())

        def shuffle(*sizes):
            nonlocal places
            set_dim(builder, *sizes)
            programs = list(itertools.product(*map(range, sizes)))
            random.Random(seed).shuffle(programs)
            places = iter(programs)

        with monkeypatch.context() as patch:
            if seed is not None:
                patch.setattr(builder, "set_grid_dim", shuffle, raising=False)
                patch.setattr(builder, "set_grid_idx", lambda *_: set_idx(builder, *next(places)), raising=False)
            in_order(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        ran.append((self.fn.__name__, math.prod(self.grid)))
        if "addresses_ptr" in self.arg_names:
            run(self, args, kwargs, 0)
            return
        flat = [part for value in args for part in (value if isinstance(value, tuple) else (value,))]
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        memory = list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
        before, expected = [storage.clone() for storage in memory], None
        for seed in (None, 0):
            for storage, old in zip(memory, before, strict=True):
                storage.copy_(old)
            run(self, args, kwargs, seed)
            left = [bytes(storage) for storage in memory]
            expected = expected or left
            assert left == expected, f"{self.fn.__name__}: what it leaves depends on the order of its programs"

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    return ran
