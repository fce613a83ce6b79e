"""The GPU suite goes its whole way on the null GPU: every row of its plan is made and started there."""

import json
import subprocess
import sys

import pytest

from null_gpu.conftest import ROOT, TIMEOUT_S

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_plan
import gpu_suite as suite


@pytest.mark.slow
def test_every_row_of_the_plan_starts(tmp_path):
    """Catches: engines, hooks or kernel cases that no longer start; dry numbers that look like measurements."""
    out, log = tmp_path / "suite.json", tmp_path / "log"
    # Beside other work on two cores a step takes longer than on a GPU.
    options = [
        "--dry-run",
        "--around",
        "null_gpu.emulate:emulating",
        "--json",
        str(out),
        "--seconds",
        str(4 * TIMEOUT_S),
    ]
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "scripts/gpu_suite.py", *options],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            timeout=TIMEOUT_S + 60,
        )
    assert done.returncode == 0, log.read_text()[-6000:]
    found = json.loads(out.read_text())
    assert "mean nothing" in found["note"]
    planned = {step.name for half in suite.HALVES.values() for step in suite.PLAN[half]}
    assert {step["name"]: step["outcome"] for step in found["steps"]} == dict.fromkeys(planned, "unchecked") | {
        "environment": "passed"
    }
    engines = {row["engine"]: row for row in found["rows"] if "engine" in row}
    assert engines.keys() == gpu_plan.ENGINES.keys()
    for name, row in engines.items():
        drafts = gpu_plan.ENGINES[name].num_drafts
        assert row["outcome"] == "measured" and row["step_ms"] > 0, row
        assert (row["propose_ms"] is None) == (not drafts)
        assert row["tokens_per_s"] > 0 and row["speedup"] > 0
    kernels = {row["kernel"] for row in found["rows"] if row.get("impl") == "triton" and row["outcome"] == "measured"}
    assert kernels == set(gpu_plan.KERNELS)
