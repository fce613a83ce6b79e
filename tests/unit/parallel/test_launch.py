"""Where the drafter runs on the CPU, and what is shown of one that is gone."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from vllm_vidspec import metrics
from vllm_vidspec.config import parse_config
from vllm_vidspec.engine.parallel import launch
from vllm_vidspec.engine.parallel.client import DrafterClient
from vllm_vidspec.parallel import Sizes


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_drafter_has_the_cores_that_the_rank_leaves():
    """Catches: a drafter that shares the one core that vLLM has bound the target to, while others are idle."""
    cores = os.sched_getaffinity(0)
    first = min(cores)
    code = f"import os; os.sched_setaffinity(0, [{first}]); print('bound', flush=True); input()"
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout.readline() == "bound\n"
        assert launch.cores_beside(rank.pid) == cores - {first}
    finally:
        rank.communicate("\n")
    assert launch.cores_beside(rank.pid) == set(), "a process that is gone"


def test_what_a_lost_drafter_held_is_gone():
    """Catches: blocks of a drafter that was killed, on /metrics until another has come up."""
    config = parse_config(
        {"method": "vidspec", "model": "self", "num_speculative_tokens": 2, "parallel": {"device": "cpu"}}
    )
    client = DrafterClient(b"", config, Sizes(2, 8, 4, len(metrics.NAMES)), 10)
    try:
        blocks, prompts = map(metrics.NAMES.index, ("draft_pool_blocks_used", "prompts"))
        client.tables.counters[[blocks, prompts]] = 100, 7
        client._lose("planted")
        assert client.tables.counters[[blocks, prompts]].tolist() == [0, 7]
    finally:
        client.close()
