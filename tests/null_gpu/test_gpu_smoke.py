"""The smoke test on the null GPU: steps that need no numbers go their way, and what is compiled first is found."""

import json
import os
import subprocess
import sys

import pytest

from null_gpu.conftest import ROOT, TIMEOUT_S

# What a launch of these shapes prepares, by the driver that is there.
LAUNCH = """
import sys
sys.path.insert(0, "benchmarks")
import torch, compile_cases
torch.cuda.init()
for case in compile_cases.cases():
    if case.kernel == "begin_step" and "axes 3" in case.label:
        case.call()
"""
# Without two ranks, whose kernels are not emulated here: no token would come.
STEPS = ("environment", "doctor", "compile", "real-chain", "sync-debug")


@pytest.mark.slow
def test_what_runs_without_numbers_runs(tmp_path):
    """Catches: a step that no longer starts, or is skipped, or runs something else than users do: each would cost a
    minute of a real GPU and show nothing."""
    out, log = tmp_path / "smoke.json", tmp_path / "log"
    command = [sys.executable, "scripts/gpu_smoke.py", "--out", str(out), "--skip-numbers", "--only", ",".join(STEPS)]
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
    assert facts["real-chain"]["layers"] == [28, 36] and facts["real-chain"]["batch_8"]["steps"] > 0


def test_what_the_first_step_compiles_a_launch_finds(tmp_path):
    """Catches: a warm cache that no launch finds, because the compiler got other arguments than a launch."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    few = ("--kernels", "begin_step", "--cases", "axes 3")

    def compiled(*command):
        subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, check=True, timeout=TIMEOUT_S)
        return {path.parent.name for path in tmp_path.glob("*/*.cubin")}

    warm = compiled("benchmarks/compile_report.py", "--archs", "90", *few, "--warm", "0/1")
    assert warm and compiled("-c", LAUNCH) == warm
