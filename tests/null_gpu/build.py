"""Compiles the null GPU's libraries: the driver, the runtime, NVML, and the libraries of mathematics and communication.

Standard library only: scripts/setup_cuda_host.py calls this before any test runs. The result is kept in a folder that
is named after a hash of the sources, so that a changed source is compiled anew and an unchanged one never.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from null_gpu import stubs

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "native"
# Shared objects of the wheels whose undefined symbols have to be there.
_WHEELS = ("torch/lib/*.so", "torchvision/_C.so", "vllm/*.so", "vllm/vllm_flash_attn/*.so", "vllm/third_party/*/*.so")
_DRIVER = ("counters.cpp", "memory.cpp", "streams.cpp", "graphs.cpp", "copies.cpp", "driver.cpp")
_RUNTIME = ("runtime.cpp", "runtime_streams.cpp")
# Hand-written sources of the other libraries; what is not named here is all stubs.
_SOURCES = {
    "cuda": _DRIVER,
    "cudart": _RUNTIME,
    **{key: (f"{key}.cpp",) for key in ("cublas", "cublasLt", "nccl", "nvml")},
    **dict.fromkeys(("cudnn", "cufft", "cupti", "nvrtc"), ("others.cpp",)),
}


class BuildError(RuntimeError):
    """The libraries could not be compiled; the message says what the compiler said."""


def source_key() -> str:
    """Return a hash of everything that is compiled and of how."""
    digest = hashlib.sha256()
    for path in sorted([*NATIVE.iterdir(), HERE / "build.py", HERE / "stubs.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def build(site_packages: Path, include: Path, home: Path, say: Callable[[str], None]) -> Path:
    """Return the folder of the libraries in `home`, compiled if they are not there; those of other sources stay.

    The CUDA builds of torch and vLLM are in `site_packages`, CUDA's headers in `include`; `say` prints a line.

    Raises:
        BuildError: The compiler refused something.
    """
    target = home / f"libraries-{source_key()}"
    if target.is_dir():
        return target
    begun = time.monotonic()
    partial = Path(tempfile.mkdtemp(prefix="libraries-", suffix=".tmp", dir=home))
    try:
        with tempfile.TemporaryDirectory(prefix="null-gpu-") as work:
            _Builder(site_packages, include, Path(work), partial).run()
        try:
            os.replace(partial, target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"compiling the null GPU's libraries: done in {time.monotonic() - begun:.0f} s")
    return target


class _Builder:
    def __init__(self, site_packages: Path, include: Path, work: Path, target: Path):
        self.site_packages, self.include, self.work, self.target = site_packages, include, work, target
        self.flags = ["-fPIC", "-g0", "-w", f"-I{include}", f"-I{NATIVE}", f"-I{work}"]

    def run(self) -> None:
        binaries = [path for pattern in _WHEELS for path in sorted(self.site_packages.glob(pattern))]
        stubs.generate(self.work, self.include, binaries)
        for key in stubs.LIBRARIES:  # the driver comes first: all others are linked with it
            self._library(key)
        (self.target / "libcuda.so").symlink_to("libcuda.so.1")  # Triton looks for this one
        packed = (path.name.removesuffix(".aside") for path in self.site_packages.glob("*.libs/libcudart.*.aside"))
        for name in ("libcudart.so", *packed):
            (self.target / name).symlink_to("libcudart.so.13")
        self._allocator_hook()

    def _library(self, key: str) -> None:
        library, objects = stubs.LIBRARIES[key], []
        for source in _SOURCES.get(key, ()):
            objects.append(self.work / f"{key}-{source}.o")
            self._run("g++", "-std=c++17", "-O2", *self.flags, f"-DLIB_{key}", "-c", NATIVE / source, "-o", objects[-1])
        objects.append(self.work / f"{key}-stubs.o")
        self._run("gcc", "-O1", *self.flags, "-c", self.work / f"{key}.c", "-o", objects[-1])
        version = self.work / f"{key}.map"
        script = [f"-Wl,--version-script={version}"] if version.exists() else []
        driver = [] if key in ("cuda", "nvml") else [f"-L{self.target}", "-l:libcuda.so.1"]
        self._link(library.soname, [*objects, *script, *driver, "-ldl", "-lpthread", "-lrt"])

    def _allocator_hook(self) -> None:
        """Compile the hook that lets blocks of PyTorch's caching allocator read as zeros."""
        torch = self.site_packages / "torch"
        source, output = NATIVE / "zero_blocks.cpp", self.work / "zero_blocks.o"
        self._run("g++", "-std=c++20", "-O1", *self.flags, f"-I{torch / 'include'}", "-c", source, "-o", output)
        self._link("libnullgpu_torch.so", [output, f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10"])

    def _link(self, soname: str, arguments: list) -> None:
        self._run("g++", "-shared", f"-Wl,-soname,{soname}", "-o", self.target / soname, *arguments)

    @staticmethod
    def _run(*command) -> None:
        run = subprocess.run([str(part) for part in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if run.returncode != 0:
            last = "\n".join(f"    {line}" for line in run.stderr.strip().splitlines()[-12:])
            raise BuildError(f"{command[0]} failed on the null GPU's sources:\n{last}")
