"""Windows on a device that comes to its work later than the host enqueues it; what the drafter's own device is told."""

import contextlib
import queue
import threading
import time
from collections import deque
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.unit.engine.fakes import ALONE, CPU, Counts
from tests.unit.parallel.pair import MAX_LEN, MAX_REQS, MOST, FakeChannel, FakeRank, target
from vllm_vidspec.config import parse_config
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.parallel import backend, commits, messages, rank, shared
from vllm_vidspec.engine.parallel.lead import DrafterLead
from vllm_vidspec.engine.parallel.rank import TargetMirror
from vllm_vidspec.engine.requests import NewRequest, RequestRows
from vllm_vidspec.engine.speculator import Speculator
from vllm_vidspec.parallel import Sizes, Tables

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Client:
    """The drafter's process, within this one; it turns when it is told to."""

    num_connects, is_up = 1, True

    def __init__(self, tables, errs):
        self.tables, self.channel = tables, FakeChannel()
        self.lead = DrafterLead(FakeRank(errs).do, tables, self.channel, MAX_REQS)

    def poll(self):
        return []

    def send(self, message):
        self.channel.line.append(message)

    def turn(self, count):
        for _ in range(count):
            for message in self.channel.receive():
                self.lead._handle(message)
            self.lead.turn()


class LateTarget:
    """`ParallelSpeculator` on a target whose device does everything `late` steps after the host has enqueued it.

    Args:
        late: 0 is the CPU engine.
        errs: See `pair.draft`.
        copies: Whether the device gets copies of the streams, as one does that cannot map them.
    """

    def __init__(self, late, errs=3, copies=False):
        self.late, self.line = late, deque()
        spec = {"method": "vidspec", "model": "draft", "num_speculative_tokens": MOST, "on_draft_error": "skip"}
        self.knobs = Knobs(parse_config(spec | {"parallel": {"device": "cpu", "max_ahead": 2 * MOST + 2}})[0])
        sizes = Sizes(MAX_REQS, MAX_LEN, 2 * MOST + 2, 256)
        tables = Tables(bytearray(Tables.num_bytes(sizes)), sizes)
        tables.forget_streams()
        self.client, self.counters = Client(tables, errs), Counts()
        self.requests = RequestRows(MAX_REQS, CPU)
        self.text = torch.zeros(MAX_REQS, MAX_LEN, dtype=torch.int32)
        self.total_len = torch.zeros(MAX_REQS, dtype=torch.int32)
        states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=self.total_len),
            all_token_ids=SimpleNamespace(gpu=self.text),
            prompt_len=SimpleNamespace(np=np.full(MAX_REQS, len(PROMPT))),
            max_seq_len=np.full(MAX_REQS, MAX_LEN),
            max_model_len=MAX_LEN,
        )
        sampler = SimpleNamespace(sampling_states=SimpleNamespace(seeds=SimpleNamespace(np=np.zeros(MAX_REQS))))
        with mock.patch.object(backend, "get_tp_group", lambda: SimpleNamespace(world_size=1)):
            self.backend = backend.ParallelBackend(
                self.knobs, self.client, self.requests, states, sampler, False, self.counters, CPU
            )
        failures = DraftFailures(self.knobs, ALONE, self.requests, self.counters)
        self.speculator = Speculator(self.knobs, self.requests, None, self.counters, failures, self.backend)
        if copies:
            streams = self.backend._streams
            streams.is_direct, streams._streams, for_step = False, streams._streams.clone(), streams.for_step
            # The copy is in the device's line, before the step's other work: what is in it is of this moment.
            streams.for_step = lambda *rows: for_step(*rows).clone()
        self.requests.register(self.backend, drafting=[self.backend])
        self.rows, self.windows, self.took = [], {}, []

    def add(self, row):
        """Begin a request."""
        self.rows.append(row)
        self.text[row, : len(PROMPT)] = torch.tensor(PROMPT)
        self.total_len[row] = len(PROMPT)
        sampling = SimpleNamespace(clone=lambda: SimpleNamespace(seed=None), structured_outputs=None)
        self.requests.add(NewRequest(f"r{row}", row, PROMPT, [], sampling))

    @contextlib.contextmanager
    def device(self):
        """Let what the host enqueues wait in line. How long windows may be is the host's, and follows clocks: K."""
        send = commits.Commits._send

        def later(function):
            return lambda *args, **more: self.put(lambda: function(*args, **more))

        def send_later(here, packed, write):
            self.put(lambda: send(here, packed.clone(), write))

        with (
            mock.patch.object(backend, "gather_draft_windows", later(backend.gather_draft_windows)),
            mock.patch.object(commits, "copy_committed_suffix", later(commits.copy_committed_suffix)),
            mock.patch.object(commits.Commits, "_send", send_later),
            mock.patch.object(commits.Commits, "wanted", lambda here, rows, window: np.full(len(rows), MOST)),
            mock.patch.object(shared, "async_tensor_h2d", lambda data, device: torch.from_numpy(data.copy())),
        ):
            yield

    def put(self, work):
        """Put work in the device's line; without delay, do it."""
        if self.late:
            self.line[-1].append(work)
        else:
            work()

    def enqueue(self):
        """Do the host's part of a step."""
        rows_np, count = np.array(self.rows, dtype=np.int64), len(self.rows)
        batch = SimpleNamespace(
            num_reqs=count, req_ids=list(map(str, self.rows)),
            idx_mapping=torch.from_numpy(rows_np), idx_mapping_np=rows_np,
            num_computed_tokens_np=np.full(count, 9), num_scheduled_tokens=np.ones(count, dtype=int),
            num_draft_tokens_per_req=None, prefill_len_np=np.ones(count, dtype=int),
            seq_lens_cpu_upper_bound=torch.ones(count, dtype=torch.int32),
        )  # fmt: skip
        self.line.append([])
        self.put(self._verify)
        propose = Speculator.propose.__wrapped__
        drafts = propose(self.speculator, batch, *[None] * 11)
        told = self.backend._outputs(count)[1]
        self.put(lambda: self._take(drafts, told))

    def _verify(self):
        """Verify what was taken, and commit it to the device's text."""
        for row in self.rows:
            text = self.text[row, : self.total_len[row]].tolist()
            for token in self.windows.get(row, []):
                if token != target(text):
                    break
                text.append(token)
            text.append(target(text))
            self.text[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
            self.total_len[row] = len(text)

    def _take(self, drafts, told):
        for i, row in enumerate(self.rows):
            self.windows[row] = drafts[i, : told[i, 0]].tolist()
            self.took.append((row, int(self.total_len[row]), self.windows[row]))

    def run(self, turns):
        """Let the device make steps, in each of which the drafter makes so many turns; the host is `late` ahead."""
        with self.device():
            for row in range(2):
                self.add(row)
            for i, count in enumerate(turns):
                while self.late and len(self.line) < self.late and i + len(self.line) < len(turns):
                    self.enqueue()
                self.client.turn(count)
                if not self.late:
                    self.enqueue()
                for work in self.line.popleft():
                    work()
        return self.took


TURNS = (4, 1, 6, 0, 0, 9, 2, 7, 1, 5, 3, 8, 2)


@pytest.mark.parametrize("late", [1, 2], ids=["synchronous", "asynchronous"])
def test_a_device_that_is_late_takes_the_windows_of_the_cpu_engine(late):
    """What stands in a stream when the device comes to it, not when the host has enqueued the step.

    Catches: windows of streams that are a step old, or two; a stream that begins between the two times and is left out.
    """
    on_cpu, on_device = LateTarget(0), LateTarget(late)
    assert on_device.run(TURNS) == on_cpu.run(TURNS)
    assert torch.equal(on_device.text, on_cpu.text)
    assert sum(len(window) for *_, window in on_cpu.took) > 30


@pytest.mark.parametrize("late", [1, 2], ids=["synchronous", "asynchronous"])
def test_copies_of_the_host_are_seen(late):
    """The instrument: copies that the host makes as it enqueues are older. They are counted, and change no text."""
    on_cpu, on_device = LateTarget(0), LateTarget(late, copies=True)
    assert on_device.run(TURNS) != on_cpu.run(TURNS)
    count = int(min(on_device.total_len[0], on_cpu.total_len[0]))
    assert torch.equal(on_device.text[0, :count], on_cpu.text[0, :count])
    assert on_device.total_len.sum() < on_cpu.total_len.sum()
    assert on_device.counters["window_snapshots"] == len(TURNS)


def test_a_commit_that_fails_is_told():
    """Its texts have a hole: requests that run go on without drafts, are counted with a line, and later ones get some.

    Catches: a thread that ends with its first exception, while everything else goes on and no draft ever stands again.
    """
    late = LateTarget(0)
    late.run((4, 4))
    late.backend._commits._failure = "ValueError: planted"
    with late.device():
        late.enqueue()
        late.enqueue()
    assert late.counters["skipped_draft_error"] == 2 and "planted" in late.counters["why"][0]
    assert late.requests.skip_reason[:2] == ["draft_error"] * 2
    late.rows = []
    with late.device():
        late.add(2)
        for _ in range(4):
            late.client.turn(4)
            late.enqueue()
    assert any(window for row, _, window in late.took if row == 2)


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
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    late = LateTarget(0)
    here = late.backend._commits
    here._on_gpu, here._free, here._buffer_size = True, deque(), 64
    here._line = queue.SimpleQueue()
    done, fails = [], [True]

    def write(host):
        if fails:
            fails.pop()
            raise ValueError("planted")
        done.append(host.tolist())

    threading.Thread(target=here._write_down, daemon=True).start()
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

    Catches: a write per arrival into vLLM's two buffers, of which the third tears the first; two writes of one row.
    """
    mirror = TargetMirror.__new__(TargetMirror)
    log = []
    mirror._staged, mirror._told, mirror.text = set(), None, torch.zeros(4, 8, dtype=torch.int32)
    mirror.states = SimpleNamespace(
        add_request=lambda *args: log.append(args[0]),
        remove_request=lambda name: None,
        index_to_req_id={},
        apply_staged_writes=lambda: log.append("apply"),
    )
    mirror.sampler = SimpleNamespace(add_request=lambda *args: None, apply_staged_writes=lambda: None)

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
