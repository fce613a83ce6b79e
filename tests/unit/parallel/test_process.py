"""What the target's process writes down for the drafter, and what that costs where it fails; where the drafter runs."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, Counts, make_knobs, new_request
from tests.unit.parallel.pair import MAX_REQS, MOST, SIZES
from vidspec_kernels import NO_STREAM, STALE
from vllm_vidspec import metrics
from vllm_vidspec.config import parse_config
from vllm_vidspec.engine.admin import KEY
from vllm_vidspec.engine.parallel import launch, messages, rank, remote_backend
from vllm_vidspec.engine.parallel.commits import Commits
from vllm_vidspec.engine.parallel.rank import TargetMirror
from vllm_vidspec.engine.parallel.start import available_bytes
from vllm_vidspec.engine.parallel.supervisor import DrafterSupervisor
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.streams import Sizes, Streams, StreamState, Tables, WindowRule


def make_tables() -> Tables:
    tables = Tables(bytearray(Tables.num_bytes(SIZES)), SIZES)
    tables.forget_streams()
    return tables


@pytest.fixture
def parallel():
    """The target's end, its counters and its rows; its drafter takes messages, and answers none."""
    supervisor = mock.Mock(tables=make_tables(), num_connects=1, is_up=True, **{"poll.return_value": []})
    states = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.full(MAX_REQS, 8)), max_seq_len=np.full(MAX_REQS, 96), max_model_len=96
    )
    sampler = SimpleNamespace(sampling_states=SimpleNamespace(seeds=SimpleNamespace(np=np.zeros(MAX_REQS))))
    knobs = make_knobs(parallel={"device": "cpu"}, num_speculative_tokens=MOST, on_draft_error="skip")
    counters, requests = Counts(), RequestRows(MAX_REQS, CPU)
    runner = SimpleNamespace(
        knobs=knobs, drafter_supervisor=supervisor, requests=requests, req_states=states, sampler=sampler,
        counters=counters, device=CPU,
    )  # fmt: skip
    with mock.patch.object(remote_backend, "get_tp_group", lambda: SimpleNamespace(world_size=1)):
        here = remote_backend.ParallelBackend(runner, is_guided=False)
    requests.register(here, drafting=[here])
    return here, counters, requests


SAMPLING = SimpleNamespace(clone=lambda: SimpleNamespace(seed=None), structured_outputs=None)


def test_a_commit_that_fails_is_told(parallel):
    """Requests that run go on without drafts, counted with a line, and later ones get some: the thread does not end."""
    here, counters, requests = parallel
    for row in range(2):
        requests.add(new_request(row, "", sampling=SAMPLING))
    here._commits._failure = "ValueError: planted"
    here._receive(here._supervisor, here._commits)
    requests.add(new_request(2, "", sampling=SAMPLING))
    here._receive(here._supervisor, here._commits)
    assert counters["skipped_draft_error"] == 2 and "planted" in counters["why"][0]
    assert [sent.refusal for _, sent in sorted(here._sent.items())] == ["draft_error", "draft_error", None]


def test_pixels_on_their_way_to_the_drafter_are_bounded(parallel, monkeypatch):
    """Catches: videos that a slow drafter has not read pile up; one that is read, or gone, still counted; one video
    that is larger than the bound never drafted for; a restart that sends more than the bound, or nothing.
    """
    here, counters, requests = parallel
    monkeypatch.setattr(remote_backend, "MOST_BYTES", 1000)
    tables = here._supervisor.tables

    def sent(kind):
        told = (call.args[0] for call in here._supervisor.send.call_args_list)
        return [message.req_state_idx for message in told if isinstance(message, kind)]

    def arrive(row, num_bytes):
        request = new_request(row, f"video {row}", sampling=SAMPLING)
        request.features[0].data = {"pixels": SimpleNamespace(data=[np.zeros(num_bytes, dtype=np.uint8)])}
        requests.add(request)

    arrive(0, 600)
    arrive(1, 600)  # too much
    requests.add(new_request(2, "", sampling=SAMPLING))  # a text has none
    assert sent(messages.Add) == sent(messages.Prefill) == [0, 2] and counters["skipped_pixels"] == 1
    here._receive(here._supervisor, here._commits)
    assert here._progress[:3].tolist() == [remote_backend._BEGUN, remote_backend._REFUSED, remote_backend._BEGUN]
    requests.remove(1)
    Streams(tables).add(0, here._sent[0].epoch, 96)
    arrive(1, 600)  # the first has come, and is not read
    assert counters["skipped_pixels"] == 2
    tables.state[0] = StreamState.STREAMING
    requests.remove(1)
    arrive(1, 5000)  # it is read: nobody waits, and this one may
    requests.remove(2)
    arrive(2, 1)
    assert counters["skipped_pixels"] == 3
    requests.remove(1)
    requests.remove(2)
    arrive(2, 600)
    assert sent(messages.Add) == [0, 2, 1, 2] and counters["skipped_pixels"] == 3
    here._supervisor.num_connects = 2
    tables.forget_streams()
    nobody = SimpleNamespace(num_reqs=0, idx_mapping_np=np.zeros(0, dtype=int))
    here._commit(SimpleNamespace(is_done=np.zeros(0, dtype=bool), batch=nobody))
    assert sent(messages.Add)[4:] == [0] and counters["skipped_pixels"] == 4


