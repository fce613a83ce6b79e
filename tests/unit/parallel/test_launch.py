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
from vllm_vidspec.engine.parallel.start import available_bytes
from vllm_vidspec.errors import VidSpecError
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


def config_of(device, **more):
    spec = {"method": "vidspec", "model": "draft", "num_speculative_tokens": 2, **more}
    return parse_config(spec | {"parallel": {"device": device}})[0]


def test_devices_are_those_that_the_server_sees():
    """Catches: `cuda:2` of a server that sees two, which is an empty list, and so the target's first device."""
    assert launch.devices_of(config_of("cuda:1"), "6,7") == ["7"]
    assert launch.devices_of(config_of("cuda:1"), None) == ["1"]
    assert launch.devices_of(config_of("cpu"), "6,7") == []
    with pytest.raises(VidSpecError, match=r"would need cuda:2, and the server sees 2 devices"):
        launch.devices_of(config_of("cuda:2"), "6,7")


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "knobs", "expected"),
    [
        (60, {}, 52),  # a device of its own: what the target's utilization leaves free stays free
        (7, {}, "has 7516192768 of 85899345920 bytes left; no room for its KV cache"),
        (7, {"draft_kv_bytes": 5 * GIB, "draft_encoder_bytes": GIB}, 6.25),  # one that the target has filled
        (6, {"draft_kv_bytes": 5 * GIB, "draft_encoder_bytes": GIB}, "draft_kv_bytes 5368709120, .* take 6710886400"),
    ],
)
def test_what_a_drafter_may_take(free, knobs, expected):
    """Catches: the target's utilization taken off what the target has left, which is less than nothing."""
    take = (free * GIB, 80 * GIB, 0.9, config_of("cuda:1", **knobs))
    if isinstance(expected, str):
        with pytest.raises(VidSpecError, match=expected):
            available_bytes(*take)
    else:
        assert available_bytes(*take) == pytest.approx(expected * GIB, abs=2)
