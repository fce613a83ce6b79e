"""Where a result comes from: code, versions, command line, machine and date; standard library only."""

import datetime
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_vidspec.devices import has_nvidia_gpu
from vllm_vidspec.setup.fixups import installed_version

_PACKAGES = ("vllm-vidspec", "vllm", "torch", "transformers", "triton", "numpy")


def provenance() -> dict[str, Any]:
    """Return what a reader needs to reproduce a result; `git_sha` is None outside a checkout."""
    sha, dirty = _git_state()
    versions = {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    return {
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version(), **versions},
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "device": _nvidia("name") or "cpu",
        "driver": _nvidia("driver_version"),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git_state() -> tuple[str | None, bool | None]:
    """Return the checkout's commit and whether tracked files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    sha = _output("git", "-C", str(root), "rev-parse", "HEAD")
    status = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return sha or None, None if status is None else bool(status)


def _nvidia(field: str) -> str | None:
    """Return what nvidia-smi says of the first GPU, None where there is none."""
    if not has_nvidia_gpu() or shutil.which("nvidia-smi") is None:
        return None
    found = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str | None:
    """Return a command's standard output without the final newline, or None if it failed."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
