"""The benchmark beside others goes its whole way on the null GPU: what fails there would cost minutes of a real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1200
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}


def test_one_command_fills_both_tables(tmp_path):
    """Catches: a peer that no longer fits its library, an engine that does not start beside ours; numbers of a dry run
    that look like measurements."""
    out = tmp_path / "peers.json"
    arguments = ["--dry-run", "--out", str(out), "--around", "null_gpu.emulate:emulating"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/peers/run.py"), *arguments, "--engine-args", json.dumps(GRAPHS)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert "these numbers mean nothing" in found["note"] and found["note"] in out.with_suffix(".md").read_text()
    notes = {row["impl"]: row["note"] for row in found["attention"]}
    assert notes.keys() == {"triton", "flash_and_nodes", "sdpa", "flex_attention", "xformers"}
    assert all(row["median"] is not None for row in found["attention"] if not row["note"])
    assert not any(notes[impl] for impl in ("triton", "flash_and_nodes", "sdpa")), notes
    assert not any(row["note"] for row in found["drafting"]), found["drafting"]
    assert [row["method"] for row in found["drafting"]] == ["vanilla", "vidspec", "draft_model", "eagle"]
    assert all((row["propose_ms"] is None) == (row["method"] == "vanilla") for row in found["drafting"])
