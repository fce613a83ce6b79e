#!/usr/bin/env python3
"""Builds sdist and wheel of the tracked files into `dist/`, and installs from there into empty environments.

    python scripts/release.py --python python3.11 --python python3.12 --extra cpu

Exit status 1 if a Python cannot install or run it. What an extra brings is installed as pip is configured to; `cpu`
needs PyTorch's index of CPU builds. `--extra lock` does without: no extra, but first what `requirements/lock-cpu.txt`
pins, with torch as pip finds it, elsewhere a CUDA build, which runs on a CPU too.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock-cpu.txt"
# What a CPU engine depends on are in part CUDA builds, which `doctor --fix` repairs.
OF_CPU = (("vidspec", "doctor", "--fix"), ("vidspec", "demo"))


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist of the tracked files, and the wheel of the sdist; return wheel and sdist."""
    backend = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"
    with tempfile.TemporaryDirectory(prefix="vidspec-build-") as clone:
        for name in _output("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]:
            Path(clone, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(clone, name))
        sdist = out / _output(sys.executable, "-c", backend, str(out), cwd=clone).split()[-1]
    _output(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(sdist))
    return out / f"{sdist.name.removesuffix('.tar.gz')}-py3-none-any.whl", sdist


def _output(*command: str, cwd: str | Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def installs(extra: str) -> list[list[str]]:
    """Return what pip is given, one call after another."""
    if extra != "lock":
        return [[f"vllm-vidspec[{extra}]" if extra else "vllm-vidspec"]]
    (torch,) = re.findall(r"^torch==\S+", LOCK.read_text(), re.MULTILINE)
    return [[torch], ["--no-deps", "-r", str(LOCK)], ["vllm-vidspec"]]  # vLLM's CPU wheel names torch's CPU build


def works(python: str, extra: str, dist: Path) -> bool:
    """Install into an empty environment of one Python and run commands in it; return whether all of it succeeds."""
    # A path to this clone would be found before what was installed.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="vidspec-empty-") as folder:
        bin_ = Path(folder, "bin")
        pip = [str(bin_ / "python"), "-m", "pip", "install", "--no-input", "-q", "--find-links", str(dist)]
        commands = [("vidspec", "--version"), *(OF_CPU if extra in ("cpu", "lock") else ())]
        steps = [[python, "-m", "venv", folder], *([*pip, *words] for words in installs(extra))]
        steps += [[str(bin_ / program), *words] for program, *words in commands]
        for step in steps:
            print(f"[release] {python}:", *step, flush=True)
            if subprocess.run(step, cwd=folder, env=env).returncode:
                return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="an interpreter to try; repeat for more")
    parser.add_argument("--extra", default="", choices=("", "cpu", "gpu", "lock"), help="which engine comes with it")
    given = parser.parse_args()
    dist = ROOT / "dist"
    print("[release]", *(f"{file.name} ({file.stat().st_size >> 10} KiB)" for file in build(dist)))
    failing = [python for python in given.python if not works(python, given.extra, dist)]
    if failing:
        print(f"[release] error: {', '.join(failing)} cannot install or run it", file=sys.stderr)
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main())
