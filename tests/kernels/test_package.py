"""vidspec_kernels as a package, and its benchmarks."""

import itertools
import json
import math
from unittest import mock

import pytest
import torch

from benchmarks.kernels import KERNELS

# What is measured beside ours, or says why it does not run here.
PEERS = {
    "draw": [],
    "candidates": [],
    "guidance_scores": ["materialised"],
    "visual_relevance": ["matmul_topk"],
    "tree_attention": ["flash_and_nodes", "sdpa", f"flex_attention{'' if torch.cuda.is_available() else '_eager'}"],
}


@pytest.mark.parametrize("name", PEERS)
def test_benchmark_runs(name, monkeypatch, capsys):
    """Catches: a benchmark that no longer fits its kernel, a row without unit or floor, peers that disagree."""
    from benchmarks.kernels import __main__ as bench  # once the interpreter is asked for
    from benchmarks.kernels import timing

    monkeypatch.setattr(timing, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(timing, "_PRODUCT_SIZE", 64)
    assert set(KERNELS) == set(PEERS)
    peers, sizes = PEERS[name], ["--sizes", "num_reqs=1,3"] if name in ("draw", "tree_attention") else []
    rows = bench.main([name, *sizes, "--rounds", "3", "--json"])
    impls = ["triton" if torch.cuda.is_available() else "torch" if peers else "numba", *peers]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    assert len(cases) >= 2 and [(row["case"], row["impl"]) for row in rows] == [*itertools.product(cases, impls)]
    for row in rows:
        assert row["kernel"] == name and row["unit"] == "us"
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("floor", "bytes", "bandwidth_gb_per_s"))
        if row["note"]:
            assert row["impl"] == "flex_attention" and row["median"] is None
            continue
        assert 0 < row["p20"] <= row["median"] <= row["p80"] < math.inf
        assert row["max_difference"] is None or row["max_difference"] < (1e-5 if name == "tree_attention" else 2e-2)
        assert (row["max_difference"] is None) == (name not in ("tree_attention", "visual_relevance"))
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == rows and printed["provenance"]["argv"]


def test_one_of_ours_that_fails_is_no_peer_that_cannot_run(monkeypatch):
    """Catches: a kernel that fails, and that its benchmark leaves out with a note."""
    from benchmarks.kernels import tree_attention as attention

    broken = mock.Mock(side_effect=RuntimeError("planted\nand more"))
    monkeypatch.setattr(attention, "PEERS", {"ours": attention.ours, "sdpa": broken})
    bound, notes = attention.bind(inputs := attention.Inputs(40, 2, 5, 4, 2, 32))
    assert list(bound) == ["ours"] and notes == {"sdpa": "RuntimeError: planted"}
    monkeypatch.setattr(attention, "ours", broken)
    with pytest.raises(RuntimeError, match="planted"):
        attention.bind(inputs)
