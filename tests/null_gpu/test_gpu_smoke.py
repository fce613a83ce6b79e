"""The smoke test on the null GPU: steps that need no numbers go their way."""

import json
import subprocess
import sys

import pytest

from null_gpu.conftest import ROOT, TIMEOUT_S

# Without two ranks, whose kernels are not emulated here: no token would come.
STEPS = ("environment", "real-chain", "sync-debug")


@pytest.mark.slow
def test_what_runs_without_numbers_runs(tmp_path):
    """Catches: a step that no longer starts, or is skipped, which would cost a minute of a real GPU."""
    out, log = tmp_path / "smoke.json", tmp_path / "log"
    command = [sys.executable, "scripts/gpu_smoke.py", "--out", str(out), "--dry-run", "--only", ",".join(STEPS)]
    command += ["--around", "null_gpu.emulate:emulating"]
    with log.open("w") as file:
        subprocess.run(
            # Two cores do here what sixteen do beside a GPU.
            [*command, "--work-dir", str(tmp_path), "--seconds", str(2 * TIMEOUT_S)],
            cwd=ROOT, stdout=file, stderr=file, timeout=TIMEOUT_S,
        )  # fmt: skip
    found = json.loads(out.read_text())
    assert not found["failed"] + found["skipped"] + found["to_come"], log.read_text()
    facts = {step["name"]: step["facts"] for step in found["steps"]}
    assert facts["real-chain"]["layers"] == [28, 36] and facts["real-chain"]["batch_8"]["step_ms"] > 0
