"""accept: literal steps, counted and kept; kernel against loop; special cases."""

import itertools
from dataclasses import replace

import pytest

from tests.kernels import accept_requests
from tests.kernels.accept_requests import INF, MODES, NAN, Request, chain, check, pack
from tests.kernels.agreement import agree
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


def star(last, rule=0, may=(True, True)):
    """64 drafts at the root, of which the last two are some."""
    return Request([-1] + [0] * 64, [5] * 65, [7] + [-1] * 62 + last, rule, may=[True] * 63 + [*may])


def tree(target, fed, nodes):
    """A strict step of TREE, by the nodes that stand."""
    return Request(TREE, target, fed), [target[node] for node in nodes], [1] * (len(nodes) - 1) + [0], nodes


# What pins kernel and loop, a rule each.
LITERAL = {
    "without rows": literal(Request([-1], [], []), [], []),
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


# Node 64 of a star, whose bit is the sign; a node past 32 with a sibling before it.
LARGE = {
    "strict, none": literal(star([9, 9]), [5], [0], [0]),
    "strict, the last": literal(star([9, 5]), [5, 5], [1, 0], [0, 64]),
    "loose, the last": literal(star([9, 9], WINDOW, [False, True]), [9, 5], [2, 0], [0, 64]),
    "loose, the lower": literal(star([9, 9], WINDOW), [9, 5], [2, 0], [0, 63]),
    "the more exact": literal(star([9, 5], WINDOW), [5, 5], [1, 0], [0, 64]),
    "a window past 32": literal(
        Request([*range(-1, 38), 38, 38, 40, 41], [4] * 43, [7, *[4] * 38, 9, 8, 4, 4], WINDOW, window=2),
        [*[4] * 38, 8, 4, 4, 4], [*[1] * 38, 2, 1, 1, 0], [*range(39), 40, 41, 42]),
}  # fmt: skip


@pytest.mark.parametrize(("in_trees", "is_loose"), MODES)
def test_hand_computed_steps(device, impl, in_trees, is_loose):
    """Each as a tree and, where it is one, as a chain; without a rule strictly and loosely."""
    chosen = {name: entry for name, entry in LITERAL.items() if is_loose or not entry[0].rule}
    if not in_trees:
        chosen = {
            name: entry for name, entry in chosen.items() if entry[0].tree == [*range(-1, len(entry[0].tree) - 1)]
        }
    check(impl, chosen, device, 10, in_trees, is_loose)


# The kernel has a column for each of 2, 4, 8, ... 64 drafts; strict chains may have none.
@pytest.mark.parametrize(
    ("num_reqs", "max_drafts"), [(0, 8), (1, 8), (16, 0), (16, 1), (16, 8), (16, 9), (16, 25), (16, 64)]
)
@pytest.mark.parametrize(("in_trees", "is_loose"), MODES)
def test_equals_the_loop(device, in_trees, is_loose, num_reqs, max_drafts):
    """Catches: powers of two, ragged bounds, settings read by batch row, garbage of nodes without a row; placeholders
    or padding counted, totals replaced, writes beyond rows or columns; what nobody asks for."""
    if max_drafts == 0 and (in_trees or is_loose):
        with pytest.raises(AssertionError, match="max_drafts 0"):
            accept(**pack([], 0, device, in_trees, is_loose))
        return
    for wishes in (dict(counts=False), {}, dict(keeps=False)):
        agree(accept_requests.case, device, in_trees, is_loose, num_reqs, max_drafts, **wishes)


def test_the_last_bit(device, impl):
    """Catches: a sign bit lost on its way or from its node's mismatches; words that are cut elsewhere than at 32."""
    check(impl, LARGE, device, 64)
    check(impl, {name: LARGE[name] for name in LARGE if "strict" in name}, device, 64, is_loose=False)
    whole, *expected = literal(chain([4] * 65, [4] * 64), [4] * 65, [1] * 64 + [0])
    for in_trees, is_loose in itertools.product((False, True), repeat=2):
        both = {rule: (replace(whole, rule=rule), *expected) for rule in (0, 7 * is_loose)}
        check(impl, both, device, 64, in_trees, is_loose)
