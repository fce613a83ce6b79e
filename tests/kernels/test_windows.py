"""windows: kernels, loops and references against plain loops, at awkward lengths; what was written by hand."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.kernels.refusals import changes, first_two, int32, long, transposed
from vidspec_kernels import NO_STREAM, NUM_HEADERS, STALE, WINDOW_INFO_SIZE, copy_committed_suffix, gather_draft_windows

MAX_REQS, MAX_LEN, NUM_DRAFTS = 16, 300, 5


def make_inputs(num_reqs, ring, device, seed=0):
    """Streams that agree, that differ somewhere, that end before the text does, that the ring no longer reaches, that
    are another request's, that are being cut, that are none yet."""
    rng = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=rng))

    text = torch.randint(100, (MAX_REQS, MAX_LEN), generator=rng, dtype=torch.int32)
    rows = torch.randperm(MAX_REQS, generator=rng)[:num_reqs]
    num_tokens = torch.randint(ring + 2, MAX_LEN - ring, (MAX_REQS,), generator=rng, dtype=torch.int32)
    streams = torch.randint(100, (MAX_REQS, NUM_HEADERS + ring), generator=rng, dtype=torch.int32)
    asked = torch.tensor([[100 + row, number(0, NUM_DRAFTS + 1)] for row in rows.tolist()], dtype=torch.int32)
    for i, row in enumerate(rows.tolist()):
        length = int(num_tokens[row])
        checked = length - number(0, ring + 2)
        end = max(checked, length + number(-3, 8))
        streams[row, :NUM_HEADERS] = torch.tensor([2 * number(0, 9), 100 + row, checked, end])
        for position in range(checked, min(end, checked + ring)):
            streams[row, NUM_HEADERS + position % ring] = text[row, position]
        if i % 3 == 0:
            position = number(checked, max(end, checked + 1))
            streams[row, NUM_HEADERS + position % ring] += 1
        if num_reqs > 1 and i % 5 == 4:  # its writer is at it, it is another's, it has not begun
            place, value = [(0, 7), (1, 99), (3, 0)][number(0, 3)]
            streams[row, place] = value
    return [tensor.to(device) for tensor in (streams, asked, rows, num_tokens, text)]


def outputs(num_reqs, device, num_drafts=NUM_DRAFTS):
    """What is written, full of what must not stay."""
    tokens = torch.full((num_reqs, num_drafts), -7, device=device)
    return tokens, torch.full((num_reqs, WINDOW_INFO_SIZE), -7, dtype=torch.int32, device=device)


def window(stream, asked, length, text, ring):
    """A token at a time: the window, and what is told of it."""
    generation, owner, checked, end, *said = stream
    if generation % 2 or owner != asked[0] or not end:
        return [], NO_STREAM
    is_stale = length - checked > ring
    for position in range(checked, min(length, end)):
        is_stale |= position < checked + ring and said[position % ring] != text[position]
    if is_stale or end <= length:
        return [], STALE if is_stale and end > length else 0
    return [said[position % ring] for position in range(length, min(end, length + asked[1]))], 0


@pytest.mark.parametrize("ring", [1, 2, 16, 64])
@pytest.mark.parametrize("num_reqs", [1, 9, MAX_REQS])
def test_equals_the_loop(device, impl, num_reqs, ring):
    """Catches: a token looked at that the drafter may be writing, a place of the ring off by one, the batch row taken
    for the persistent one, a window behind a difference, what an earlier step has left behind a shorter window, the
    stream of the row's last request."""
    found = set()
    for seed in range(6):
        streams, asked, rows, num_tokens, text = make_inputs(num_reqs, ring, device, seed)
        tokens, told = outputs(num_reqs, device)
        gather_draft_windows(streams, asked, rows, num_tokens, text, tokens, told, impl=impl)
        for i, row in enumerate(rows.tolist()):
            of_row = (streams[row].tolist(), asked[i].tolist(), int(num_tokens[row]), text[row].tolist())
            expected, what = window(*of_row, ring)
            assert tokens[i].tolist() == expected + [0] * (NUM_DRAFTS - len(expected)), (seed, i)
            assert told[i].tolist() == [len(expected), what], (seed, i)
            found.add((len(expected) > 0, what))
    cases = {(True, 0), (False, STALE), (False, 0), (False, NO_STREAM)}
    assert num_reqs < 9 or found == cases, "a case that never came"


