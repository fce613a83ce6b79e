"""A short soak, every output compared; and a server whose engine is killed: a script runs the other cases."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_vidspec.tools import pairs

pytest.importorskip("httpx")
pytest.importorskip("vllm")

from tests.serve import restarts

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_half_a_minute_of_mixed_traffic(tmp_path):
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.5", "--configs", "chain"]
    command += ["--json", str(tmp_path / "soak.json"), "--log-dir", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=pairs.engine_env(), timeout=400)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["requests"] >= 48 and result["compared"] > result["requests"] / 2
    (config,) = result["configs"]
    assert config["rss_slope_mb_per_min"] is None  # too short a time to judge
    assert config["counters"]["accepted_tokens"] > 0 and config["processes_left"] == 0
    assert result["provenance"]["argv"][0] == "soak.py"


def test_an_engine_that_is_killed():
    """Catches: a client that waits forever, a server that goes on without its engine, files that nobody sweeps."""
    with tempfile.TemporaryDirectory(prefix="vs") as folder:  # short: sockets lie in it
        seen = restarts.CASES[0].run(Path(folder))
    assert "none after the next start" in seen
