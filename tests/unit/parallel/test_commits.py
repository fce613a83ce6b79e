"""What the target's process writes down for the drafter, and what that costs where it fails.

That a device reads streams when it comes to them: `tests/null_gpu`, where a copy of them would be a transfer more.
"""

import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.unit.engine.fakes import CPU, Counts, make_knobs, new_request
from tests.unit.parallel.pair import MAX_REQS, MOST, SIZES
from vllm_vidspec.engine.parallel import backend, messages, rank
from vllm_vidspec.engine.parallel.commits import Commits
from vllm_vidspec.engine.parallel.rank import TargetMirror
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.parallel import Tables, WindowRule


def make_tables() -> Tables:
    tables = Tables(bytearray(Tables.num_bytes(SIZES)), SIZES)
    tables.forget_streams()
    return tables


def test_a_commit_that_fails_is_told():
    """Its texts have a hole: requests that run go on without drafts, are counted with a line, and later ones get some.
    Catches: a thread that ends with its first exception, while everything else goes on and no draft ever stands
    again."""
    client = mock.Mock(tables=make_tables(), num_connects=1, is_up=True, **{"poll.return_value": []})
    states = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.full(MAX_REQS, 8)),
        max_seq_len=np.full(MAX_REQS, 96),
        max_model_len=96,
    )
    sampler = SimpleNamespace(sampling_states=SimpleNamespace(seeds=SimpleNamespace(np=np.zeros(MAX_REQS))))
    knobs = make_knobs(parallel={"device": "cpu"}, num_speculative_tokens=MOST, on_draft_error="skip")
    with mock.patch.object(backend, "get_tp_group", lambda: SimpleNamespace(world_size=1)):
        counters, requests = Counts(), RequestRows(MAX_REQS, CPU)
        here = backend.ParallelBackend(knobs, client, requests, states, sampler, False, counters, CPU)
    sampling = SimpleNamespace(clone=lambda: SimpleNamespace(seed=None), structured_outputs=None)
    requests.register(here, drafting=[here])
    for row in range(2):
        requests.add(new_request(row, "", sampling=sampling))
    here._commits._failure = "ValueError: planted"
    here._receive(client, here._commits)
    requests.add(new_request(2, "", sampling=sampling))
    here._receive(client, here._commits)
    assert counters["skipped_draft_error"] == 2 and "planted" in counters["why"][0]
    assert [sent.refusal for _, sent in sorted(here._sent.items())] == ["draft_error", "draft_error", None]


def test_the_thread_of_commits_outlives_an_exception(monkeypatch):
    """Catches: a loop that ends, a buffer that is lost with it, an event that polls the driver."""
    made = []

    class Event:
        def __init__(self, blocking=False):
            assert blocking
            made.append(self)

        def record(self):
            """It is there at once."""

        synchronize = record

    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **more: zeros(*args, **more))
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    here = Commits(make_tables(), WindowRule(MOST), Counts(), torch.device("cuda"), MOST)
    done, fails = [], [True]

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
    assert len(made) <= 2


def test_arrivals_are_told_at_once():
    """Three that come at a time, one of them in a row that another has left: what they stage is written in one go.
    Catches: a write per arrival into vLLM's two buffers, of which the third tears the first; two writes of one row."""
    mirror, log = TargetMirror.__new__(TargetMirror), []
    mirror._staged, mirror._told, mirror.text = set(), None, torch.zeros(4, 8, dtype=torch.int32)
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
