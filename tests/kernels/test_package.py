"""vidspec_kernels as a package, and its benchmarks' command lines."""

import csv
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_imports_neither_vllm_nor_the_plugins_engine():
    """Catches: a kernel, a pruner or a family that pulls in vLLM or transformers (pure rooms must load without)."""
    code = (
        "import sys, vidspec_kernels, vllm_vidspec.pruning, vllm_vidspec.families;"
        "print([name for name in ('vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name", ["chain_step", "accept_chain", "tree_accept", "accept_loose", "kv_compact", "tree_step"]
)
def test_benchmark_runs(name, monkeypatch, tmp_path, capsys):
    """Catches: a benchmark that no longer fits its kernel, a row without unit or floor, NaN times."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kernel_bench = importlib.import_module("kernel_bench")
    monkeypatch.setattr(kernel_bench, "_COPY_BYTES", 2**20)
    bench = importlib.import_module(f"bench_{name}")
    rows = bench.main(["--sizes", "1,5", "--repeats", "3", "--csv", str(tmp_path / "rows.csv"), "--json"])
    impls = ["triton", "torch"] if torch.cuda.is_available() else ["torch"]
    assert [(row["num_reqs"], row["impl"]) for row in rows] == [(size, impl) for size in (1, 5) for impl in impls]
    for row in rows:
        assert row["kernel"] == name and row["unit"] == "us"
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("median", "p20", "p80", "floor", "bytes"))
        assert row["p20"] <= row["median"] <= row["p80"]
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    with (tmp_path / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
