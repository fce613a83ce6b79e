"""windows: kernels, loops and references against plain loops, at awkward lengths; what was written by hand."""

import pytest
import torch
from impls import branch

from vidspec_kernels import NUM_HEADERS, NUM_TOLD, take_windows, text_tails

MAX_REQS, MAX_LEN, NUM_DRAFTS = 16, 300, 5
IMPLS = ["triton", "numba", "torch"]


def make_inputs(num_reqs, ring, device, seed=0):
    """Streams that agree, that differ somewhere, that end before the text does, that the ring no longer reaches."""
    rng = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=rng))

    text = torch.randint(100, (MAX_REQS, MAX_LEN), generator=rng, dtype=torch.int32)
    rows = torch.randperm(MAX_REQS, generator=rng)[:num_reqs]
    num_tokens = torch.randint(ring + 2, MAX_LEN - ring, (MAX_REQS,), generator=rng, dtype=torch.int32)
    streams = torch.randint(100, (num_reqs, NUM_HEADERS + ring), generator=rng, dtype=torch.int32)
    for i, row in enumerate(rows.tolist()):
        length = int(num_tokens[row])
        checked = length - number(0, ring + 2)
        end = max(checked, length + number(-3, 8))
        streams[i, :NUM_HEADERS] = torch.tensor([number(0, 4), checked, end, number(0, NUM_DRAFTS + 1)])
        for position in range(checked, min(end, checked + ring)):
            streams[i, NUM_HEADERS + position % ring] = text[row, position]
        if i % 3 == 0:
            position = number(checked, max(end, checked + 1))
            streams[i, NUM_HEADERS + position % ring] += 1
    return [tensor.to(device) for tensor in (streams, rows, num_tokens, text)]


def outputs(num_reqs, device, num_drafts=NUM_DRAFTS):
    """What is written, full of what must not stay."""
    tokens = torch.full((num_reqs, num_drafts), -7, device=device)
    return tokens, torch.full((num_reqs, NUM_TOLD), -7, dtype=torch.int32, device=device)


def window(stream, length, text, ring):
    """A token at a time: the window, and whether the stream is stale."""
    _, checked, end, wanted, *said = stream
    is_stale = length - checked > ring
    for position in range(checked, min(length, end)):
        is_stale |= position < checked + ring and said[position % ring] != text[position]
    if is_stale or end <= length:
        return [], is_stale and end > length
    return [said[position % ring] for position in range(length, min(end, length + wanted))], False


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ring", [1, 2, 16, 64])
@pytest.mark.parametrize("num_reqs", [1, 9, MAX_REQS])
def test_equals_the_loop(device, impl, num_reqs, ring):
    """Catches: a token looked at that the drafter may be writing, a place of the ring off by one, the batch row taken
    for the persistent one, a window behind a difference, what an earlier step has left behind a shorter window."""
    found = set()
    for seed in range(6):
        streams, rows, num_tokens, text = make_inputs(num_reqs, ring, device, seed)
        tokens, told = outputs(num_reqs, device)
        take_windows(streams, rows, num_tokens, text, tokens, told, impl=impl)
        for i, row in enumerate(rows.tolist()):
            expected, is_stale = window(streams[i].tolist(), int(num_tokens[row]), text[row].tolist(), ring)
            assert tokens[i].tolist() == expected + [0] * (NUM_DRAFTS - len(expected)), (seed, i)
            assert told[i].tolist() == [len(expected), is_stale], (seed, i)
            found.add((len(expected) > 0, is_stale))
    assert num_reqs < 9 or found == {(True, False), (False, True), (False, False)}, "a case that never came"


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(device, impl):
    """Text 10 11 12 13 of row 2; a stream checked up to 2 that says 12 13 14 15, one that says 12 99 14 15.

    The first is the next window, as far as is wanted; the second is stale, although its end is ahead.
    """
    text = torch.zeros(3, 8, dtype=torch.int32, device=device)
    text[2, :4] = torch.tensor([10, 11, 12, 13])
    num_tokens = torch.tensor([0, 0, 4], dtype=torch.int32, device=device)
    # At place p % 4 of the ring: positions 4, 5, 2, 3.
    agrees, differs = [2, 2, 6, 3, 14, 15, 12, 13], [2, 2, 6, 3, 14, 15, 12, 99]
    streams = torch.tensor([agrees, differs], dtype=torch.int32, device=device)
    tokens, told = outputs(2, device, num_drafts=3)
    take_windows(streams, torch.tensor([2, 2], device=device), num_tokens, text, tokens, told, impl=impl)
    assert tokens.tolist() == [[14, 15, 0], [0, 0, 0]] and told.tolist() == [[2, 0], [0, 1]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_reqs", [1, 9])
def test_tails_equal_the_loop(device, impl, num_reqs):
    """Catches: an end off by one; a text shorter than its tail, read in front of its row."""
    _, rows, num_tokens, text = make_inputs(num_reqs, 16, device)
    num_tokens[rows[0]] = 3
    out = torch.full((num_reqs, 2 + NUM_DRAFTS), -7, dtype=torch.int32, device=device)
    text_tails(rows, num_tokens, text, out, impl=impl)
    for i, row in enumerate(rows.tolist()):
        length = int(num_tokens[row])
        cols = [max(col, 0) for col in range(length - 1 - NUM_DRAFTS, length)]
        assert out[i].tolist() == [length, *(int(text[row, col]) for col in cols)]


@pytest.mark.parametrize("impl", ["auto", "triton", "numba", "torch"])
@pytest.mark.parametrize("name", ["take_windows", "text_tails"])
def test_dispatch(device, branches, impl, name):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("windows", [f"_{name}_kernel"], f"{name}_reference")
    streams, rows, num_tokens, text = make_inputs(2, 16, device)
    if name == "take_windows":
        take_windows(streams, rows, num_tokens, text, *outputs(2, device), impl=impl)
    else:
        out = torch.zeros(2, 3, dtype=torch.int32, device=device)
        text_tails(rows, num_tokens, text, out, impl=impl)
    assert ran == [branch(impl, device)]


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, lambda t: t.long()),
        (0, lambda t: t[:, :-1].contiguous()),
        (0, lambda t: t[:2]),
        (0, lambda t: t.T.contiguous().T),
        (1, lambda t: t.int()),
        (2, lambda t: t.long()),
        (3, lambda t: t.long()),
        (3, lambda t: t.T.contiguous().T),
        (3, lambda t: t[:4]),
        (4, lambda t: t.int()),
        (4, lambda t: t[:2]),
        (5, lambda t: t.long()),
        (5, lambda t: t[:, :1].contiguous()),
    ],
)
def test_wrapper_refuses(device, place, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    arguments = [*make_inputs(3, 16, device), *outputs(3, device)]
    take_windows(*arguments)
    arguments[place] = change(arguments[place])
    with pytest.raises(AssertionError):
        take_windows(*arguments)


@pytest.mark.parametrize("change", [lambda t: t.long(), lambda t: t[:2], lambda t: t[:, :1].contiguous()])
def test_tails_refuse(device, change):
    _, *texts = make_inputs(3, 16, device)
    with pytest.raises(AssertionError):
        text_tails(*texts, change(torch.zeros(3, 4, dtype=torch.int32, device=device)))
