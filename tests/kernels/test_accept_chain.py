"""accept_chain: literal walks, kernel and reference against each other and against a plain loop, dispatch."""

import pytest
import torch

from vidspec_kernels.accept_chain import accept_chain, accept_chain_reference


def pack(requests, device):
    """Concatenate (target tokens, input tokens) pairs into the wrapper's arguments."""
    targets = [token for target, _ in requests for token in target]
    drafts = [token for _, draft in requests for token in draft]
    bounds = [0]
    for target, draft in requests:
        assert len(target) == len(draft)
        bounds.append(bounds[-1] + len(target))
    return (
        torch.tensor(targets, dtype=torch.int64, device=device),
        torch.tensor(drafts, dtype=torch.int64, device=device),
        torch.tensor(bounds, dtype=torch.int32, device=device),
    )


def random_requests(num_reqs, max_drafts, seed=0):
    """Requests of 1 to K + 1 rows over three token ids, so that long prefixes match; some drafts invalid."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, size):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    requests = []
    for num_rows in ints(1, max_drafts + 2, num_reqs):
        target = ints(0, 3, num_rows)
        fed = [7, *target[:-1]]
        flips = ints(0, 6, num_rows)
        fed = [
            token if flip or j == 0 else (-1 if token else 2)
            for j, (token, flip) in enumerate(zip(fed, flips, strict=True))
        ]
        requests.append((target, fed))
    return requests


def loop(requests, max_drafts):
    """The rule of METHODS 0, spelled out as a walk."""
    sampled, counts = [], []
    for target, fed in requests:
        out = []
        for j, token in enumerate(target):
            out.append(token)
            if j + 1 == len(target) or fed[j + 1] != token:
                break
        counts.append(len(out))
        sampled.append(out + [0] * (max_drafts + 1 - len(out)))
    return sampled, counts


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("target", "fed", "emitted"),
    [
        ([5, 6, 7, 8], [1, 5, 6, 7], [5, 6, 7, 8]),  # all three drafts stand, the bonus token follows
        ([5, 6, 7, 8], [1, 5, 9, 7], [5, 6]),  # a mismatch emits the target's token; a later match does not count
        ([5, 6, 7, 8], [1, 9, 6, 7], [5]),  # nothing stands
        ([5, 5, 5, 5], [5, 9, 5, 5], [5]),  # the root itself is no draft
        ([5], [1], [5]),  # no drafts
        ([5, 6], [1, -1], [5]),  # an invalid draft
        ([-1, 6], [1, -1], [-1]),  # an invalid draft does not stand even for a nonsense sample
        ([0, 0, 0], [1, 0, 0], [0, 0, 0]),  # token id 0 is a token
    ],
)
def test_hand_computed_walks(device, impl, target, fed, emitted):
    """Catches: comparing draft j with target j (shift by one), counting matches after the first mismatch, accepting
    -1, a missing bonus token."""
    padding = ([9, 9, 9, 9], [9, 9, 9, 9])
    # Between two other requests: bounds must hold.
    arguments = pack([padding, (target, fed), padding], device)
    sampled, num_sampled = accept_chain(*arguments, 3, impl=impl)
    assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
    assert num_sampled.tolist() == [4, len(emitted), 4]
    assert sampled.tolist() == [[9] * 4, emitted + [0] * (4 - len(emitted)), [9] * 4]


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_neighbour_is_not_read(device, impl):
    """Catches: a last row compared with the next request's root."""
    sampled, num_sampled = accept_chain(*pack([([5, 6], [1, 5]), ([2, 2], [6, 2])], device), 3, impl=impl)
    assert num_sampled.tolist() == [2, 2]
    assert sampled.tolist() == [[5, 6, 0, 0], [2, 2, 0, 0]]


@pytest.mark.parametrize("max_drafts", [0, 1, 2, 3, 4, 7, 8, 10, 31])
@pytest.mark.parametrize("num_reqs", [0, 1, 40])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_equals_the_walk(device, impl, num_reqs, max_drafts):
    """Catches: a width K + 1 at, below or above a power of two handled wrongly; wrong ragged bounds."""
    requests = random_requests(num_reqs, max_drafts, seed=max_drafts)
    sampled, num_sampled = accept_chain(*pack(requests, device), max_drafts, impl=impl)
    expected, counts = loop(requests, max_drafts)
    assert sampled.shape == (num_reqs, max_drafts + 1)
    assert sampled.tolist() == expected
    assert num_sampled.tolist() == counts


def test_kernel_equals_reference_at_a_real_size(device):
    """Catches: a kernel and a reference that differ in anything, at 300 requests of up to 11 rows."""
    arguments = pack(random_requests(300, 10), device)
    got, expected = accept_chain(*arguments, 10, impl="triton"), accept_chain_reference(*arguments, 10)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    assert len(set(got[1].tolist())) > 5


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_empty_requests_and_surplus_rows(device, impl):
    """Catches: a token emitted for a request without rows; a write past the row when a request has too many rows."""
    arguments = pack([([], []), ([4, 4, 4, 4], [4, 4, 4, 4]), ([], [])], device)
    sampled, num_sampled = accept_chain(*arguments, 1, impl=impl)
    assert sampled.tolist() == [[0, 0], [4, 4], [0, 0]]
    assert num_sampled.tolist() == [0, 2, 0]
    sampled, num_sampled = accept_chain(*pack([([], [])], device), 2, impl=impl)
    assert sampled.tolist() == [[0, 0, 0]] and num_sampled.tolist() == [0]


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("accept_chain")
    accept_chain(*pack([([5], [1])], device), 2, impl=impl)
    automatic = "triton" if device.type == "cuda" else "torch"
    assert ran == [automatic if impl == "auto" else impl]


def test_wrapper_refuses(device):
    """Catches: a dropped dtype, stride or shape check."""
    target, draft, bounds = pack([([5, 6], [1, 5])], device)
    for arguments, message in (
        ((target.int(), draft, bounds), "target_tokens"),
        ((target, draft.int(), bounds), "draft_tokens"),
        ((target, draft, bounds.long()), "cu_num_logits"),
        ((target, draft, bounds[:0]), "cu_num_logits"),
        ((target.repeat(2)[::2], draft, bounds), "target_tokens: expected stride 1"),
        ((target, draft[:1], bounds), "target rows"),
    ):
        with pytest.raises(AssertionError, match=message):
            accept_chain(*arguments, 3)
    with pytest.raises(AssertionError, match="max_drafts"):
        accept_chain(target, draft, bounds, -1)
    with pytest.raises(ValueError, match="auto, triton or torch"):
        accept_chain(target, draft, bounds, 3, impl="cpu")
