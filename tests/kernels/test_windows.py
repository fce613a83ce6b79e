"""windows: kernels against loops at awkward lengths; what was written by hand; a writer in another process."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.kernels.agreement import agree
from vidspec_kernels import NO_STREAM, NUM_HEADERS, STALE, WINDOW_INFO_SIZE, copy_committed_suffix, gather_draft_windows

MAX_REQS, MAX_LEN, NUM_DRAFTS = 16, 300, 5


def case(device, num_reqs=9, ring=16, seed=0):
    """Streams that agree, differ, end early, are another's, being cut or none; outputs full of what must not stay."""
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
    given = dict(streams=streams, asked=asked, rows=rows, num_tokens=num_tokens, text=text)
    given |= dict(tokens=torch.full((num_reqs, NUM_DRAFTS), -7))
    given |= dict(window_info=torch.full((num_reqs, WINDOW_INFO_SIZE), -7, dtype=torch.int32))
    return gather_draft_windows, {name: tensor.to(device) for name, tensor in given.items()}


def suffix_case(device):
    """Committed texts, of which one is shorter than its end."""
    _, step = case(device)
    given = {name: step[name] for name in ("rows", "num_tokens", "text")}
    given["num_tokens"][given["rows"][0]] = 3
    out = torch.full((len(given["rows"]), 2 + NUM_DRAFTS), -7, dtype=torch.int32, device=device)
    return copy_committed_suffix, given | {"out": out}


@pytest.mark.parametrize("ring", [1, 2, 16, 64])
@pytest.mark.parametrize("num_reqs", [1, 9, MAX_REQS])
def test_equals_the_loop(device, num_reqs, ring):
    """Catches: tokens being written, a ring place off by one, the batch row, windows behind a difference."""
    found = set()
    for seed in range(6):
        left = agree(case, device, num_reqs, ring, seed)
        found |= {(count > 0, what) for count, what in left[".window_info"].tolist()}
    cases = {(True, 0), (False, STALE), (False, 0), (False, NO_STREAM)}
    assert num_reqs < 9 or found == cases, "a case that never came"


# The text, from position 0 on; a stream's generation, owner, `checked` and `end`, then its ring of four; what is asked
# for; the window and what is told of it.
TEXT = [10, 11, 12, 13]
WINDOWS = {
    "agrees": ([2, 7, 2, 6, 14, 15, 12, 13], [7, 3], [14, 15, 0], [2, 0]),
    "as far as is wanted": ([2, 7, 2, 6, 14, 15, 12, 13], [7, 1], [14, 0, 0], [1, 0]),
    "differs": ([2, 7, 2, 6, 14, 15, 12, 99], [7, 3], [0, 0, 0], [0, STALE]),
    "differs behind its end": ([2, 7, 2, 4, 14, 15, 12, 99], [7, 3], [0, 0, 0], [0, 0]),
    "is not there yet": ([2, 7, 2, 4, 14, 15, 12, 13], [7, 3], [0, 0, 0], [0, 0]),
    "differs before what is checked": ([2, 7, 4, 6, 14, 15, 99, 99], [7, 3], [14, 15, 0], [2, 0]),
    "is out of the ring's reach": ([2, 7, -1, 6, 14, 15, 12, 13], [7, 3], [0, 0, 0], [0, STALE]),
    "is being cut": ([3, 7, 2, 6, 14, 15, 12, 13], [7, 3], [0, 0, 0], [0, NO_STREAM]),
    "is another's": ([2, 8, 2, 6, 14, 15, 12, 13], [7, 3], [0, 0, 0], [0, NO_STREAM]),
    "has not begun": ([2, 7, 0, 0, 0, 0, 0, 0], [7, 3], [0, 0, 0], [0, NO_STREAM]),
}


def test_by_hand(device, impl):
    """Catches, in kernel and loop alike: a place of the ring off by one, a test too many or too few, the batch row."""
    num_reqs = len(WINDOWS)
    streams, asked, expected, told = ([*column] for column in zip(*WINDOWS.values(), strict=True))
    rows = torch.arange(num_reqs - 1, -1, -1, device=device)
    put = {"dtype": torch.int32, "device": device}
    text = torch.tensor([[*TEXT, 0, 0]] * num_reqs, **put)
    tokens = torch.full((num_reqs, 3), -7, device=device)
    info = torch.full((num_reqs, WINDOW_INFO_SIZE), -7, **put)
    gather_draft_windows(
        torch.tensor(streams[::-1], **put), torch.tensor(asked, **put), rows, torch.full((num_reqs,), 4, **put), text,
        tokens, info, impl=impl,
    )  # fmt: skip
    found = dict(zip(WINDOWS, zip(tokens.tolist(), info.tolist(), strict=True), strict=True))
    assert found == dict(zip(WINDOWS, zip(expected, told, strict=True), strict=True))
    out = torch.full((2, 1 + 3), -7, **put)
    copy_committed_suffix(rows[-2:], torch.tensor([2, 4] * 5, **put), text, out, impl=impl)
    assert out.tolist() == [[4, 11, 12, 13], [2, 10, 10, 11]]


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


def test_a_stream_that_is_cut_meanwhile_gives_no_window(tmp_path):
    """Another process writes streams of m times m all the time: a window is all of one, or there is none."""
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
            tokens, told = torch.full((1, 60_000), -7), torch.full((1, WINDOW_INFO_SIZE), -7, dtype=torch.int32)
            deadline = time.monotonic() + 20
            while not found >= {(False, STALE), (True, 0)} and time.monotonic() < deadline:
                gather_draft_windows(streams, asked, rows, num_tokens, text, tokens, told)
                count, what = told[0].tolist()
                assert tokens[0].tolist() == [count] * count + [0] * (60_000 - count), "a window of two writings"
                found.add((count > 0, what))
            assert found - {(False, NO_STREAM)} == {(False, STALE), (True, 0)}
        finally:
            writer.kill()
