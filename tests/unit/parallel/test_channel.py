"""The channel: order and content of messages small and large, and that a step never waits for a large one."""

import os
import threading
import time
from unittest import mock

import msgspec
import numpy as np
import pytest

from vllm_vidspec.engine.parallel import channel as channel_module
from vllm_vidspec.engine.parallel.channel import Channel


class Note(msgspec.Struct, tag=True):
    number: int
    data: np.ndarray


def video(number: int) -> Note:
    return Note(number, np.zeros(2_000_000, dtype=np.uint8))


SIZES = (1, 3000, 40_000, 2_000_000, 5)  # inline, inline, memory, memory by the writer, inline


@pytest.fixture
def ends():
    here, socket = Channel.pair(Note)
    there = Channel(socket, Note)
    yield here, there
    here.close()
    there.close()


def receive(end, count, timeout_s=10.0):
    """Return so many messages, or those that came in time."""
    found, deadline = [], time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline and not end.is_closed:
        end.wait(0.05)
        found += end.receive()
    return found


def test_messages_come_whole_and_in_order(ends):
    """Catches: one that overtakes, is cut or written over; a descriptor that stays open for every video."""
    here, there = ends
    before = len(os.listdir("/proc/self/fd"))
    noise = np.random.default_rng(0)
    sent = [Note(i, noise.integers(0, 255, size, dtype=np.uint8)) for i, size in enumerate(2 * SIZES)]
    for note in sent:
        here.send(note)
    found = receive(there, len(sent))
    assert [note.number for note in found] == list(range(len(sent)))
    assert all(np.array_equal(a.data, b.data) for a, b in zip(sent, found, strict=True))
    here.send(sent[0])
    assert receive(there, 1)[0].number == 0
    del found  # which keeps its memory open
    assert len(os.listdir("/proc/self/fd")) == before


def test_pixels_are_written_where_the_drafter_runs(monkeypatch):
    """Catches: pixels written on the target's cores, which its first token waits for; its thread moved instead."""
    before, write, seen = os.sched_getaffinity(0), channel_module._into_memory, []
    core = {max(before)}
    here, socket = Channel.pair(Note, core)
    there = Channel(socket, Note)
    monkeypatch.setattr(
        channel_module, "_into_memory", lambda buffers: seen.append(os.sched_getaffinity(0)) or write(buffers)
    )
    here.send(video(0))
    assert [note.number for note in receive(there, 1)] == [0]
    here.close()
    there.close()
    assert seen == [core] and os.sched_getaffinity(0) == before


@pytest.fixture
def may_write(monkeypatch):
    """What the writer of large messages waits for."""
    event, write = threading.Event(), channel_module._into_memory

    def slowly(buffers):
        assert threading.current_thread() is not threading.main_thread(), "written by the step"
        event.wait()
        return write(buffers)

    monkeypatch.setattr(channel_module, "_into_memory", slowly)
    return event


def test_a_step_waits_for_no_pixels(ends, may_write):
    """Catches: pixels that are written in the target's step; a message that passes one that is not written yet."""
    here, there = ends
    here.send(video(0))
    here.send(Note(1, np.zeros(1, dtype=np.uint8)))
    here.flush()
    assert receive(there, 1, timeout_s=0.2) == []
    may_write.set()
    assert [note.number for note in receive(there, 2)] == [0, 1]


def test_a_full_line_is_sent_when_there_is_room(ends):
    """Catches: a packet that is dropped, or sent twice, because the other end did not take it at once."""
    here, there = ends
    for i in range(3000):
        here.send(Note(i, np.zeros(100, dtype=np.uint8)))
    found = receive(there, 3000, timeout_s=0.3)
    assert 0 < len(found) < 3000, "everything fitted: nothing was in line"
    while len(found) < 3000:
        here.flush()
        found += receive(there, 1)
    assert [note.number for note in found] == list(range(3000))


def test_nothing_is_left_of_what_was_not_sent(ends, may_write):
    """Catches: a descriptor for every video that was in line when the drafter went; a writer that dies of it."""
    here, there = ends
    before = len(os.listdir("/proc/self/fd"))
    for i in range(3):
        here.send(video(i))
    writer = here._writer
    there.close()
    here.close()
    may_write.set()
    writer.shutdown(wait=True)
    assert len(os.listdir("/proc/self/fd")) == before - 2
    here.send(Note(9, np.zeros(1, dtype=np.uint8)))  # to one that is gone


def test_a_message_that_cannot_be_written_ends_the_channel(ends, monkeypatch):
    """Catches: a drafter that waits forever for what was lost, and a lost message that nobody is told of."""
    here, there = ends

    monkeypatch.setattr(channel_module, "_into_memory", mock.Mock(side_effect=OSError("no memory")))
    here.send(video(0))
    deadline = time.monotonic() + 10
    while not here.is_closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert here.is_closed
    assert receive(there, 1, timeout_s=0.2) == [] and there.is_closed
    here.wait(0.01)
    assert here.receive() == []
