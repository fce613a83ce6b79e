"""What every patch is made of: a check of the names that it relies on, and a wrapper that is put on once, or a value
that is put in for a while.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from vllm_vidspec import SUPPORTED_VLLM
from vllm_vidspec.errors import VidSpecError

MARK = "_vidspec_original"  # on a replacement: what it has replaced
NEEDED_VLLM = f"vllm_vidspec needs vLLM {' or '.join(SUPPORTED_VLLM)}"


def expect_parameters(function: Callable, *names: str) -> None:
    """Check that a vLLM function or kernel still takes the parameters we rely on, in this order, or refuse it."""
    function = getattr(function, "fn", function)  # what a Triton kernel was made of
    found = [name for name in inspect.signature(function).parameters if name in names]
    if found != list(names):
        where = f"{function.__module__}.{function.__qualname__}"
        raise VidSpecError(f"this vLLM's {where} no longer takes ({', '.join(names)}); {NEEDED_VLLM}")


def replace(owner: Any, name: str, make: Callable[[Any], Any], *parameters: str) -> bool:
    """Replace a function or Triton kernel once by `make(original)`, which must take `parameters`; return False where it
    had been replaced. The original is kept on the replacement.
    """
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return False
    expect_parameters(original, *parameters)
    replacement = make(original)
    if inspect.isfunction(original):
        functools.update_wrapper(replacement, original)
    setattr(replacement, MARK, original)
    setattr(owner, name, replacement)
    return True


def wrap(owner: Any, name: str, around: Callable, *parameters: str) -> bool:
    """Replace a function once by `around(original, ...)`; see `replace`."""

    def make(original: Callable) -> Callable:
        return lambda *args, **kwargs: around(original, *args, **kwargs)

    return replace(owner, name, make, *parameters)


@contextlib.contextmanager
def put_in(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute, which must be there, have another value meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
