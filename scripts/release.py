#!/usr/bin/env python3
"""Builds wheel and sdist, serves them as a package index, and installs them from there into empty environments.

    python scripts/release.py --python python3.11 --python python3.12 --extra cpu --json runs/release.json

Reads the tracked files of this clone and writes to `dist/`; environments live in a temporary folder. What an extra
brings is installed as pip is configured to; a version of Python that it has no wheels for is recorded as such. The
extra `cpu` needs PyTorch's index of CPU builds. `--extra lock` does without: no extra, but first what
`requirements/lock-cpu.txt` pins, with torch as pip finds it, elsewhere a CUDA build, which runs on a CPU too.
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "vllm-vidspec"
LOCK = ROOT / "requirements" / "lock-cpu.txt"


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist of the tracked files, and the wheel of the sdist; return wheel and sdist."""
    with tempfile.TemporaryDirectory(prefix="vidspec-build-") as folder:
        clone = Path(folder, "clone")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
        sdist = out / _backend("build_sdist", clone, out)
        with tarfile.open(sdist) as packed:
            packed.extractall(folder, filter="data")
        (source,) = (path for path in Path(folder).iterdir() if path != clone)
        return out / _backend("build_wheel", source, out), sdist


def _backend(hook: str, source: Path, out: Path) -> str:
    code = f"import setuptools.build_meta as backend; print(backend.{hook}({str(out)!r}))"
    out.mkdir(parents=True, exist_ok=True)
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"[release] error: {hook} failed: {run.stderr[-2000:]}")
    return run.stdout.strip().splitlines()[-1]


@contextlib.contextmanager
def served(*files: Path) -> Iterator[str]:
    """Serve distributions of this project as a simple index; yield its address."""
    with tempfile.TemporaryDirectory(prefix="vidspec-index-") as folder:
        project = Path(folder, "simple", NAME)
        project.mkdir(parents=True)
        for file in files:
            shutil.copy(file, project)
        handler = functools.partial(_Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/simple"
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def installs(extra: str) -> list[list[str]]:
    if extra != "lock":
        return [[f"{NAME}[{extra}]" if extra else NAME]]
    (torch,) = re.findall(r"^torch==\S+", LOCK.read_text(), re.MULTILINE)
    return [[torch], ["--no-deps", "-r", str(LOCK)], [NAME]]  # the CPU wheel of vLLM wants torch's CPU build by name


def attempt(index: str, python: str, extra: str, commands: Sequence[Sequence[str]], limit_s: float) -> list[dict]:
    """Install into an empty environment of one Python and run commands in it, until one fails.

    Return a row for each step: `step`, `status` (None: stopped after the limit), `seconds`, and `last`, its last line
    that tells something.
    """
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="vidspec-empty-") as folder:
        bin_ = Path(folder, "bin")
        pip = [bin_ / "python", "-m", "pip", "install", "--no-input", "-q", "--extra-index-url", index]
        steps = {"venv": [python, "-m", "venv", folder]}
        steps |= {f"pip install {Path(words[-1]).name}": [*pip, *words] for words in installs(extra)}
        steps |= {" ".join(words): [bin_ / words[0], *words[1:]] for words in commands}
        for name, words in steps.items():
            row = _timed(list(map(str, words)), name, folder, limit_s)
            rows.append(row)
            print(f"[release] {python}: {name}: {row['status']} in {row['seconds']} s: {row['last']}", flush=True)
            if row["status"] != 0 and name.startswith(("venv", "pip")):
                break
    return rows


def _timed(words: list[str], name: str, folder: str, limit_s: float) -> dict:
    begun, status, text = time.monotonic(), None, "stopped"
    try:
        # A path to this clone would be found before what was installed.
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        run = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s)
        status, text = run.returncode, (run.stdout + run.stderr if run.returncode else run.stderr + run.stdout)
    except subprocess.TimeoutExpired:
        pass
    except FileNotFoundError as error:
        status, text = 127, str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    telling = [line for line in lines if re.search(r"^ERROR|^vidspec:|\bfail\b|identical answers", line)]
    return {
        "step": name,
        "status": status,
        "seconds": round(time.monotonic() - begun, 1),
        "last": " ".join((telling or lines or ["-"])[-1].split())[:160],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="an interpreter to try; repeat for more")
    parser.add_argument("--extra", default="", choices=("", "cpu", "gpu", "lock"), help="which engine comes with it")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="for each step")
    parser.add_argument("--json", type=Path, help="where to record the rows")
    given = parser.parse_args()
    wheel, sdist = build(ROOT / "dist")
    print(f"[release] {wheel.name} ({wheel.stat().st_size >> 10} KiB), {sdist.name} ({sdist.stat().st_size >> 10} KiB)")
    # What a CPU engine depends on are in part CUDA builds, which `doctor --fix` repairs.
    of_cpu = [["vidspec", "doctor", "--fix"], ["vidspec", "demo"]]
    commands = [["vidspec", "--version"], ["vidspec", "doctor"], *(of_cpu if given.extra in ("cpu", "lock") else [])]
    with served(wheel, sdist) as index:
        rows = [
            {"python": python, "extra": given.extra, **row}
            for python in given.python
            for row in attempt(index, python, given.extra, commands, given.limit)
        ]
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    # Doctor alone may find something: no engine, or what `doctor --fix` repairs.
    sys.exit(any(row["status"] != 0 and row["step"] != "vidspec doctor" for row in rows))


if __name__ == "__main__":
    main()
