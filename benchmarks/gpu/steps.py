"""What a step of the GPU runner is made of: its context, its verdict, an engine in its process.

    python scripts/gpu_steps.py NAME LINES CONTEXT

runs a step in this process and appends JSON lines to a file: its rows as they come, and a last one with its outcome.
Top-level imports are the standard library's: a broken torch is a step's failure, not the runner's.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
# ruff: noqa: E402
from decode_steps import around

Row = dict[str, Any]
# These prove as much on a device that computes nothing.
WITHOUT_NUMBERS = ("environment", "sync-debug")


class StepFailedError(Exception):
    """One line on why a step failed."""


class SkippedError(Exception):
    """One line on why a step cannot run here."""


def expect(holds: bool, reason: str) -> None:
    if not holds:
        raise StepFailedError(reason)


@dataclass(frozen=True)
class Context:
    work_dir: str = ""  # For made-up checkpoints
    # Whether the device computes nothing: checks run, and their results are ignored; measurements are tiny.
    dry_run: bool = False
    models: str = "auto"  # Of measured engines: "auto" or a key of `gpu_plan.MODELS`
    around: str = ""  # "module:name" of a context manager for engines' steps, "" for none
    write: Callable[[Row], None] = lambda row: None  # Appends a row to the step's record


Step = Callable[[Context], dict[str, Any] | None]  # returns its facts, writes rows, or raises


@contextlib.contextmanager
def engine(context: Context, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Start a `harness.Engine`. The plugin is registered by hand: the repository may not be installed."""
    from vllm_vidspec.plugin import register

    register()
    import harness

    with harness.Engine(kwargs) as running, around(context.around):
        yield running


def environment(context: Context) -> dict[str, Any]:
    import torch

    from vllm_vidspec.tools.provenance import provenance

    facts: dict[str, Any] = provenance()
    facts["versions"] |= {"python": platform.python_version(), "torch": torch.__version__}
    expect(torch.cuda.is_available(), "torch sees no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "torch_cuda": torch.version.cuda,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_bytes": properties.total_memory,
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


STEPS: dict[str, Step] = {"environment": environment}


def step_of(name: str) -> Step:
    """Return a step by name. Its module is imported for it alone: kernels need neither vLLM nor our dependencies."""
    if name in STEPS:
        return STEPS[name]
    is_measured = name.startswith(("kernel-", "engine-"))
    return importlib.import_module("gpu_measure" if is_measured else "gpu_checks").STEPS[name]


def run(name: str, context: Context, step: Step | None = None) -> None:
    """Run a step, and write its outcome as the last of its lines."""
    outcome, reason, facts = "passed", "", None
    try:
        import torch

        if name != "environment" and not torch.cuda.is_available():
            raise SkippedError("torch sees no CUDA device")
        facts = (step or step_of(name))(context)
        if context.dry_run and name not in WITHOUT_NUMBERS:
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
        run(name, Context(**json.loads(options), write=lambda row: print(json.dumps({"step": name} | row), file=file)))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads must not keep the process: all is written


if __name__ == "__main__":
    sys.modules["gpu_steps"] = sys.modules["__main__"]  # the steps' modules import this one
    main()
