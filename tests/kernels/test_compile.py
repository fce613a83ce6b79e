"""Kernels compiled without a GPU: what they take on four architectures, and how many variants of them there are."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from vidspec_kernels import dispatch, visual_relevance
from vidspec_kernels.tree_attention import _held_bytes, _pipeline, _tile

ROOT = Path(__file__).parents[2]
# The heaviest shapes of each kernel; benchmarks/compile_report.py without arguments compiles all.
HEAVIEST = "28/4 Q26 25k$|28/4 Q26 200|prefix given|tree K64|Q65 100k$|28/4 nq32|F10 C10"
ARCHS = (80, 89, 90, 100)

pytestmark = pytest.mark.skipif(
    not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(), reason="this Triton has no ptxas"
)


def run(*command: str) -> dict:
    """Return what a program prints that needs the compiler: Triton here is the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows():
    return run("benchmarks/compile_report.py", "--json", "--cases", HEAVIEST)["rows"]


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_spills(rows, arch):
    """Catches: more values held at a time than there are registers; each spilled one costs a round through memory."""
    rows = [row for row in rows if row["arch"] == arch]
    assert {row["kernel"] for row in rows} == {
        *("tree_attention", "merge_splits", "visual_relevance", "row_stats", "guidance_scores"),
        *("accept_loose", "tree_grow"),
    }
    assert [(row["kernel"], row["case"], row["spill_bytes"]) for row in rows if row["spill_bytes"]] == []


@pytest.mark.parametrize("arch", ARCHS)
def test_two_programs_share_a_multiprocessor(rows, arch):
    """Catches: a tile that counts on the driver's share of shared memory, which leaves half of the programs waiting."""
    attention = [row for row in rows if row["arch"] == arch and row["kernel"] in ("tree_attention", "row_stats")]
    assert len(attention) >= 4
    assert all(row["programs_per_sm"] >= 2 for row in attention), attention


def test_products_take_tensor_cores_and_fuse(rows):
    """Catches: half-precision products in plain arithmetic; FP fusion left to a default that the next Triton turns."""
    products = {"tree_attention", "visual_relevance", "row_stats", "guidance_scores"}
    assert all(row["tensor_cores"] != "none" for row in rows if row["kernel"] in products)
    hopper = [row for row in rows if row["arch"] == 90 and row["kernel"] in ("tree_attention", "visual_relevance")]
    assert {row["tensor_cores"] for row in hopper} == {"wgmma"}
    assert all(row["fp_fusion"] for row in rows)


def test_cold_compilation_is_bounded(rows):
    """Catches: loops unrolled until a variant takes minutes. CPU seconds of one, with room for a slow CPU."""
    assert all(row["compile_cpu_s"] < 60 for row in rows), [row for row in rows if row["compile_cpu_s"] >= 60]


def test_every_variant_that_steps_use_is_warmed():
    """150 random steps, with vectors cut out of others at any offset: nothing is left to compile while serving.

    Catches: a size that changes from step to step, or the alignment of a slice, that makes a variant of its own
    (without the decorators' exceptions these steps use 287 variants); a wrapper that the warm-up forgets.
    """
    found = run("tests/kernels/variants.py")
    assert found["missing"] == []
    assert found["used"].keys() == found["warmed"].keys() and len(found["used"]) == 13
    assert sum(found["warmed"].values()) <= 30, found["warmed"]


@pytest.mark.parametrize(("capability", "keys", "stages"), [(90, 64, 5), (100, 64, 4), (80, 32, 5), (89, 16, 5)])
def test_tiles_count_scratch_and_the_drivers_share(capability, keys, stages):
    """Two programs of 64 rows of 128 bfloat16 fit: their tiles, 1 KB of scratch, what Blackwell waits on, and 1 KB each
    for the driver."""
    shared_kb, most_kb = {80: (164, 163), 89: (100, 99), 90: (228, 227), 100: (228, 227)}[capability]
    limits = dispatch.DeviceLimits(1, shared_kb * 1024, most_kb * 1024, capability)
    room = dispatch.shared_bytes_per_program(limits, 2)
    assert 2 * (room + 1024) == shared_kb * 1024
    assert _tile(64, 256, room) == keys and _held_bytes(64, 256, 16) <= room
    assert _pipeline(64, 256, keys, limits)[0] == stages


def test_float8_is_refused_before_ada(monkeypatch):
    """One clear line instead of the compiler's, where a GPU has no float8."""
    module = importlib.import_module("vidspec_kernels.visual_relevance")
    limits = dispatch.DeviceLimits(108, 164 * 1024, 163 * 1024, 80)
    monkeypatch.setattr(module, "device_limits", lambda device: limits)
    index = torch.zeros(2, dtype=torch.int32)
    store = torch.zeros(1, 64, 32, dtype=torch.float8_e4m3fn)
    tables = (store, index[:1], index[:1, None], index[:1])
    with pytest.raises(ValueError, match=r"compute capability 8\.9"):
        visual_relevance(torch.zeros(1, 32), index, index[:1].long(), *tables, 4, 1, 1, impl="triton")
    visual_relevance(torch.zeros(1, 32), index, index[:1].long(), *tables, 4, 1, 1, impl="torch")
