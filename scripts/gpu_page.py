"""The page of what the GPU suite has measured: docs/gpu-measured.md from docs/results/gpu-suite.json."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from markdown import table  # noqa: E402

RESULT, PAGE = ROOT / "docs" / "results" / "gpu-suite.json", ROOT / "docs" / "gpu-measured.md"
DRY_RUN = "a dry run on a device that computes nothing: its numbers mean nothing"
_HEAD = """# Measured on a GPU

Written by `python scripts/gpu_suite.py --page` from `docs/results/gpu-suite.json`, which `make bench-gpu` makes
([how](gpu.md#gpu-suite)).

"""
_NOTHING = """**No GPU has run this suite yet**: there is no `docs/results/gpu-suite.json`, and so no figure here.
What kernels should take is modelled in [kernels.md](kernels.md); what the host does in a step is counted on a
[null GPU](gpu.md#null-gpu).
"""
_KERNELS = """## Kernels

**Measured**: medians in µs with a cold L2 cache, beside the floor of the same device at the same minute, the larger of
what must be moved at the rate of a copy and what must be multiplied at the rate of a square product.

"""
_ENGINES = """## Engines

**Measured**: ms of a decode step, ms of its drafting, with made-up weights over a KV cache of noise. Where `acceptance`
is **forced**, so are the acceptance length, at what is published of the method, tokens per second, and the speedup over
vanilla. **Published**: the speedup in the same table (ParallelVLM, Table 1: Qwen2.5-VL 32B and 7B, VideoDetailCaption,
8 L40S).

"""
_KERNEL_COLUMNS = ("kernel", "case", "impl", "median", "floor", "outcome", "reason")
_ENGINE_COLUMNS = (
    *("engine", "batch", "models", "step_ms", "step_ms_low", "step_ms_high", "propose_ms", "acceptance"),
    *("acceptance_length", "acceptance_length_wanted", "tau_of", "tokens_per_s", "speedup", "published_speedup"),
    *("outcome", "reason"),
)


def render(found: dict[str, Any] | None) -> str:
    """Return the page of a file's rows, or of the absence of a file.

    Raises:
        ValueError: The file is of a dry run.
    """
    if found is None:
        return _HEAD + _NOTHING
    if found["note"]:
        raise ValueError(found["note"])
    machine = found["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    text = f"{_HEAD}`{found['command']}`, commit {(found['git_sha'] or 'unknown')[:10]}.\n\n"
    text += f"{machine.get('gpu')}, {machine.get('date')}, {found['seconds']} s; {versions}.\n\n"
    for key, title, columns in (("kernel", _KERNELS, _KERNEL_COLUMNS), ("engine", _ENGINES, _ENGINE_COLUMNS)):
        if rows := [row for row in found["rows"] if key in row]:
            text += title + table(columns, rows) + "\n"
    return text.rstrip("\n") + "\n"


def stored() -> dict[str, Any] | None:
    """Return the committed result, None where no GPU has made one."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else None


def write() -> None:
    """Write the page."""
    PAGE.write_text(render(stored()))
