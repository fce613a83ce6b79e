"""Loops for the CPU, which say what an operation does: compiled by numba, and plain Python where that is missing."""

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor


class Loop:
    """A function of arrays and numbers that takes tensors too, and None for an array that is absent.

    Loops know an absent array by its length, as nothing is done for no rows.
    """

    def __init__(self, run: Callable[..., Any], arguments: str):
        kinds = (re.match(r"(\w+)(\[.*\])?", kind) for kind in re.split(r",\s*(?![^\[]*\])", arguments))
        self.run = run
        self._absent = [
            np.zeros((0,) * (kind[2].count(":")), dtype=kind[1].replace("boolean", "bool")) if kind[2] else None
            for kind in kinds
            if kind is not None
        ]

    def bind(self, *args: Any) -> Callable[..., Any]:
        return functools.partial(self.run, *self._arrays(args))

    def __call__(self, *args: Any) -> Any:
        return self.run(*self._arrays(args))

    def _arrays(self, args: tuple[Any, ...]) -> list[Any]:
        # Not `isinstance`, which torch answers in Python.
        return [
            arg.numpy() if type(arg) is Tensor else absent if arg is None else arg
            for arg, absent in zip(args, self._absent, strict=False)
        ]


def compiled(arguments: str, returns: str = "void") -> Callable[[Callable[..., Any]], Loop]:
    """Return a decorator that compiles a function now, for arguments of these types, and keeps it on disk.

    Arrays are `[:]`, of any strides: one variant serves slices too. Numbers divide as in numpy; sums keep their order.
    Where no folder for it can be written, it is compiled at every start.
    """
    return lambda function: Loop(jitted(arguments, returns)(function), arguments)


def jitted(arguments: str, returns: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator of what other loops call, see `compiled`."""

    def compile_now(function: Callable[..., Any]) -> Callable[..., Any]:
        if importlib.util.find_spec("numba") is None:
            return function
        import numba

        signature = f"{returns}({arguments})"
        try:
            run: Callable[..., Any] = numba.njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:  # numba found no place for its cache
            run = numba.njit(signature, error_model="numpy")(function)
        return run

    return compile_now


@jitted("float32, float32", "boolean")
def precedes(score, other):
    """Return whether a score comes before another that was found earlier; NaN comes first."""
    return score > other or (score != score and other == other)
