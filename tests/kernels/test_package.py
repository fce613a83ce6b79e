"""vidspec_kernels as a package, and its benchmarks."""

import csv
import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

# The sizes of each kernel's cases, and what is measured beside ours, or says why it does not run here.
BENCHMARKS = {
    "accept": (["num_reqs=1,5"], []),
    "begin_step": (["num_reqs=1,5"], []),
    "next_level": (["num_reqs=1,5"], []),
    "draw": (["num_reqs=1,3", "vocab_size=300"], []),
    "candidates": (["num_reqs=1,3", "vocab_size=300"], []),
    "kv_compact": (["num_reqs=1,5"], []),
    "tree_grow": (["num_reqs=1,5"], []),
    "tree_attention": (
        ["context=40,100", "num_reqs=2", "nodes=5", "shape=4x2x32"],
        ["flash_and_nodes", "sdpa", f"flex_attention{'' if torch.cuda.is_available() else '_eager'}", "xformers"],
    ),
    "guidance_scores": (["num_keys=64,100", "num_queries=3", "shape=8x2x64"], ["materialised"]),
    "visual_relevance": (
        ["num_tokens=64,200", "batch=2x3", "hidden=64", "store=float32,float8_e4m3fn"],
        ["matmul_topk"],
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs(name, monkeypatch, tmp_path, capsys):
    """Catches: a benchmark that no longer fits its kernel, a row without unit or floor, NaN times or memory, peers that
    disagree."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    bench = importlib.import_module("bench_kernels")
    monkeypatch.setattr(bench, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(bench, "_PRODUCT_SIZE", 64)
    assert set(bench.KERNELS) == set(BENCHMARKS)
    sizes, peers = BENCHMARKS[name]
    rows = bench.main([name, "--sizes", *sizes, "--rounds", "3", "--csv", str(tmp_path / "rows.csv"), "--json"])
    impls = ["triton" if torch.cuda.is_available() else "torch" if peers else "numba", *peers]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    assert len(cases) >= 2 and [(row["case"], row["impl"]) for row in rows] == [*itertools.product(cases, impls)]
    for row in rows:
        assert row["kernel"] == name and row["unit"] == "us"
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("floor", "bytes", "bandwidth_gb_per_s"))
        if row["note"]:
            assert row["impl"] in ("flex_attention", "xformers") and row["median"] is None
            continue
        assert 0 < row["p20"] <= row["median"] <= row["p80"] < math.inf
        assert row["max_difference"] is None or row["max_difference"] < (1e-5 if name == "tree_attention" else 2e-2)
        assert (row["max_difference"] is None) == (name not in ("tree_attention", "visual_relevance"))
        assert (row["peak_bytes"] or 0) > 0 or name != "guidance_scores"
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == rows and printed["provenance"]["argv"]
    with (tmp_path / "rows.csv").open() as file:
        assert json.loads(file.readline().removeprefix("# "))["versions"]["torch"]
        assert len(list(csv.DictReader(file))) == len(rows)
