"""Generates a weak stub, which counts its call, for every entry point of NVIDIA's libraries that wheels or headers
name."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Library:
    """A shared library to stand in for."""

    soname: str  # what the wheels ask the loader for
    node: str | None  # version node of its symbols
    prefix: str  # pattern of its symbols' names, for wheels that ask for no version


LIBRARIES = {
    "cuda": Library("libcuda.so.1", None, r"cu[A-Z]"),
    "nvml": Library("libnvidia-ml.so.1", None, "nvml"),
    "cudart": Library("libcudart.so.13", "libcudart.so.13", r"(__)?cuda"),
    "cublas": Library("libcublas.so.13", "libcublas.so.13", r"cublas(?!Lt)"),
    "cublasLt": Library("libcublasLt.so.13", "libcublasLt.so.13", "cublasLt"),
    "cudnn": Library("libcudnn.so.9", "libcudnn.so.9", "cudnn"),
    "cufft": Library("libcufft.so.12", "libcufft.so.12", "cufft"),
    "cufile": Library("libcufile.so.0", None, "cuFile"),
    "cupti": Library("libcupti.so.13", "libcupti.so.13", "cupti"),
    "curand": Library("libcurand.so.10", None, "curand"),
    "cusolver": Library("libcusolver.so.12", "libcusolver.so.12", "cusolver"),
    "cusparse": Library("libcusparse.so.12", "libcusparse.so.12", r"cusparse(?!Lt)"),
    "cusparseLt": Library("libcusparseLt.so.0", None, "cusparseLt"),
    "nccl": Library("libnccl.so.2", None, "nccl"),
    "nvrtc": Library("libnvrtc.so.13", "libnvrtc.so.13", "nvrtc"),
    "nvshmem": Library("libnvshmem_host.so.3", "NVSHMEM", "nvshmem"),
}
HEADERS = {"cuda": "cuda.h", "cudart": "cuda_runtime_api.h", "nvml": "nvml.h"}
# Libraries whose "create" calls return a handle through their first argument.
_HANDLES = LIBRARIES.keys() - {"cuda", "cudart", "nvml", "cufft"}
_MATRIX_PRODUCT = re.compile(r"gemm|gemv|Gemm|dot|trsm|axpy|nrm2|scal")


def generate(folder: Path, include: Path, binaries: Iterable[Path]) -> None:
    """Write NAME.c, for a versioned library NAME.map, and `cublas_launches.inc` into `folder`."""
    symbols = _declared(include)
    for binary in binaries:
        for library, name in _undefined(binary):
            symbols[library].add(name)
    for key, library in LIBRARIES.items():
        (folder / f"{key}.c").write_text(_source(key, symbols[key]))
        if library.node:
            (folder / f"{key}.map").write_text(f"{library.node} {{ global: *; }};\n")
    products = (n for n in sorted(symbols["cublas"]) if _MATRIX_PRODUCT.search(n) and not re.search("Get|Set", n))
    (folder / "cublas_launches.inc").write_text("".join(f"LAUNCHES({name})\n" for name in products))


def _declared(include: Path) -> dict[str, set[str]]:
    """Return by library the entry points that the headers declare, versioned names of the driver's included."""
    symbols: dict[str, set[str]] = {key: set() for key in LIBRARIES}
    for key, header in HEADERS.items():
        text = (include / header).read_text(errors="replace")
        symbols[key] |= set(re.findall(r"(?:CUDAAPI|CUDARTAPI|DECLDIR)\s+((?:cu|nvml)\w+)\s*\(", text))
        if key == "cuda":
            macros = re.findall(r"#\s*define\s+cu\w+\s+(?:__CUDA_API_\w+\()?(cu\w+?)\)?\s*$", text, re.MULTILINE)
            symbols[key] |= {name for name in macros if re.match(LIBRARIES[key].prefix, name)}
    return symbols


def _undefined(binary: Path) -> Iterable[tuple[str, str]]:
    """Yield (library, symbol) of what a shared object wants from NVIDIA's libraries."""
    by_node = {library.node: key for key, library in LIBRARIES.items() if library.node}
    by_prefix = sorted(LIBRARIES.items(), key=lambda item: item[0] != "cufile")  # its names begin like the driver's
    run = subprocess.run(["readelf", "-W", "--dyn-syms", binary], capture_output=True, text=True, check=True)
    for line in run.stdout.splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] != "UND":
            continue
        name, _, node = fields[7].partition("@")
        node = node.lstrip("@")
        if node in by_node:
            yield by_node[node], name
        elif not node and (keys := [key for key, library in by_prefix if re.match(library.prefix, name)]):
            yield keys[0], name


def _source(key: str, names: set[str]) -> str:
    """Return the C text of a library's stubs."""
    if key == "nvml":  # linked without the driver: an unknown question is "not supported"
        rows = ["static int ng_stub(const char* name) { return 3; }"]
    else:
        rows = ["int ng_stub(const char*);"]
    rows.insert(0, "#include <stdlib.h>")
    for name in sorted(names):
        if key == "cuda" and name.endswith("_ptsz"):
            continue
        if re.search(r"(ErrorString|StatusString|ErrorName)$", name):
            body = 'return (long)"null GPU";'
        elif key in _HANDLES and re.search("[cC]reate", name):
            body = f'*(void**)first = calloc(1, 4096); ng_stub("{name}"); return 0;'
        else:
            body = f'return ng_stub("{name}");'
        rows.append(f"__attribute__((weak)) long {name}(void* first) {{ {body} }}")
    return "\n".join(rows) + "\n"
