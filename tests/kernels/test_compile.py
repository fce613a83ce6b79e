"""Kernels compiled without a GPU: what they take and how many variants of them there are."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from vidspec_kernels import visual_relevance
from vidspec_kernels.limits import DeviceLimits, shared_bytes_per_program
from vidspec_kernels.tree_attention.tiles import _held_bytes, _pipeline, _tile, tile_shape

ROOT = Path(__file__).parents[2]
# The heaviest shapes of each kernel; the report without arguments compiles all.
HEAVIEST = (
    "28/4 Q9$|28/4 Q26$|tree K64|Q65 100k$|top 128|28/4 nq32|F10 C10|K25, axes 3|C64 152k|152k noise|"
    "K64, ring 512|K64 152k tokens|28/4 Q26 fp8"
)
# Other dtypes, padded sizes and small launches: once, for Hopper. Each kernel's least sizes are among them.
FORMS = (
    "d80|fp32|fp16 top 2|Q11 25k top 10|Q26 25k fp8|chain K10|tree K1$|bits|axes|F8|static K64|adaptive K64|roots|"
    "count K64|152k|ring 64"
)
REPORT = ("-m", "benchmarks.kernels.compiled", "--json")
ARCHS = (80, 90)  # the report has 89, 100 and 120, too

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
    return run(*REPORT, "--archs", ",".join(map(str, ARCHS)), "--cases", HEAVIEST)["rows"]


@pytest.fixture(scope="module")
def forms():
    return run(*REPORT, "--archs", "90", "--cases", FORMS)["rows"]


def test_every_form_compiles_for_hopper(forms):
    """Catches: what only the compiler refuses; no tensor cores; tiles too large for two; rows copied in part lines."""
    assert {row["kernel"] for row in forms} >= {
        *("accept", "begin_step", "next_level", "draw", "choose_draw", "candidates", "merge_candidates", "kv_compact"),
        *("loosen", "path_penalties", "gather_draft_windows", "copy_committed_suffix"),
        *("tree_begin", "tree_place", "tree_plan", "tree_grow", "tree_finish"),
    }
    by_case = {(row["kernel"], row["case"]): row for row in forms}
    for (kernel, case), row in by_case.items():
        assert not row["spill_bytes"], row
        if kernel in ("tree_attention", "visual_relevance"):
            # Two programs an SM; each also takes 1 KB for itself.
            assert row["shared_bytes"] <= (228 // 2 - 1) * 1024, row
            assert (row["tensor_cores"] == "none") == ("fp32" in case), row
        if kernel in ("tree_attention", "visual_relevance", "guidance_scores", "row_stats"):
            assert row["tensor_cores"] == "wgmma" or "fp32" in case, row
        if kernel == "visual_relevance":
            # One loop over tiles and their chunks: with one loop in another the copies drain at each tile.
            assert row["copies_ahead"] and row["loops"] == 1, row
    assert {case for kernel, case in by_case if kernel == "tree_attention"} == {
        "10/2 d80 Q9 fp16, prefix given", "4/2 d32 Q9 fp32"
    }  # fmt: skip
    assert sum(kernel == "visual_relevance" for kernel, _ in by_case) == 4
    assert sum(kernel == "guidance_scores" for kernel, _ in by_case) == 2


def test_moves_are_read_before_they_are_written(forms):
    """Catches: a load of a turn of `kv_compact` after its barrier, a store before it; words moved one by one."""
    rows = [row for row in forms if row["kernel"] == "kv_compact"]
    assert len(rows) == 10  # words of five kinds, with the path in the order of the requests and not
    for row in rows:
        loads, stores = "ld", "st"
        if "strided" not in row["case"]:
            loads, stores = "ld.v", "st.v"
        assert row["memory"][-3:] == [loads, "bar", stores], row
        assert not any(name.startswith("st") for name in row["memory"][:-1]), row


def test_frontiers_are_read_before_they_are_written(rows):
    """Catches: a level's frontier that a thread overwrites with the next one before another has read it."""
    rows = [row for row in rows if row["kernel"] == "tree_grow"]
    assert rows
    for row in rows:
        first = row["memory"].index("st")
        assert row["memory"][first - 1] == "bar" and "ld" in row["memory"][: first - 1], row


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_spills(rows, arch):
    """Catches: more values held at a time than there are registers; each spilled one costs a round through memory."""
    rows = [row for row in rows if row["arch"] == arch]
    assert {row["kernel"] for row in rows} == {
        *("tree_attention", "merge_parts", "visual_relevance", "merge_splits", "row_stats", "guidance_scores"),
        *("accept", "tree_grow", "tree_finish", "place_trees", "path_penalties"),
        *("gather_draft_windows", "copy_committed_suffix"),
        *("begin_step", "next_level", "draw", "choose_draw", "candidates", "merge_candidates"),
    }
    assert [(row["kernel"], row["case"], row["spill_bytes"]) for row in rows if row["spill_bytes"]] == []