def test_by_hand(device, impl):
    """Text 10 11 12 13; a stream checked up to 2 that says 12 13 14 15, one that says 12 99 14 15.

    The first is the next window, as far as is wanted; the second is stale, although its end is ahead.
    """
    text = torch.tensor([[10, 11, 12, 13, 0, 0]] * 3, dtype=torch.int32, device=device)
    num_tokens = torch.tensor([4, 4, 4], dtype=torch.int32, device=device)
    # At place p % 4 of the ring: positions 4, 5, 2, 3.
    agrees, differs = [2, 7, 2, 6, 14, 15, 12, 13], [2, 8, 2, 6, 14, 15, 12, 99]
    streams = torch.tensor([agrees, [0] * 8, differs], dtype=torch.int32, device=device)
    asked = torch.tensor([[8, 3], [7, 3], [7, 3]], dtype=torch.int32, device=device)
    tokens, told = outputs(3, device, num_drafts=3)
    gather_draft_windows(
        streams, asked, torch.tensor([2, 0, 1], device=device), num_tokens, text, tokens, told, impl=impl
    )
    assert tokens.tolist() == [[0, 0, 0], [14, 15, 0], [0, 0, 0]]
    assert told.tolist() == [[0, STALE], [2, 0], [0, NO_STREAM]]


WRITER = """
import sys
import numpy as np
stream = np.memmap(sys.argv[1], dtype=np.int32, mode="r+")
print("up", flush=True)
said = 0
while True:
    said = (said + 7919) % 60_000 + 1
    stream[0] += 1
    stream[3] = 8 + said
    stream[4:] = said
    stream[0] += 1
    for _ in range(999):
        pass
"""


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_a_stream_that_is_cut_meanwhile_gives_no_window(impl, tmp_path):
    """Another process writes a stream of m times the number m, all the time: a window is all of one, or there is none.

    Catches: a generation that is read once only, before what it belongs to or behind it, or is not looked at. (Triton's
    interpreter reads copies that it makes at the launch.)
    """
    path, ring = tmp_path / "stream", 1 << 16
    shared = np.memmap(path, dtype=np.int32, mode="w+", shape=(1, NUM_HEADERS + ring))
    shared[0] = 1
    shared[0, :NUM_HEADERS] = 0, 5, 8, 9
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout.readline() == "up\n"
            streams, found = torch.from_numpy(shared), set()
            asked, rows = torch.tensor([[5, 60_000]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
            num_tokens, text = torch.tensor([8], dtype=torch.int32), torch.zeros(1, 16, dtype=torch.int32)
            tokens, told = outputs(1, torch.device("cpu"), num_drafts=60_000)
            deadline = time.monotonic() + 20
            while not found >= {(False, STALE), (True, 0)} and time.monotonic() < deadline:
                gather_draft_windows(streams, asked, rows, num_tokens, text, tokens, told, impl=impl)
                count, what = told[0].tolist()
                assert tokens[0].tolist() == [count] * count + [0] * (60_000 - count), "a window of two writings"
                found.add((count > 0, what))
            assert found - {(False, NO_STREAM)} == {(False, STALE), (True, 0)}
        finally:
            writer.kill()


@pytest.mark.parametrize("num_reqs", [1, 9])
def test_tails_equal_the_loop(device, impl, num_reqs):
    """Catches: an end off by one; a text shorter than its tail, read in front of its row."""
    *_, rows, num_tokens, text = make_inputs(num_reqs, 16, device)
    num_tokens[rows[0]] = 3
    out = torch.full((num_reqs, 2 + NUM_DRAFTS), -7, dtype=torch.int32, device=device)
    copy_committed_suffix(rows, num_tokens, text, out, impl=impl)
    for i, row in enumerate(rows.tolist()):
        length = int(num_tokens[row])
        cols = [max(col, 0) for col in range(length - 1 - NUM_DRAFTS, length)]
        assert out[i].tolist() == [length, *(int(text[row, col]) for col in cols)]


def narrow(tensor):
    return tensor[:, :1].contiguous()


ARGUMENTS = ("streams", "asked", "rows", "num_tokens", "text", "tokens", "window_info")


@pytest.mark.parametrize(("name", "change"), changes(
    streams=(long, lambda t: t[:, :-1].contiguous(), first_two, transposed), asked=(long, first_two, narrow),
    rows=(int32,), num_tokens=(long,), text=(long, transposed, lambda t: t[:4]), tokens=(int32, first_two),
    window_info=(long, narrow),
))  # fmt: skip
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    arguments = dict(zip(ARGUMENTS, (*make_inputs(3, 16, device), *outputs(3, device)), strict=True))
    gather_draft_windows(**arguments)
    with pytest.raises(AssertionError, match=name):
        gather_draft_windows(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize("change", [long, first_two, narrow])
def test_tails_refuse(device, change):
    *_, rows, num_tokens, text = make_inputs(3, 16, device)
    with pytest.raises(AssertionError):
        copy_committed_suffix(rows, num_tokens, text, change(torch.zeros(3, 4, dtype=torch.int32, device=device)))
