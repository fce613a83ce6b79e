"""accept's tally: totals, counts by kind and what is kept of each row, against plain sums over the oracle's paths."""

import numpy as np
import pytest
import torch

from tests.kernels.accept_requests import (
    GARBAGE,
    MODES,
    NUM_SUMS,
    Request,
    accepted,
    pack,
    random_requests,
    tally_of,
    way,
)
from vidspec_kernels import accept


def sums_of(request, max_drafts, is_real):
    """What one request adds to the totals, by the oracle."""
    nodes, kinds = accepted(request)
    drafts = range(1, len(request.target)) if is_real else ()
    on_path = [kinds[node] for node in nodes[1:]] if len(drafts) else []
    depth = max((len(way(request.tree, node)) for node in drafts), default=0)
    kinds_of = [on_path.count(kind) for kind in (1, 2, 3)]
    at_depth = [int(place < len(on_path)) for place in range(max_drafts)]
    return [int(bool(drafts)), len(drafts), len(on_path), depth, *kinds_of, *at_depth]


def check_tally(impl, requests, device, max_drafts, in_trees, is_loose, has_draft, **wishes):
    """Assert that `accept` counts and keeps what the oracle says, and touches nothing else."""
    arguments = pack(requests, max_drafts, device, in_trees, is_loose)
    tally = tally_of(arguments, has_draft, max_drafts, **wishes)
    before = tally.totals.clone()
    results = accept(**arguments, tally=tally, impl=impl)
    plain = accept(**arguments, impl="numba")
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(results, plain, strict=True))
    sums = np.array(
        [sums_of(request, max_drafts, real) for request, real in zip(requests, has_draft, strict=True)]
    ).reshape(len(requests), NUM_SUMS + max_drafts)
    assert (tally.totals - before).tolist() == sums.sum(0).tolist()
    if tally.by_kind is not None:
        assert tally.by_kind.tolist() == sums[:, 4:7].tolist()
    if tally.path is None:
        return
    rows = tally.rows.tolist()
    for row in range(len(requests) + 3):
        if row not in rows:
            assert (tally.path[row] == GARBAGE).all() and tally.num_accepted[row] == GARBAGE
            continue
        nodes = accepted(requests[rows.index(row)])[0]
        path = nodes + list(range(len(nodes), max_drafts + 1)) if in_trees else list(range(max_drafts + 1))
        assert tally.path[row].tolist() == [*path, GARBAGE]
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
