"""A step of the GPU runner, in a process of its own: its context, its verdict, an engine.

It appends JSON lines to a file: rows as they come, and a last one with its outcome. Top-level imports are the standard
library's: a broken torch is a step's failure, not the runner's.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import plan

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
# These prove as much on a device that computes nothing.
WITHOUT_NUMBERS = ("environment", "sync-debug")
# Defaults of a step's process; what is already set stays.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    # vLLM's fp32 attention names no precision, so Triton would use TF32 and texts would differ by rounding.
    "TRITON_F32_DEFAULT": "ieee",
    **dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


class StepFailedError(Exception):
    """One line on why a step failed."""


class SkippedError(Exception):
    """One line on why a step cannot run here."""


def expect(holds: object, reason: str) -> None:
    if not holds:
        raise StepFailedError(reason)


@dataclass(frozen=True)
class Context:
    work_dir: str = ""  # for made-up checkpoints
    # "module:name" of a context manager that emulates a device which computes nothing, around engines' steps: checks
    # run, and their results are ignored; measurements are tiny. "" for a real device.
    dry_run: str = ""
    models: str = "auto"  # of measured engines: "auto" or a key of `plan.MODELS`
    write: Callable[[Row], None] = lambda row: None  # appends a row to the step's record


@contextlib.contextmanager
def engine(context: Context, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Start a `harness.Engine`. The plugin is registered by hand: the repository may not be installed."""
    from benchmarks import harness
    from vllm_vidspec.plugin import register

    register()
    module, _, name = (context.dry_run or "contextlib:nullcontext").partition(":")
    with harness.Engine(kwargs) as running, getattr(importlib.import_module(module), name)():
        yield running


def environment(context: Context) -> dict[str, Any]:
    import torch

    from vllm_vidspec.tools.provenance import provenance

    expect(torch.cuda.is_available(), "torch sees no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    return provenance() | {
        "torch_cuda": torch.version.cuda,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_bytes": properties.total_memory,
    }


def call(step: plan.Step, context: Context) -> dict[str, Any] | None:
    """Return a step's facts. Its module is imported for it alone: kernels need neither vLLM nor our dependencies."""
    module, _, name = step.call.partition(":")
    function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    return function(context) if step.argument is None else function(context, step.argument)


def run(step: plan.Step, context: Context) -> None:
    """Run a step, and write its outcome as the last of its lines."""
    outcome, reason, facts = "passed", "", None
    try:
        import torch

        if step.name != "environment" and not torch.cuda.is_available():
            raise SkippedError("torch sees no CUDA device")
        facts = call(step, context)
        if context.dry_run and step.name not in WITHOUT_NUMBERS:
            outcome, reason = "unchecked", "ran; its numbers were not checked"
    except (SkippedError, StepFailedError) as why:
        outcome, reason = "skipped" if isinstance(why, SkippedError) else "failed", str(why)
    except Exception as error:
        traceback.print_exception(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        outcome, reason = "failed", " ".join(f"{type(error).__name__}: {error} ({place})".split())[:400]
    context.write({"outcome": outcome, "reason": reason, "facts": facts or {}})


def main() -> None:
    name, lines, options = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent before a hanging step is killed
    with open(lines, "a", buffering=1) as file:
        write = lambda row: print(json.dumps({"step": name} | row), file=file)  # noqa: E731
        run(plan.STEPS[name], Context(**json.loads(options), write=write))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads must not keep the process: all is written
