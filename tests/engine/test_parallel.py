"""The drafter in a process of its own: the output stays vanilla's, whatever becomes of that process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import LLAVA, Engine, assert_all_stands, assert_same_answers, token_ids
from vllm_vidspec import metrics
from vllm_vidspec.engine.parallel import supervisor
from vllm_vidspec.streams import StreamState
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

PARALLEL = {"device": "cpu"}


def drafter(engine: Engine) -> supervisor.DrafterSupervisor:
    return engine.runner.drafter_supervisor


def wait_until(is_so: Callable[[], bool], engine: Engine) -> None:
    """Let the engine's loop look after the drafter until something holds."""
    deadline = time.monotonic() + 90.0
    while not is_so():
        assert time.monotonic() < deadline, "it never came to pass"
        engine.idle()
        time.sleep(0.05)


def let_drafts_come(engine: Engine) -> contextlib.AbstractContextManager:
    """Before each of the target's steps wait for full streams; after it the drafter must know what was sampled."""
    speculator = engine.speculator
    propose = speculator.propose

    def slow(batch, *args, **kwargs):
        deadline = time.monotonic() + 60.0
        while behind := _behind(engine):
            assert time.monotonic() < deadline, f"the drafter has nothing for {behind}"
            time.sleep(0.001)
        drafts = propose(batch, *args, **kwargs)
        assert not (late := _uncommitted(engine, batch.idx_mapping_np)), f"the drafter is not told of {late}"
        return drafts

    return mock.patch.object(speculator, "propose", slow)


def _uncommitted(engine: Engine, rows: np.ndarray) -> list[int]:
    """Return the rows of a step that has just ended of which the drafter's tables lack what it has sampled."""
    client, states = drafter(engine), engine.runner.req_states
    if not client.is_up or client.num_connects > engine.speculator.backend._num_connects:
        return []
    lengths, tables = states.total_len.gpu.numpy()[rows], client.tables
    has_begun = (lengths > states.prompt_len.np[rows]) & (tables.epoch[rows] >= 0)
    return rows[has_begun & (tables.committed[rows] != lengths)].tolist()


def _behind(engine: Engine) -> dict[str, str]:
    """Return the requests that a drafter which is up was told to begin and could draw on for, and what it has."""
    backend, client = engine.speculator.backend, drafter(engine)
    if not client.is_up or client.num_connects > backend._num_connects:
        return {}
    tables, states = client.tables, engine.runner.req_states
    behind = {}
    for row, known in backend._sent.items():
        if not known.has_begun or tables.state[row] == StreamState.REFUSED:
            continue
        end, committed = int(tables.end[row]), int(tables.committed[row])
        most = min(committed + tables.sizes.max_ahead, int(min(states.max_seq_len[row], states.max_model_len)))
        if tables.state[row] != StreamState.STREAMING or tables.checked[row] < committed or end < most:
            state = StreamState(int(tables.state[row])).name
            behind[known.new.req_id] = f"{state}, {end} of {most} tokens, {committed} committed"
    return behind


@pytest.fixture(scope="module")
def own(reference) -> Iterator[Engine]:
    """The target's own checkpoint as the draft, unpruned: it is always right. One for all tests."""
    for scenario in ("videos", "endless"):
        reference(LLAVA, scenario)  # before: two engines of one process are one too many
    spec = {"pruner": "none", "parallel": PARALLEL, "on_draft_error": "skip"}
    with harness.engine(LLAVA, pairs.checkpoint(LLAVA, "target"), harness.NO_CACHE, **spec) as engine:
        yield engine


def test_streams_outgrow_windows(reference, own):
    """A stream that is never cut: more of it is accepted than two windows hold, and most steps have one."""
    requests = harness.videos(LLAVA, 2, max_tokens=100, ignore_eos=True)
    with let_drafts_come(own):
        outputs, counted = own.measured(requests)
    assert token_ids(outputs) == [[ids[0][:100]] for ids in token_ids(reference(LLAVA, "endless"))[:2]]
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 2 * 2 * own.config.num_speculative_tokens
    assert counted["accepted_tokens"] > 2 * counted["drafts"]


def test_rows_change_hands(reference, own):
    """Requests are aborted in the middle; who gets their rows has streams of its own."""
    expected = reference(LLAVA, "videos")
    for steps in (1, 6):
        own.begin(harness.videos(LLAVA, 5, ignore_eos=True), steps=steps)
        own.abort()
        with let_drafts_come(own):
            outputs, counted = own.measured(SCENARIOS["videos"](LLAVA))
        assert_same_answers(expected, outputs)
        assert_all_stands(counted)
    own.idle()
    assert (drafter(own).tables.epoch > 0).sum() <= 1  # vLLM tells of the end of a request with its next step


