"""The drafter in a process of its own, in engines that one test has: preemption, a server that is killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine import harness
from tests.engine.harness import QWEN, assert_all_stands, token_ids
from tests.engine.test_parallel import PARALLEL, let_drafts_come

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_preemption(reference):
    """A KV cache that holds too few requests: who is put back loses its stream and gets another."""
    requests, expected = harness.videos(QWEN, 5, max_tokens=130, ignore_eos=True), reference(QWEN, "endless")
    overrides = {"num_gpu_blocks_override": 11, "max_model_len": 512, **harness.NO_CACHE}
    with harness.engine(QWEN, "target", overrides=overrides, pruner="none", parallel=PARALLEL) as engine:
        with engine.preemptions() as preempted, let_drafts_come(engine):
            outputs, counted = engine.measured(requests)
        assert preempted
    assert token_ids(outputs) == [[ids[0][:130]] for ids in token_ids(expected)]
    assert_all_stands(counted)


def test_a_killed_server_leaves_nothing():
    """SIGKILL of the engine's process in the middle of its work: the drafter goes with it, and so does all memory.

    Catches: a drafter that outlives its server, a named segment that nobody unlinks.
    """
    in_shm = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engine.parallel_server"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        (pid,) = json.loads(next(line for line in server.stdout if line.startswith("RESULT ")).removeprefix("RESULT "))
        assert Path(f"/proc/{pid}").exists()
        time.sleep(1.0)
        server.kill()
        server.wait()
        deadline = time.monotonic() + 10
        while _is_alive(pid):
            assert time.monotonic() < deadline, "the drafter outlives its server"
            time.sleep(0.05)
    assert set(os.listdir("/dev/shm")) <= in_shm


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