def test_what_comes_while_counters_are_published_is_not_lost():
    """A step is noted between two counters. Catches: a count that is zeroed with what has come since it was read."""

    class Interrupted(Counts):
        def add(self, name, value=1):
            super().add(name, value)
            if len(noted) < 5:
                note()

    def note():
        what = np.array([STALE, NO_STREAM, 0])
        noted.append(here._note(np.arange(3), np.ones(3, dtype=bool), np.zeros(3), what))

    noted, counters = [], Interrupted()
    here = Commits(make_tables(), WindowRule(MOST), counters, CPU, MOST)
    note()
    for _ in range(9):
        here.publish_counters()
    assert (
        counters == dict.fromkeys(("stale_streams", "streams_to_come", "late_drafts"), len(noted)) and len(noted) == 5
    )


SECRETS = (KEY, "VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "A_SECRET")


def test_a_drafter_knows_no_secret_of_the_server(monkeypatch):
    """But what streams weights from an object store. Catches: a key in the environment of a process without a door."""
    needed = ("PATH", "HF_HOME", "AWS_SECRET_ACCESS_KEY", "TOKENIZERS_PARALLELISM", "VLLM_PLUGINS")
    for name in (*SECRETS, *needed):
        monkeypatch.setenv(name, "value")
    environment = launch.environment_for(config_of("cpu"), ())
    assert not environment.keys() & set(SECRETS) and environment.keys() >= set(needed)


def test_the_thread_of_commits_outlives_an_exception(monkeypatch):
    """Catches: a loop that ends, a buffer that is lost with it, an event that polls the driver."""
    event = mock.Mock()  # each is there at once
    monkeypatch.setattr(torch.cuda, "Event", event)
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **more: zeros(*args, **more))
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    here = Commits(make_tables(), WindowRule(MOST), Counts(), torch.device("cuda"), MOST)
    done, fails, num_made = [], [True], event.call_count

    def write(host):
        if fails:
            fails.pop()
            raise ValueError("planted")
        done.append(host.tolist())

    for number in range(9):
        here._send(torch.full((2, 3), number, dtype=torch.int32), write)
        deadline = time.monotonic() + 10
        while len(done) + (not fails) <= number and time.monotonic() < deadline:
            time.sleep(0.001)
    assert done == [[[number] * 3] * 2 for number in range(1, 9)]
    assert here.take_failure() == "ValueError: planted" and here.take_failure() is None
    assert event.call_args_list == [mock.call(blocking=True)] * num_made, "no buffer is made in a step"


def test_arrivals_are_told_at_once():
    """Three at a time, one in a row that another has left: what they stage is written in one go."""
    mirror, log = TargetMirror.__new__(TargetMirror), []
    mirror._staged, mirror._applied, mirror.text = set(), None, torch.zeros(4, 8, dtype=torch.int32)
    mirror.states, mirror.sampler = mock.Mock(index_to_req_id={}), mock.Mock()
    mirror.states.add_request = lambda *args: log.append(args[0])
    mirror.states.apply_staged_writes = lambda: log.append("apply")

    def arrive(name, row):
        mirror.add(messages.Add(name, row, 1, np.arange(3, dtype=np.int32), 3, 8, [], None))

    with mock.patch.object(rank, "async_tensor_h2d", lambda data, device: torch.from_numpy(data)):
        for row in range(3):
            arrive(f"r{row}", row)
        mirror.apply()
        mirror.apply()
        arrive("r3", 1)
        mirror.remove(1)
        arrive("r4", 1)
        mirror.apply()
    assert log == ["r0", "r1", "r2", "apply", "r3", "apply", "r4", "apply"]


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
    supervisor = DrafterSupervisor(b"", config_of("cpu"), Sizes(2, 8, len(metrics.NAMES), 4), 10)
    try:
        blocks, prompts = map(metrics.NAMES.index, ("draft_pool_blocks_used", "prompts"))
        supervisor.tables.counters[[blocks, prompts]] = 100, 7
        supervisor._lose("planted")
        assert supervisor.tables.counters[[blocks, prompts]].tolist() == [0, 7]
    finally:
        supervisor.close()


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
        (7, {"draft_kv_bytes": 5 * GIB, "state_bytes": GIB}, 6.25),  # one that the target has filled
        (6, {"draft_kv_bytes": 5 * GIB, "state_bytes": GIB}, "draft_kv_bytes 5368709120, .* take 6710886400"),
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
