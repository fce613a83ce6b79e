"""accept: literal steps, kernel and loop against a walk over all paths, special cases; its tally against plain sums."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels import accept_requests
from tests.kernels.accept_requests import INF, MODES, NAN, Request, accepted, chain, check, pack, random_requests
from vidspec_kernels import LOWEST, SHIFT, WINDOW, accept

#        0
#      1   2        siblings 1 and 2; 3 hangs on 1, 4 and 5 on 2, 6 on 5
#      3  4 5
#           6
TREE = [-1, 0, 0, 1, 2, 2, 5]
PAIR = [-1, 0, 0, 1, 2]  # two branches of two
TEN, WRONG = list(range(10, 21)), list(range(30, 40))  # targets of a chain's eleven rows, and drafts that differ


def literal(request, sampled, kinds, path=None):
    return request, sampled, kinds, path or list(range(len(sampled)))


def tree(target, fed, nodes):
    """A strict step of TREE, by the nodes that stand."""
    return Request(TREE, target, fed), [target[node] for node in nodes], [1] * (len(nodes) - 1) + [0], nodes


# What pins the oracle, a rule each; the oracle has the rest.
LITERAL = {
    "strict: a match behind a mismatch": literal(chain([5, 6, 7, 8], [5, 9, 7]), [5, 6], [1, 0]),
    "strict: the root is no draft": literal(Request([-1, 0, 1, 2], [5] * 4, [5, 9, 5, 5]), [5], [0]),
    "strict: as wrong a sample": literal(chain([-1, 6], [-1]), [-1], [0]),
    "strict: the later twin goes on": tree([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 0, 0, 7, 1], [0, 2, 5, 6]),
    "strict: equally deep": tree([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 6, 7, 7, 0], [0, 1, 3]),
    "strict: cut before node 6": tree([5, 6, 7, 8, 9, 1], [3, 4, 5, 6, 0, 7], [0, 2, 5]),
    # The two lowest of three; positions 1 and 2 match and have them.
    "matches take places": literal(chain([5, 6, 7, 8], [5, 6, 9], LOWEST, 0.7), [5, 6, 7], [1, 1, 0]),
    "lowest, not highest": literal(
        chain([5, 6, 7, 8], [9, 9, 9], LOWEST, 0.7, scores=[0, 0.5, 0.1, 0.9]), [9, 9, 7], [2, 2, 0]),
    "NaN is infinite": literal(chain([5, 6, 7, 8], [9, 9, 9], LOWEST, 0.7, scores=[0, NAN, INF, 0]), [9, 6], [2, 0]),
    "may not": literal(chain([5, 6, 7], [9, 9], LOWEST, 1.0, may=[True, True, False]), [9, 6], [2, 0]),
    "a later token": literal(chain([5, 6, 7, 8], [9, 5, 7], SHIFT), [9, 6], [3, 0]),
    "an earlier token": literal(chain([5, 6, 5, 8], [5, 6, 9], SHIFT), [5, 6, 9, 8], [1, 1, 3, 0]),
    "the root is no draft": literal(chain([7, 6], [9], SHIFT), [7], [0]),
    "an invalid draft": literal(chain([5, -1, 7], [9, -1], LOWEST + SHIFT + WINDOW, 1.0), [9, -1], [2, 0]),
    "loosened before shifted": literal(chain([5, 6, 5, 8], [5, 9, 6], LOWEST + SHIFT, 0.7), [5, 9, 6, 8], [1, 2, 3, 0]),
    "a full window": literal(chain([5, 6, 7, 8], [9, 6, 7], WINDOW, window=2), [9, 6, 7, 8], [2, 1, 1, 0]),
    "no full window": literal(chain([5, 6, 7, 8], [5, 9, 7], WINDOW, window=2), [5, 6], [1, 0]),
    "a mismatch in the window": literal(chain([5, 6, 7, 8], [9, 6, 9], WINDOW, window=2), [5], [0]),
    "no window": literal(chain([5, 6, 7, 8], [9] * 3, WINDOW, entropies=[0.3, 0.3, 0.2, 0.3]), [9, 9, 7], [2, 2, 0]),
    "the more exact branch": literal(
        Request(PAIR, [5, 6, 6, 7, 8], [7, 9, 5, 9, 9], LOWEST, 1.0), [5, 9, 8], [1, 2, 0], [0, 2, 4]),
    # Of one draft in the first branch and one in the second none is among floor(0.5), though 1 of both would be.
    "branches rank alone": literal(Request([-1, 0, 0], [5, 6, 7], [7, 8, 9], LOWEST, 0.5), [5], [0]),
    "branches shift alone": literal(
        Request(TREE, [5] * 7, [7, 8, 9, 5, 0, 0, 0], SHIFT), [8, 5, 5], [3, 1, 0], [0, 1, 3]),
    "a window on one of two ways": literal(
        Request(TREE, [5, 6, 7, 8, 9, 1, 2], [7, 0, 3, 0, 0, 7, 1], WINDOW, window=2), [3, 7, 1, 2], [2, 1, 1, 0],
        [0, 2, 5, 6]),
    # The floor: 0.7 of 10 is 7 though 0.7 is less in float32, and no share is rounded to the nearest.
    **{f"{share} of {n}": literal(
        chain(TEN[: n + 1], WRONG[:n], LOWEST, share), [*WRONG[:loose], TEN[loose]], [2] * loose + [0])
       for n, share, loose in ((10, 0.7, 7), (10, 0.3, 3), (10, 0.75, 7), (3, 0.7, 2), (3, 0.3, 0), (3, 1.0, 3))},
}  # fmt: skip


@pytest.mark.parametrize(("in_trees", "is_loose"), MODES)
def test_hand_computed_steps(device, impl, in_trees, is_loose):
    """Each as a tree and, where it is one, as a chain; without a rule strictly and loosely."""
    names = [name for name, (request, *_) in LITERAL.items() if is_loose or not request.rule]
    if not in_trees:
        names = [name for name in names if LITERAL[name][0].tree == [*range(-1, len(LITERAL[name][0].tree) - 1)]]
    requests = [LITERAL[name][0] for name in names]
    sampled, num_sampled, paths, kinds = accept(**pack(requests, 10, device, in_trees, is_loose), impl=impl)
    for i, name in enumerate(names):
        request, tokens, why, path = LITERAL[name]
        count = len(path)
        assert accepted(request)[0] == path and num_sampled[i] == count, name
        assert sampled[i].tolist() == tokens + [0] * (11 - count), name
        assert not in_trees or paths[i].tolist() == path + list(range(count, 11)), name
        assert not is_loose or kinds[i].tolist() == why + [0] * (11 - count), name


# The kernel has a column for each of 2, 4, 8, ... 64 drafts; strict chains may have none.
@pytest.mark.parametrize(
    ("num_reqs", "max_drafts"), [(0, 8), (1, 8), (16, 0), (16, 1), (16, 7), (16, 8), (16, 9), (16, 25), (16, 64)]
)
@pytest.mark.parametrize(("in_trees", "is_loose"), MODES)
def test_equals_the_oracle(device, impl, in_trees, is_loose, num_reqs, max_drafts):
    """Catches: powers of two, ragged bounds, settings read by batch row, garbage of nodes without a row."""
    if max_drafts == 0 and (in_trees or is_loose):
        with pytest.raises(AssertionError, match="max_drafts 0"):
            accept(**pack([], 0, device, in_trees, is_loose))
        return
    requests = random_requests(num_reqs, max_drafts, in_trees, is_loose, seed=max_drafts)
    check(impl, requests, device, max_drafts, in_trees, is_loose)


def test_the_last_bit(device, impl):
    """Catches: node 64 of a star, whose bit is the sign, lost on its way or from its mismatches."""
    requests = []
    for tokens, rule, may, last in (
        ([9, 9], 0, [True] * 2, 0), ([9, 5], 0, [True] * 2, 64), ([9, 9], WINDOW, [False, True], 64),
        ([9, 9], WINDOW, [True] * 2, 63), ([9, 5], WINDOW, [True] * 2, 64),
    ):  # fmt: skip
        requests.append(Request([-1] + [0] * 64, [5] * 65, [7] + [-1] * 62 + tokens, rule, may=[True] * 63 + may))
        assert accepted(requests[-1])[0][-1] == last
    check(impl, requests, device)
    check(impl, requests[:2], device, is_loose=False)
    whole = chain([4] * 65, [4] * 64)
    for in_trees, is_loose in itertools.product((False, True), repeat=2):
        check(impl, [whole, replace(whole, rule=7 * is_loose)], device, 64, in_trees, is_loose)


def test_missing_and_surplus_rows(device, impl):
    """Catches: a token for a request without rows; a write past the row or K where there are more rows than K + 1."""
    none, many = Request([-1], [], []), chain([4] * 4, [4] * 3)
    arguments = pack([none, many, none], 3, device, False, False)
    sampled, num_sampled, _, _ = accept(**arguments | {"max_drafts": 1}, impl=impl)
    assert sampled.tolist() == [[0, 0], [4, 4], [0, 0]] and num_sampled.tolist() == [0, 2, 0]
    for in_trees, is_loose in itertools.product((False, True), repeat=2):
        arguments = pack([none], 2, device, in_trees, is_loose)
        sampled, num_sampled, path, kinds = accept(**arguments, impl=impl)
        assert sampled.tolist() == [[0, 0, 0]] and num_sampled.tolist() == [0]
        assert not in_trees or path.tolist() == [[0, 1, 2]]
        assert not is_loose or kinds.tolist() == [[0, 0, 0]]
        request = Request(TREE, [4] * 7, [9] * 7, LOWEST, 1.0) if is_loose else Request(TREE, [4] * 7, [4] * 7)
        arguments = pack([request], 6, device, in_trees, is_loose) | {"max_drafts": 2}
        sampled, num_sampled, path, kinds = accept(**arguments, impl=impl)
        depth, token = 1 if in_trees else 2, 9 if is_loose else 4
        assert num_sampled.tolist() == [depth + 1]
        assert sampled.tolist() == [[token] * depth + [4] + [0] * (2 - depth)]
        assert not in_trees or path.tolist() == [[0, 1, 2]]
        assert not is_loose or kinds.tolist() == [[2] * depth + [0] * (3 - depth)]


def sums_of(request, max_drafts, is_real):
    """What one request adds to the totals, by the oracle."""
    nodes, kinds = accepted(request)
    drafts = range(1, len(request.target)) if is_real else ()
    on_path = [kinds[node] for node in nodes[1:]] if len(drafts) else []
    depth = max((len(accept_requests.way(request.tree, node)) for node in drafts), default=0)
    kinds_of = [on_path.count(kind) for kind in (1, 2, 3)]
    at_depth = [int(place < len(on_path)) for place in range(max_drafts)]
    return [int(bool(drafts)), len(drafts), len(on_path), depth, *kinds_of, *at_depth]


def check_tally(impl, requests, device, max_drafts, in_trees, is_loose, has_draft, **wishes):
    """Assert that `accept` counts and keeps what the oracle says, and touches nothing else."""
    arguments = pack(requests, max_drafts, device, in_trees, is_loose)
    tally = accept_requests.tally_of(arguments, has_draft, max_drafts, **wishes)
    before = tally.totals.clone()
    results = accept(**arguments, tally=tally, impl=impl)
    plain = accept(**arguments, impl="numba")
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(results, plain, strict=True))
    sums = np.array(
        [sums_of(request, max_drafts, real) for request, real in zip(requests, has_draft, strict=True)]
    ).reshape(len(requests), accept_requests.NUM_SUMS + max_drafts)
    assert (tally.totals - before).tolist() == sums.sum(0).tolist()
    if tally.by_kind is not None:
        assert tally.by_kind.tolist() == sums[:, 4:7].tolist()
    if tally.path is None:
        return
    rows = tally.rows.tolist()
    for row in range(len(requests) + 3):
        if row not in rows:
            assert {*tally.path[row].tolist(), int(tally.num_accepted[row])} == {accept_requests.GARBAGE}
            continue
        nodes = accepted(requests[rows.index(row)])[0]
        path = nodes + list(range(len(nodes), max_drafts + 1)) if in_trees else list(range(max_drafts + 1))
        assert tally.path[row].tolist() == [*path, accept_requests.GARBAGE]
        assert tally.num_accepted[row] == len(nodes) - 1


@pytest.mark.parametrize(("num_reqs", "max_drafts"), [(0, 8), (1, 8), (16, 1), (16, 8), (16, 25), (5, 64)])
@pytest.mark.parametrize(("in_trees", "is_loose"), MODES)
def test_equals_sums_over_the_oracles_paths(device, impl, in_trees, is_loose, num_reqs, max_drafts):
    """Catches: placeholders or padding counted, totals replaced, writes beyond rows or columns, results that change."""
    requests = random_requests(num_reqs, max_drafts, in_trees, is_loose, seed=max_drafts)
    has_draft = (np.random.default_rng(num_reqs).random(num_reqs) < 0.7).tolist()
    check_tally(impl, requests, device, max_drafts, in_trees, is_loose, has_draft)


@pytest.mark.parametrize("wants_kinds", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_every_request_has_all_of_its_rows(device, impl, wants_kinds, keeps):
    """The usual decode step, which the reference takes without looking rows up; what nobody asks for."""
    for in_trees, is_loose in ((False, False), (True, False), (False, True), (True, True)):
        tree = [-1, 0, 0, 1, 2, 2, 5] if in_trees else list(range(-1, 6))
        requests = [
            Request(tree, [4] * 7, [7, *drafts], rule=7 * is_loose, share=0.5)
            for drafts in ([4] * 6, [4, 4, 9, 4, 4, 4], [9] * 6)
        ]
        wishes = dict(wants_kinds=wants_kinds, keeps=keeps)
        check_tally(impl, requests, device, 6, in_trees, is_loose, [True, False, True], **wishes)
