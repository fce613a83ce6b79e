"""Puts our twins of vLLM's kernels in the place of those that Triton's interpreter would run, in every CPU process."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_vidspec.engine.compat import cpu as compat
from vllm_vidspec.engine.cpu import batch_kernels, kernels


def install() -> None:
    compat.repair_interpreter_kernels()
    compat.replace_interpreted_kernels(_twins)


def twin_of(name: str) -> Callable:
    """Return the function that serves the whole grid of a kernel `_<name>_kernel`."""
    return getattr(kernels if hasattr(kernels, name) else batch_kernels, name)


def _twins(name: str) -> tuple[Callable[[Any], Any], list[str]]:
    run = twin_of(name)
    return functools.partial(kernels.Twin, run), kernels.reads(run)