@pytest.mark.parametrize("arch", ARCHS)
def test_programs_fill_a_multiprocessor(rows, arch):
    """Two programs of 4 warps beside the driver's share of memory."""
    attention = [row for row in rows if row["arch"] == arch and row["kernel"] in ("tree_attention", "row_stats")]
    assert len(attention) >= 4
    assert all(row["programs_per_sm"] * row["num_warps"] >= 8 for row in attention), attention
    assert all(row["programs_per_sm"] >= 2 for row in attention), attention


def test_a_share_is_found_without_waiting(rows):
    """Catches: sums over the requests that cross warps, at a barrier each, in every program of every layer."""
    merges = [row for row in rows if row["kernel"] == "merge_parts"]
    assert merges and all(not row["shared_bytes"] and "bar" not in row["memory"] for row in merges), merges


def test_parts_are_merged_by_a_launch_that_begins_early(rows):
    """Catches: parts that are read before all are written; a program that waits for nothing, so that what comes next
    may start too early; instructions that only Hopper and later have.
    """
    merges = {row["arch"]: row for row in rows if row["kernel"] == "merge_parts"}
    attention = [row for row in rows if row["kernel"] == "tree_attention" and "prefix given" not in row["case"]]
    assert {(row["arch"], row["memory"][0]) for row in attention} == {(80, "ld"), (90, "launch_dependents")}
    assert [merges[arch]["waits"] for arch in ARCHS] == [0, 2]  # programs with rows and without
    # Lengths, which other launches have written, and then the parts.
    assert merges[90]["memory"][:4] == ["ld", "wait", "ld", "ld.v"]


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
    """150 random steps, with vectors cut out of others at any offset: nothing is left to compile while serving."""
    found = run("tests/kernels/variants.py")
    assert found["missing"] == [] and found["ambiguous"] == [] and found["stale"] == []
    assert found["used"].keys() == found["warmed"].keys() and len(found["used"]) == 25
    # Of three kinds of layers: 16 bits, float8, and float8 under queries of 16 bits.
    assert sum(found["warmed"].values()) <= 70, found["warmed"]


def test_penalties_are_compiled_to_vllms_arithmetic():
    """Token by token the same products, quotients and fused sums, on both architectures: the same bits on a GPU."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    found = run("tests/kernels/penalties_as_compiled.py")
    expected = {"fma.rn.f32": 2.0, "mul.f32": 1.0, "div.full.f32": 1.0}
    assert found == {f"{kernel} {arch}": expected for kernel in ("vllm", "ours") for arch in ARCHS}


@pytest.mark.parametrize(("capability", "keys", "stages"), [(90, 64, 5), (100, 64, 4), (80, 32, 5), (89, 16, 5)])
def test_tiles_count_scratch_and_the_drivers_share(capability, keys, stages):
    """Two programs of 64 rows of 128 bfloat16 fit, scratch and 1 KB each for the driver counted."""
    shared_kb, most_kb = {80: (164, 163), 89: (100, 99), 90: (228, 227), 100: (228, 227)}[capability]
    limits = DeviceLimits(1, shared_kb * 1024, most_kb * 1024, capability)
    room = shared_bytes_per_program(limits, 2)
    assert 2 * (room + 1024) == shared_kb * 1024
    assert _tile(64, 256, room) == keys and _held_bytes(64, 256, 16) <= room
    assert _pipeline(64, 256, keys, 2, limits)[0] == stages


@pytest.mark.parametrize(
    ("capability", "rows", "tiles"),
    [
        (80, 130, (3, 64)),  # 26 nodes of a group of 5: two of 128 would be 256 rows for 130
        (86, 182, (3, 64)),
        (120, 208, (4, 64)),
        (90, 130, (3, 64)),
        (90, 325, (3, 128)),
        (100, 125, (1, 128)),
        (90, 42, (1, 64)),
        (80, 30, (1, 32)),
    ],
)
def test_row_tiles_are_wide_where_products_outrun_the_cache(capability, rows, tiles):
    """Catches: products spent on the padding of a last tile; keys that a Hopper reads more often than it must."""
    shared_kb = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}[capability]
    limits = DeviceLimits(100, (shared_kb + 1) * 1024, shared_kb * 1024, capability)
    shape = tile_shape(rows, 128, False, True, limits)
    assert (-(-rows // shape.block_rows), shape.block_rows) == tiles
    assert shape.programs_per_sm * shape.block_rows <= 128


def test_float8_is_refused_before_ada(monkeypatch):
    """One clear line instead of the compiler's, where a GPU has no float8."""
    module = importlib.import_module("vidspec_kernels.visual_relevance.api")
    limits = DeviceLimits(108, 164 * 1024, 163 * 1024, 80)
    monkeypatch.setattr(module, "device_limits", lambda device: limits)
    index = torch.zeros(2, dtype=torch.int32)
    store = torch.zeros(1, 64, 32, dtype=torch.float8_e4m3fn)
    tables = (store, index[:1], index[:1, None], index[:1])
    with pytest.raises(ValueError, match=r"compute capability 8\.9"):
        visual_relevance(torch.zeros(1, 32), index, index[:1].long(), *tables, 4, 1, 1, impl="triton")
    visual_relevance(torch.zeros(1, 32), index, index[:1].long(), *tables, 4, 1, 1, impl="torch")