@pytest.mark.draft_errors
def test_a_killed_drafter_costs_drafts_and_nothing_else(reference, own):
    """SIGKILL in the middle of requests, others of which come after: answers are vanilla's, and drafts come back."""
    with mock.patch.object(supervisor, "_BACKOFF_S", (0.2,)):
        wait_until(lambda: drafter(own).is_up, own)
        requests = SCENARIOS["videos"](LLAVA)
        own.begin(harness.videos(LLAVA, 4, max_tokens=40, ignore_eos=True), steps=4)
        (pid,) = drafter(own).pids
        restarts = drafter(own).num_restarts
        os.kill(pid, signal.SIGKILL)
        outputs, _ = own.measured(requests)
        assert_same_answers(reference(LLAVA, "videos"), outputs[-len(requests) :])
        # The kernel tells of a death when it likes: a short answer may be over by then.
        wait_until(lambda: drafter(own).num_restarts > restarts and drafter(own).is_up, own)
        assert drafter(own).num_restarts == restarts + 1
        with let_drafts_come(own):
            outputs, counted = own.measured(requests)
    assert_same_answers(reference(LLAVA, "videos"), outputs)
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0


@pytest.mark.draft_errors
@pytest.mark.slow
def test_running_requests_get_their_drafts_back(reference, own):
    """The drafter is killed and comes back while requests run: they are drafted for again, where they are by then."""
    with mock.patch.object(supervisor, "_BACKOFF_S", (0.0,)):
        wait_until(lambda: drafter(own).is_up, own)
        requests = harness.videos(LLAVA, 2, max_tokens=200, ignore_eos=True)
        own.begin(requests, steps=4)
        os.kill(drafter(own).pids[0], signal.SIGKILL)
        ups = drafter(own).num_connects
        while drafter(own).num_connects == ups:
            drafter(own).poll()
            time.sleep(0.02)
        before = own.counters()
        with let_drafts_come(own):
            answers = own.finish()
    counted = metrics.difference(before, own.counters())
    assert answers == [ids[0] for ids in token_ids(reference(LLAVA, "endless"))[:2]]
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0


@pytest.mark.draft_errors
@pytest.mark.slow
def test_a_stopped_drafter_delays_nobody(reference, own):
    """SIGSTOP: streams run dry and answers go on; SIGCONT: it catches up. One that hangs for long is started again."""
    wait_until(lambda: drafter(own).is_up, own)
    (pid,) = drafter(own).pids
    os.kill(pid, signal.SIGSTOP)
    try:
        outputs, counted = own.measured(SCENARIOS["videos"](LLAVA))
        assert_same_answers(reference(LLAVA, "videos"), outputs)
        assert counted["draft_tokens"] == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    with let_drafts_come(own):
        outputs, counted = own.measured(SCENARIOS["videos"](LLAVA))
    assert_same_answers(reference(LLAVA, "videos"), outputs)
    assert_all_stands(counted)
    with mock.patch.object(supervisor, "STALL_S", 0.3), mock.patch.object(supervisor, "_BACKOFF_S", (0.1,)):
        restarts = drafter(own).num_restarts
        os.kill(drafter(own).pids[0], signal.SIGSTOP)
        own.begin(harness.videos(LLAVA, 1, max_tokens=60, ignore_eos=True))
        while own.core.has_unfinished_requests():
            own.core.step()
            time.sleep(0.02)
        wait_until(lambda: drafter(own).is_up and drafter(own).num_restarts > restarts, own)


def test_nothing_is_left_behind(own):
    """Memory and sockets have no names: what the processes hold is gone with them."""
    wait_until(lambda: drafter(own).is_up, own)
    names = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in drafter(own).pids for fd in os.listdir(f"/proc/{pid}/fd")}
    assert any("memfd:vidspec-tables" in name for name in names)
    assert not [path for path in Path("/dev/shm").iterdir() if "vidspec" in path.name]
    environment = Path(f"/proc/{drafter(own).pids[0]}/environ").read_bytes()
    assert b"RANK=" not in environment.replace(b"PYTHONRANK", b"")


@pytest.mark.slow
def test_a_killed_server_leaves_nothing():
    """SIGKILL of the engine's process in the middle of its work: the drafter goes with it, and so does all memory."""
    in_shm = set(os.listdir("/dev/shm"))
    command, out = [sys.executable, "-m", "tests.engine.ranks", "server"], subprocess.PIPE
    with subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, text=True) as server:
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
