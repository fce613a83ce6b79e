"""The page of what the GPU suite has measured: docs/gpu-measured.md from docs/results/gpu-suite.json."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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

**Measured**: ms of a decode step, ms of its drafting, with made-up weights over a KV cache of noise. **Forced**: the
acceptance length, at what is published of the method, and so tokens per second and what they are of vanilla's.
**Published**: the speedup in the same table (ParallelVLM, Table 1: Qwen2.5-VL 32B and 7B, VideoDetailCaption, 8 L40S).

"""
_KERNEL_HEADS = ("kernel", "case", "what", "µs", "floor", "of it")
_ENGINE_HEADS = (
    *("engine", "batch", "models", "step ms", "draft ms", "length (wanted)", "tokens/s", "x vanilla", "published x"),
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
    for key, title, heads, cells in (
        ("kernel", _KERNELS, _KERNEL_HEADS, _kernel_cells),
        ("engine", _ENGINES, _ENGINE_HEADS, _engine_cells),
    ):
        if rows := [row for row in found["rows"] if key in row]:
            text += title + table(heads, map(cells, rows))
    return text.rstrip("\n") + "\n"


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table and an empty line."""
    body = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
    return f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n{body}\n"


def _kernel_cells(row: dict[str, Any]) -> list[str]:
    names = [f"`{row['kernel']}`", row.get("case", ""), row.get("impl", "")]
    if row["outcome"] != "measured":
        return [*names, f"{row['outcome']}: {row['reason']}", "", ""]
    share = 100 * row["floor"] / row["median"]
    return [*names, f"{row['median']:.1f}", f"{row['floor']:.2f}", f"{share:.0f} %"]


def _engine_cells(row: dict[str, Any]) -> list[str]:
    names = [row["engine"], str(row["batch"]), row.get("models", "")]
    if row["outcome"] != "measured":
        return [*names, f"{row['outcome']}: {row['reason']}", *[""] * 5]
    forced = "forced " if row["acceptance"] == "forced" else ""
    wanted, propose_ms, published = row["acceptance_length_wanted"], row["propose_ms"], row.get("published_speedup")
    return [
        *names,
        f"{row['step_ms']:.2f} ({row['step_ms_low']:.2f} to {row['step_ms_high']:.2f})",
        "" if propose_ms is None else f"{propose_ms:.2f}",
        f"{forced}{row['acceptance_length']:.2f}" + (f" ({wanted:.2f}, {row['tau_of']})" if wanted else ""),
        f"{forced}{row['tokens_per_s']:.1f}",
        f"{forced}{row['speedup']:.2f}" if "speedup" in row else "",
        "" if published is None else f"{published:.2f}",
    ]


def stored() -> dict[str, Any] | None:
    """Return the committed result, None where no GPU has made one."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else None


def write() -> None:
    """Write the page."""
    PAGE.write_text(render(stored()))
