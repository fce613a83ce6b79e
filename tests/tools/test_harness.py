"""The small benchmarks' command, and those that need no engine."""

import json
import sys

import pytest

from benchmarks import harness, policy


def test_the_command_writes_rows_and_where_they_come_from(monkeypatch, tmp_path, capsys):
    """Catches: a list that is read as one word, rows that are lost because a later one fails."""
    out = tmp_path / "out.json"
    arguments = ["bench", "--tokens", "1,2", "--json", str(out)]

    def measure(options):
        assert (options.rounds, options.pruner, options.again) == (3, ["uv"], True)
        yield from ({"size": size} for size in options.tokens)

    monkeypatch.setattr(sys, "argv", ["bench", "sizes", *arguments[1:], "--again"])
    harness.cases("doc", {"sizes": (measure, {"tokens": [8], "pruner": ["uv"], "rounds": 3, "again": False})})
    found = json.loads(out.read_text())
    assert found["rows"] == [{"size": 1}, {"size": 2}] and "git_sha" in found["provenance"]
    assert capsys.readouterr().out.splitlines() == ['{"size": 1}', '{"size": 2}']
    monkeypatch.setattr(sys, "argv", ["bench", "another"])
    with pytest.raises(SystemExit, match="Cases: sizes; each has --help"):
        harness.cases("doc", {"sizes": (measure, {})})


def test_the_policys_host_time_and_cells(capsys, monkeypatch):
    """Catches: a stand-in that has fallen behind what the scheduler gives and gets; a sum that leaves a cell out."""
    monkeypatch.setattr(sys, "argv", ["policy", "host-time", "--requests", "4", "--steps", "60"])
    plan, observe, step = harness.cases("doc", policy.CASES)
    assert 0 < plan["mean_us"] < step["mean_us"] == pytest.approx(plan["mean_us"] + observe["mean_us"], abs=0.2)
    assert step["steps"] == 54 and step["p50_us"] <= step["p90_us"]
    arguments = ["--batch", "1", "--tokens", "256", "--chance", "0.95"]
    monkeypatch.setattr(sys, "argv", ["policy", "cells", *arguments])
    *cells, total = harness.cases("doc", policy.CASES)
    assert [cell["cost"] for cell in cells] == ["memory_bound", "like_a_small_pair"]
    assert total == {"cells": 2, "mean": pytest.approx(sum(c["of_best"] for c in cells) / 2, abs=1e-4)} | {
        "lowest": min(cell["of_best"] for cell in cells), "below": 0,
    }  # fmt: skip
