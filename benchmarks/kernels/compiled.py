"""Compile the Triton kernels at real shapes for several architectures, without a GPU, and report what they take.

python -m benchmarks.kernels.compiled [--archs 80,90] [--cases 28/4] [--json]

The project's own wrappers are called with meta tensors, which compile and launch nothing, under a driver that only
names an architecture: so what is compiled is what a launch of these shapes compiles, tile sizes and specialisation
included. One row is one compiled kernel: registers, bytes spilled (`ptxas -v`), shared memory, how many programs share
a multiprocessor, and the CPU seconds of a cold compile. Rows are kept beside Triton's own cache, by its keys, which
cover source, options, target and compiler: an empty TRITON_CACHE_DIR compiles again.
"""

import os

# Before the first `import triton`: only its own backends, and the compiler rather than the interpreter.
os.environ["TRITON_BACKENDS_IN_TREE"] = "1"
os.environ["TRITON_INTERPRET"] = "0"

import argparse
import contextlib
import io
import itertools
import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels import launches
from vidspec_kernels import dispatch
from vidspec_kernels.limits import DeviceLimits
from vllm_vidspec.planning.roofline import ARCHITECTURES as ARCHS

# Warps' registers come in units of 256 a warp, of 65,536; a program's shared memory has 1 KB more than it asks for.
_REGISTERS, _REGISTER_UNIT, _RESERVED_BYTES, _MAX_PROGRAMS = 65536, 256, 1024, 32


@contextlib.contextmanager
def pretending(arch: int) -> Iterator[None]:
    """Let Triton and the wrappers see the current device as one of an architecture."""
    card = ARCHS[arch]
    limits = DeviceLimits(card.num_sms, card.shared_kb * 1024, card.program_kb * 1024, arch)
    names = ("tree_attention.api", "visual_relevance.api", "guidance_scores.api", "float8")
    modules = [sys.modules[f"vidspec_kernels.{name}"] for name in names]
    driver.set_active(
        SimpleNamespace(  # what Triton asks of a driver until a launch
            get_current_device=lambda: arch,  # Triton keeps compiled kernels by device
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
            get_active_torch_device=lambda: torch.device("meta"),
        )
    )
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "device_limits", lambda device: limits))
        yield


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def programs_per_sm(registers: int, num_warps: int, shared_bytes: int, arch: int) -> int:
    card = ARCHS[arch]
    of_a_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // (of_a_warp * num_warps)
    by_shared = card.shared_kb * 1024 // (shared_bytes + _RESERVED_BYTES)
    return min(by_registers, by_shared, card.threads // (32 * num_warps), _MAX_PROGRAMS)


def memory_operations(ptx: str) -> list[str]:
    """Return global loads, stores (".v": several words at once), atomics, barriers, and what overlaps launches, in
    their order, runs as one.
    """
    ordering = r"(bar)\.sync|(atom)\.global|griddepcontrol\.(wait|launch_dependents)"
    found = re.findall(rf"\b(?:(ld|st)\.global\S*?(\.v\d)?\.[bsuf]\d+|{ordering})", ptx)
    names = ["".join(others) or name + (".v" if vector else "") for name, vector, *others in found]
    return [name for name, _ in itertools.groupby(names)]


def report(arch: int, cases: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an architecture: of every case whose label matches `cases`; earlier runs' lie in a folder."""
    rows: list[dict[str, Any]] = []

    def prepare(kernel: JITFunction, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Stand in for `dispatch._prepare`: there is no device to load a kernel onto."""
        log, begin = io.StringIO(), cpu_seconds()
        with contextlib.redirect_stdout(log):
            compiled = kernel.warmup(*args, grid=grid, **kwargs)
        seconds = cpu_seconds() - begin
        known = folder / f"{compiled.hash}.json"
        if log.getvalue():  # of the assembler: it has run
            known.write_text(json.dumps(measured(arch, kernel, compiled, log.getvalue(), seconds)))
        loops = compiled.asm["ttgir"].count("scf.for ")
        rows.append({"case": case.label} | json.loads(known.read_text()) | {"loops": loops})

    with pretending(arch), mock.patch.object(dispatch, "_prepare", prepare):
        for case in launches.cases():
            if arch not in case.not_on and re.search(cases, case.label):
                case.call()
    return rows


def measured(arch: int, kernel: JITFunction, compiled: Any, log: str, seconds: float) -> dict[str, Any]:
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    registers = int(re.findall(r"Used (\d+) registers", log)[0])
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)[0]
    return {
        "kernel": kernel.__name__.strip("_").removesuffix("_kernel"),
        "arch": arch,
        "registers": registers,
        "spill_bytes": int(stores) + int(loads),
        "shared_bytes": metadata.shared,
        "programs_per_sm": programs_per_sm(registers, metadata.num_warps, metadata.shared, arch),
        "num_warps": metadata.num_warps,
        "fp_fusion": metadata.enable_fp_fusion,
        "tensor_cores": next((name for name in ("wgmma", "tcgen05", "mma.sync") if name in ptx), "none"),
        "copies_ahead": "cp.async.cg" in ptx,
        "memory": memory_operations(ptx),
        "waits": ptx.count("griddepcontrol.wait"),
        "compile_cpu_s": round(seconds, 2),
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=",".join(map(str, ARCHS)), help="sm numbers, comma-separated")
    parser.add_argument("--cases", default="", help="only cases whose label matches this expression")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    arguments = parser.parse_args(argv)
    root = Path(knobs.cache.dir) / "vidspec-compile-report-4"  # a cache of its own: every binary in it has its row
    knobs.cache.dir, knobs.nvidia.dump_ptxas_log = str(root), True
    folder = root / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for arch in (int(arch) for arch in arguments.archs.split(",")):
        rows += report(arch, arguments.cases, folder)
    if arguments.json:
        print(json.dumps({"triton": triton.__version__, "rows": rows}))
        return rows
    names = ("arch", "registers", "spill_bytes", "shared_bytes", "programs_per_sm", "num_warps", "compile_cpu_s")
    for row in rows:
        print(f"{row['kernel']}, {row['case']}:", *(f"{name} {row[name]}" for name in names))
    return rows


if __name__ == "__main__":
    main()
