"""The GPU runner goes its whole way on the null GPU, as far as that needs no numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import plan
from benchmarks.kernels import KERNELS
from null_gpu.conftest import ROOT
from null_gpu.engines import TIMEOUT_S

pytestmark = pytest.mark.slow
# Without two ranks, whose kernels are not emulated here: no token would come.
STEPS = ("environment", "real-chain", "sync-debug")


def dry_run(folder: Path, seconds: int, *options: str) -> tuple[Any, str]:
    """Run the runner under emulation; return what it writes, and its log."""
    result, log = folder / "result.json", folder / "log"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "null_gpu.emulate:emulating"]
    command += ["--out", str(result), "--seconds", str(seconds), *options]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=TIMEOUT_S + 60)
    assert result.exists(), log.read_text()[-6000:]
    return json.loads(result.read_text()), log.read_text()[-6000:]


def test_every_row_of_the_plan_starts(tmp_path):
    """Catches: engines, hooks or kernel cases that no longer start; dry numbers that look like measurements."""
    # Beside other work on two cores a step takes longer than on a GPU.
    found, log = dry_run(tmp_path, 4 * TIMEOUT_S)
    assert not found["failed"], log
    assert "mean nothing" in found["note"]
    planned = {step.name for part in plan.HALVES.values() for step in plan.PLAN[part]}
    assert {step["name"]: step["outcome"] for step in found["steps"]} == dict.fromkeys(planned, "unchecked") | {
        "environment": "passed"
    }
    engines = {row["engine"]: row for row in found["rows"] if "engine" in row}
    assert engines.keys() == plan.ENGINES.keys()
    in_turn = engines.pop("policy")
    assert in_turn["over_vanilla"] > 0 and len(in_turn["vanilla_ms"]) == len(in_turn["policy_ms"])
    for name, row in engines.items():
        drafts = plan.ENGINES[name].num_drafts
        assert row["outcome"] == "measured" and row["step_ms"] > 0 and "FULL" in row["graphs"], row
        assert (row["propose_ms"] is None) == (not drafts)
        assert row["tokens_per_s"] > 0 and row["speedup"] > 0
    kernels = {row["kernel"] for row in found["rows"] if row.get("impl") == "triton" and row["outcome"] == "measured"}
    assert kernels == set(KERNELS)


def test_the_quarter_hour_of_decode_starts(tmp_path):
    """Catches: a step of `--decode` that no longer starts, or whose rows no longer come."""
    found, log = dry_run(tmp_path, 4 * TIMEOUT_S, "--decode")
    assert not found["failed"] + found["skipped"] + found["to_come"], log
    steps = {step.name for step in plan.PLAN["decode"]}
    assert {step["name"] for step in found["steps"]} == steps
    assert {row["step"] for row in found["rows"]} == steps - {"environment"}


def test_what_runs_without_numbers_runs(tmp_path):
    """Catches: a step that no longer starts, or is skipped, which would cost a minute of a real GPU."""
    steps = ["--only", ",".join(STEPS), "--work-dir", str(tmp_path)]
    # Two cores do here what sixteen do beside a GPU.
    found, log = dry_run(tmp_path, 2 * TIMEOUT_S, "--smoke", *steps)
    assert not found["failed"] + found["skipped"] + found["to_come"], log
    facts = {step["name"]: step["facts"] for step in found["steps"]}
    assert facts["real-chain"]["layers"] == [28, 36] and facts["real-chain"]["batch_8"]["step_ms"] > 0
