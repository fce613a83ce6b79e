"""Two ranks, each with half the heads of target and draft: the same output and the same acceptance."""

import json
import os
import subprocess
import sys

FAMILY = "llava-onevision"  # its bundled vision towers have an even number of heads


def run(size: int, draft: str) -> dict:
    """Run `tests.engine.tensor_parallel` in a fresh process."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    if size > 1:
        cores = sorted(os.sched_getaffinity(0))[:size]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in cores)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tensor_parallel", FAMILY, str(size), draft],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    return json.loads(lines[-1].split("RESULT ", 1)[1])


def test_two_ranks_equal_one():
    """Catches: ranks that draft different tokens or size their pools differently; a draft sharded by the wrong rank."""
    vanilla, one, two = run(1, "vanilla"), run(1, "draft"), run(2, "draft")
    assert two["token_ids"] == one["token_ids"] == vanilla["token_ids"]
    for name in ("drafts", "draft_tokens", "accepted_tokens", "visual_tokens_kept"):
        assert two["counters"][name] == one["counters"][name] > 0
