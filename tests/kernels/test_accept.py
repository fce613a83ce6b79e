"""accept: literal steps, kernel and reference against a walk over all paths and against special cases, exact rules."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.accept_requests import (
    INF,
    MODES,
    NAN,
    Request,
    accept_with,
    accepted,
    chain,
    check,
    pack,
    random_request,
    random_requests,
)  # fmt: skip
from vidspec_kernels import LOWEST, SHIFT, WINDOW, accept

#        0
#      1   2        siblings 1 and 2; 3 hangs on 1, 4 and 5 on 2, 6 on 5
#      3  4 5
#           6
TREE = [-1, 0, 0, 1, 2, 2, 5]
TEN = list(range(10, 21))  # targets of a chain's eleven rows: drafts 10 to 19 match
WRONG = list(range(30, 40))
#        0             two branches of ten: 1, 3, 5, ... and 2, 4, 6, ...
#      1   2
PAIR = [-1, 0, 0, *range(1, 19)]
TWINS = [10, 11, 11, *(token for token in range(12, 21) for _ in range(2))]  # the targets of its nodes


def drafts_of_ten(*wrong):
    return [WRONG[i] if i + 1 in wrong else TEN[i] for i in range(10)]


def pair(first_wrong, second_wrong, **rest):
    """A request of two branches of ten drafts, wrong at these depths."""
    first, second = drafts_of_ten(*first_wrong), drafts_of_ten(*second_wrong)
    fed = [7] + [token for level in zip(first, second, strict=True) for token in level]
    return Request(PAIR, TWINS, fed, **rest)


def literal(request, sampled, kinds, path=None):
    return request, sampled, kinds, path or list(range(len(sampled)))


def tree(target, fed, nodes):
    """A strict step of TREE, by the nodes that stand."""
    kinds = [1] * (len(nodes) - 1) + [0] * bool(nodes)
    return Request(TREE, target, fed), [target[node] for node in nodes], kinds, nodes


LITERAL = {
    "strict: all stand": literal(chain([5, 6, 7, 8], [5, 6, 7]), [5, 6, 7, 8], [1, 1, 1, 0]),
    "strict: a match behind a mismatch": literal(chain([5, 6, 7, 8], [5, 9, 7]), [5, 6], [1, 0]),
    "strict: the root is no draft": literal(Request([-1, 0, 1, 2], [5] * 4, [5, 9, 5, 5]), [5], [0]),
    "strict: an invalid draft": literal(chain([5, 6], [-1]), [5], [0]),
    "strict: as wrong a sample": literal(chain([-1, 6], [-1]), [-1], [0]),
    "strict: the second, to the deepest": tree([5, 6, 7, 8, 9, 1, 2], [3, 4, 5, 6, 0, 7, 1], [0, 2, 5, 6]),
    "strict: the first twin goes on": tree([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 6, 0, 0, 0], [0, 1, 3]),
    "strict: the later twin goes on": tree([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 0, 0, 7, 1], [0, 2, 5, 6]),
    "strict: equally deep": tree([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 6, 7, 7, 0], [0, 1, 3]),
    "strict: invalid branches": tree([-1, 6, 7, 8, 9, 1, 2], [3, -1, -1, 6, 7, 7, 1], [0]),
    "strict: token 0 everywhere": tree([0] * 7, [0] * 7, [0, 2, 5, 6]),
    "strict: cut before node 6": tree([5, 6, 7, 8, 9, 1], [3, 4, 5, 6, 0, 7], [0, 2, 5]),
    "no rule": literal(chain(TEN, drafts_of_ten(3)), [10, 11, 12], [1, 1, 0]),
    "the draft is emitted": literal(
        chain(TEN, drafts_of_ten(3, 5), LOWEST, 0.3), [10, 11, 32, 13, 14], [1, 1, 2, 1, 0]),
    # The two lowest of three; positions 1 and 2 match and have them.
    "matches take places": literal(chain([5, 6, 7, 8], [5, 6, 9], LOWEST, 0.7), [5, 6, 7], [1, 1, 0]),
    "lowest, not highest": literal(
        chain([5, 6, 7, 8], [9, 9, 9], LOWEST, 0.7, scores=[0, 0.5, 0.1, 0.9]), [9, 9, 7], [2, 2, 0]),
    "equal scores": literal(chain([5, 6, 7, 8], [9, 9, 9], LOWEST, 0.7, scores=[0] * 4), [9, 9, 7], [2, 2, 0]),
    "NaN is infinite": literal(chain([5, 6, 7, 8], [9, 9, 9], LOWEST, 0.7, scores=[0, NAN, INF, 0]), [9, 6], [2, 0]),
    "NaN is not lowest": literal(chain([5, 6, 7, 8], [9, 9, 9], LOWEST, 0.7, scores=[0, NAN, 1, 2]), [5], [0]),
    "may not": literal(
        chain(TEN, WRONG, LOWEST, 1.0, may=[True] * 5 + [False] * 6), [30, 31, 32, 33, 14], [2, 2, 2, 2, 0]),
    "all": literal(chain(TEN, WRONG, LOWEST, 1.0), [*WRONG, 20], [2] * 10 + [0]),
    "a later token": literal(chain([5, 6, 7, 8], [9, 5, 7], SHIFT), [9, 6], [3, 0]),
    "an earlier token": literal(chain([5, 6, 5, 8], [5, 6, 9], SHIFT), [5, 6, 9, 8], [1, 1, 3, 0]),
    "the root is no draft": literal(chain([7, 6], [9], SHIFT), [7], [0]),
    "an invalid draft": literal(chain([5, -1, 7], [9, -1], LOWEST + SHIFT + WINDOW, 1.0), [9, -1], [2, 0]),
    "loosened before shifted": literal(chain([5, 6, 5, 8], [5, 9, 6], LOWEST + SHIFT, 0.7), [5, 9, 6, 8], [1, 2, 3, 0]),
    "a full window": literal(
        chain(TEN[:6], drafts_of_ten(2)[:5], WINDOW, window=3), [10, 31, 12, 13, 14, 15], [1, 2, 1, 1, 1, 0]),
    "no full window": literal(chain(TEN[:6], drafts_of_ten(3)[:5], WINDOW, window=3), [10, 11, 12], [1, 1, 0]),
    "the window's end": literal(chain(TEN, drafts_of_ten(10), WINDOW, window=1), TEN[:10], [1] * 9 + [0]),
    "a mismatch in the window": literal(chain(TEN, drafts_of_ten(2, 4), WINDOW, window=2), [10, 11], [1, 0]),
    "no window": literal(chain(TEN, WRONG, WINDOW, entropies=[0.3, 0.3, 0.2, *[0.3] * 8]), [30, 31, 12], [2, 2, 0]),
    "two branches: the longest": literal(pair([4], [9]), [*TEN[:8], 18], [1] * 8 + [0], [0, *range(2, 18, 2)]),
    "two branches: the more exact": literal(
        pair([4, 6], [5], rule=LOWEST, share=1.0), [*drafts_of_ten(5), 20], [1] * 4 + [2] + [1] * 5 + [0],
        [0, *range(2, 21, 2)]),
    "two branches: the first": literal(
        pair([4], [5], rule=LOWEST, share=1.0), [*drafts_of_ten(4), 20], [1] * 3 + [2] + [1] * 6 + [0],
        [0, *range(1, 21, 2)]),
    # Of one draft in the first branch and one in the second none is among floor(0.5), though 1 of both would be.
    "branches rank alone": literal(Request([-1, 0, 0], [5, 6, 7], [7, 8, 9], LOWEST, 0.5), [5], [0]),
    "branches shift alone": literal(
        Request(TREE, [5] * 7, [7, 8, 9, 5, 0, 0, 0], SHIFT), [8, 5, 5], [3, 1, 0], [0, 1, 3]),
    "a window on one of two ways": literal(
        Request(TREE, [5, 6, 7, 8, 9, 1, 2], [7, 0, 3, 0, 0, 7, 1], WINDOW, window=2), [3, 7, 1, 2], [2, 1, 1, 0],
        [0, 2, 5, 6]),
    "cut before the window's end": literal(
        Request(TREE, [5, 6, 7, 8, 9, 1], [7, 0, 3, 0, 0, 7], WINDOW, window=2), [5], [0]),
    "the root alone": literal(chain([5], [], 7, 1.0), [5], [0]),
    "no row": ((Request([-1], [], [], 7, 1.0)), [], [], []),
    # The floor: 0.7 of 10 is 7 though 0.7 is less in float32, and no share is rounded to the nearest.
    **{f"{share} of {n}": literal(
        chain(TEN[: n + 1], WRONG[:n], LOWEST, share), [*WRONG[:loose], TEN[loose]], [2] * loose + [0])
       for n, share, loose in ((10, 0.7, 7), (10, 0.3, 3), (10, 0.9, 9), (10, 0.75, 7), (3, 0.7, 2), (3, 0.3, 0),
                               (3, 0.9, 2), (3, 1.0, 3))},
}  # fmt: skip


@pytest.mark.parametrize(("in_trees", "is_loose"), MODES)
def test_hand_computed_steps(device, impl, in_trees, is_loose):
    """Each between two other requests, as a tree and, where it is one, as a chain; without a rule strictly and
    loosely."""
    rule = dict(rule=LOWEST, share=1.0) if is_loose else {}
    neighbour = Request(PAIR, [9] * 21, [9] * 21, **rule) if in_trees else chain([9] * 21, [9] * 20, **rule)
    names = [name for name, (request, *_) in LITERAL.items() if is_loose or not request.rule]
    if not in_trees:
        names = [name for name in names if LITERAL[name][0].tree == [*range(-1, len(LITERAL[name][0].tree) - 1)]]
    requests = [neighbour] + [request for name in names for request in (LITERAL[name][0], neighbour)]
    sampled, num_sampled, paths, kinds = accept_with(impl)(**pack(requests, 20, device, in_trees, is_loose))
    assert num_sampled[::2].tolist() == [11 if in_trees else 21] * (len(names) + 1)
    for i, name in enumerate(names):
        request, tokens, why, path = LITERAL[name]
        count, req_idx = len(path), 2 * i + 1
        assert accepted(request)[0] == path, name
        assert num_sampled[req_idx] == count, name
        assert sampled[req_idx].tolist() == tokens + [0] * (21 - count), name
        assert not in_trees or paths[req_idx].tolist() == path + list(range(count, 21)), name
        assert not is_loose or kinds[req_idx].tolist() == why + [0] * (21 - count), name


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
    check(accept_with(impl), requests, device, max_drafts, in_trees, is_loose)


@st.composite
def steps(draw):
    """Draw (requests, K, whether they are trees)."""
    max_drafts, in_trees = draw(st.integers(1, 12)), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rules = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    return [random_request(rng, max_drafts, in_trees, rule) for rule in rules], max_drafts, in_trees


@settings(max_examples=60, deadline=None)
@given(steps())
def test_any_step_equals_the_oracle(step):
    """Catches: any difference from the rules, on the smallest step that shows it."""
    requests, max_drafts, in_trees = step
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for impl in ("triton", "numba"):
        check(accept_with(impl), requests, device, max_drafts, in_trees)


def test_the_last_bit(device, impl):
    """Catches: node 64 of a star, whose bit is the sign, lost on its way or from its mismatches."""
    requests = []
    for tokens, rule, may, last in (
        ([9, 9], 0, [True] * 2, 0), ([9, 5], 0, [True] * 2, 64), ([9, 9], WINDOW, [False, True], 64),
        ([9, 9], WINDOW, [True] * 2, 63), ([9, 5], WINDOW, [True] * 2, 64),
    ):  # fmt: skip
        requests.append(Request([-1] + [0] * 64, [5] * 65, [7] + [-1] * 62 + tokens, rule, may=[True] * 63 + may))
        assert accepted(requests[-1])[0][-1] == last
    check(accept_with(impl), requests, device)
    check(accept_with(impl), requests[:2], device, is_loose=False)
    whole = chain([4] * 65, [4] * 64)
    for in_trees, is_loose in itertools.product((False, True), repeat=2):
        check(accept_with(impl), [whole, replace(whole, rule=7 * is_loose)], device, 64, in_trees, is_loose)


def test_missing_and_surplus_rows(device, impl):
    """Catches: a token for a request without rows; a write past the row or K where there are more rows than K + 1."""
    none, many = Request([-1], [], []), chain([4] * 4, [4] * 3)
    arguments = pack([none, many, none], 3, device, False, False)
    sampled, num_sampled, _, _ = accept_with(impl)(**arguments | {"max_drafts": 1})
    assert sampled.tolist() == [[0, 0], [4, 4], [0, 0]] and num_sampled.tolist() == [0, 2, 0]
    for in_trees, is_loose in itertools.product((False, True), repeat=2):
        arguments = pack([none], 2, device, in_trees, is_loose)
        sampled, num_sampled, path, kinds = accept_with(impl)(**arguments)
        assert sampled.tolist() == [[0, 0, 0]] and num_sampled.tolist() == [0]
        assert not in_trees or path.tolist() == [[0, 1, 2]]
        assert not is_loose or kinds.tolist() == [[0, 0, 0]]
        request = Request(TREE, [4] * 7, [9] * 7, LOWEST, 1.0) if is_loose else Request(TREE, [4] * 7, [4] * 7)
        arguments = pack([request], 6, device, in_trees, is_loose) | {"max_drafts": 2}
        sampled, num_sampled, path, kinds = accept_with(impl)(**arguments)
        depth, token = 1 if in_trees else 2, 9 if is_loose else 4
        assert num_sampled.tolist() == [depth + 1]
        assert sampled.tolist() == [[token] * depth + [4] + [0] * (2 - depth)]
        assert not in_trees or path.tolist() == [[0, 1, 2]]
        assert not is_loose or kinds.tolist() == [[2] * depth + [0] * (3 - depth)]
