"""How loops are compiled."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Placeholder of an absent array, by its type. Loops know it by its length, as nothing is done for no rows.
NOTHING = {
    f"{dtype}[{', '.join(':' * ndim)}]": np.zeros((0,) * ndim, dtype=dtype)
    for dtype in ("bool", "int8", "int32", "int64", "float32")
    for ndim in (1, 2)
}


def compiled(arguments: str, returns: str = "void") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that compiles a function now, for arguments of these types, and keeps it on disk.

    Arrays are `[:]`, of any strides: one variant serves slices too. Numbers divide as in numpy; sums keep their order.
    Where no folder for it can be written, it is compiled at every start.
    """

    def compile_now(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = f"{returns}({arguments})"
        try:
            return numba.njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:  # numba found no place for its cache
            return numba.njit(signature, error_model="numpy")(function)

    return compile_now
