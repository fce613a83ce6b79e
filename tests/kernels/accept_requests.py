"""Requests for `accept`: how they become its arguments, and what is said of their steps."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from vidspec_kernels import Looseness, Tally, TreeShapes, accept

# Whether drafts are trees, and whether some may stand loosely.
MODES = [
    pytest.param(False, False, id="strict chains"), pytest.param(True, False, id="strict trees"),
    pytest.param(False, True, id="loose chains"), pytest.param(True, True, id="loose trees"),
]  # fmt: skip
MIN_ENTROPY = 0.2  # as float32 it is larger than it is here
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Request:
    """A request's step: its tree as parents (the root's -1) and, for each of its rows, what it holds."""

    tree: list[int]
    target: list[int]
    fed: list[int]
    rule: int = 0
    share: float = 0.0
    window: int = 0
    scores: list[float] = field(default_factory=list)  # by default those of the nodes' order
    entropies: list[float] = field(default_factory=list)  # by default all high
    may: list[bool] = field(default_factory=list)  # by default all true

    def __post_init__(self):
        num_rows = len(self.target)
        for name, default in (
            ("scores", [*range(num_rows)]), ("entropies", [9.0] * num_rows), ("may", [True] * num_rows),
        ):  # fmt: skip
            object.__setattr__(self, name, getattr(self, name) or default)
            assert len(getattr(self, name)) == num_rows == len(self.fed) <= len(self.tree)


def chain(target, drafts, rule=0, share=0.0, **rest):
    return Request([*range(-1, len(target) - 1)], target, [7, *drafts], rule, share, **rest)


def way(tree, node):
    """The nodes from a child of the root down to this one."""
    return [*way(tree, tree[node]), node] if node else []


def word(bits):
    """The bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits


def pack(requests, max_drafts, device, in_trees=True, is_loose=True):
    """The wrapper's arguments by name; settings and tables in shuffled rows, garbage where none is."""
    max_reqs = len(requests) + 3
    generator = torch.Generator().manual_seed(len(requests))
    rows = torch.randperm(max_reqs, generator=generator)[: len(requests)]
    parents, depths, ancestors = torch.randint(-9, 9, (3, max_reqs, max_drafts + 3), generator=generator)
    # Small, so that garbage depths are some node's; with zeros, which nothing contradicts.
    ancestors *= parents > 0
    ancestors[:, 0] = 0
    rules, windows = torch.randint(0, 8, (2, max_reqs), generator=generator)
    shares = torch.rand(max_reqs, generator=generator)
    for row, request in zip(rows.tolist(), requests, strict=True):
        assert is_loose or not request.rule
        rules[row], shares[row], windows[row] = request.rule, request.share, request.window
        for node in range(1, len(request.tree)):
            above = way(request.tree, node)
            parents[row, node], depths[row, node] = request.tree[node], len(above)
            ancestors[row, node] = word(sum(1 << (other - 1) for other in above))

    def rows_of(name, dtype):
        return torch.tensor([x for request in requests for x in getattr(request, name)], dtype=dtype, device=device)

    rows, bounds = rows.to(device), np.cumsum([0, *(len(request.target) for request in requests)]).tolist()
    looseness = Looseness(
        rows, rules.int().to(device), shares.to(device), windows.int().to(device), rows_of("scores", torch.float32),
        rows_of("entropies", torch.float32), rows_of("may", torch.bool), MIN_ENTROPY,
    )  # fmt: skip
    trees = TreeShapes(rows, parents.int().to(device), depths.int().to(device), ancestors.to(device))
    return dict(
        target_tokens=rows_of("target", torch.int64),
        draft_tokens=rows_of("fed", torch.int32),
        cu_num_logits=torch.tensor(bounds, dtype=torch.int32, device=device),
        max_drafts=max_drafts,
        trees=trees if in_trees else None,
        looseness=looseness if is_loose else None,
    )


NUM_SUMS, GARBAGE = 7, 77


def tally_of(arguments, has_draft, max_drafts, keeps=True):
    """A tally for packed arguments, over what is there already."""
    device, num_reqs = arguments["target_tokens"].device, len(arguments["cu_num_logits"]) - 1
    given = arguments["trees"] or arguments["looseness"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(num_reqs + 3, generator=generator)[:num_reqs].to(device) if given is None else given.rows
    real = torch.zeros(num_reqs + 3, dtype=torch.bool, device=device)
    real[rows] = torch.tensor(has_draft, dtype=torch.bool, device=device)
    return Tally(
        rows, real, torch.arange(NUM_SUMS + max_drafts, device=device) << 33,
        torch.full((num_reqs + 3, max_drafts + 2), GARBAGE, dtype=torch.int32, device=device) if keeps else None,
        torch.full((num_reqs + 3,), GARBAGE, dtype=torch.int32, device=device) if keeps else None,
    )  # fmt: skip


def case(device, in_trees=True, is_loose=True, num_reqs=16, max_drafts=8, counts=True, **wishes):
    """Random requests, counted or not; every third has no real drafts."""
    arguments = pack(random_requests(num_reqs, max_drafts, in_trees, is_loose), max_drafts, device, in_trees, is_loose)
    tally = tally_of(arguments, [i % 3 > 0 for i in range(num_reqs)], max_drafts, **wishes) if counts else None
    return accept, arguments | {"tally": tally}


def counted(request, kinds, max_drafts, is_real):
    """What a request adds to the totals, whose emitted tokens are of these kinds."""
    drafts, accepted = (range(1, len(request.target)), kinds[:-1]) if is_real else ((), [])
    deepest = max((len(way(request.tree, node)) for node in drafts), default=0)
    at_depth = [int(place < len(accepted)) for place in range(max_drafts)]
    return [int(bool(drafts)), len(drafts), len(accepted), deepest, *map(accepted.count, (1, 2, 3)), *at_depth]


def check(impl, literals, device, max_drafts, in_trees=True, is_loose=True):
    """Assert of (request, its tokens, their kinds, its path) by name that these are returned, counted and kept."""
    requests, has_draft = [request for request, *_ in literals.values()], [i % 3 > 0 for i in range(len(literals))]
    arguments = pack(requests, max_drafts, device, in_trees, is_loose)
    tally = tally_of(arguments, has_draft, max_drafts)
    rows, before, sums = tally.rows.tolist(), tally.totals.clone(), []
    results = sampled, num_sampled, paths, kinds = accept(**arguments, tally=tally, impl=impl)
    dtypes = [torch.int64, torch.int32, torch.int32 if in_trees else None, torch.int8 if is_loose else None]
    assert [part if part is None else part.dtype for part in results] == dtypes
    for i, (name, (request, tokens, why, path)) in enumerate(literals.items()):
        rest, whole = [0] * (max_drafts + 1 - len(path)), path + list(range(len(path), max_drafts + 1))
        assert num_sampled[i] == len(path) and sampled[i].tolist() == tokens + rest, name
        assert not in_trees or paths[i].tolist() == whole, name
        assert not is_loose or kinds[i].tolist() == why + rest, name
        sums.append(counted(request, why, max_drafts, has_draft[i]))
        assert tally.path[rows[i]].tolist() == [*whole, GARBAGE] and tally.num_accepted[rows[i]] == len(path) - 1, name
    assert (tally.totals - before).tolist() == np.sum(sums, axis=0).tolist()
    others = [row for row in range(len(tally.path)) if row not in rows]
    assert (tally.path[others] == GARBAGE).all() and (tally.num_accepted[others] == GARBAGE).all()


def random_tree(rng, max_drafts):
    """Two long branches, or any tree between a star and a chain."""
    reach = int(rng.integers(1, 6))
    if reach == 5:
        return [-1] + [max(0, i - 2) for i in range(1, max_drafts + 1)]
    # A node hangs on one of the last `reach` nodes, on any for 4.
    return [-1] + [int(rng.integers(0 if reach == 4 else max(0, i - reach), i)) for i in range(1, max_drafts + 1)]


def random_request(rng, max_drafts, in_trees, rule):
    """A tree or chain of 0 to K + 1 rows, of few tokens, scores and entropies: most drafts stand, many scores tie."""
    tree = random_tree(rng, max_drafts) if in_trees else [*range(-1, max_drafts)]
    num_rows = max_drafts + 1 if rng.random() < 0.7 else int(rng.integers(0, max_drafts + 2))
    target = rng.integers(0, 5, max_drafts + 1).tolist()
    fed = [7] + [target[tree[i]] for i in range(1, max_drafts + 1)]
    # Without a rule a mismatch ends a path: fewer of them, or all paths are short.
    for i in range(1, max_drafts + 1):
        if rng.random() < (0.3 if rule else 0.15):
            fed[i] = int(rng.integers(-1, 5))
    return Request(
        tree[: max(num_rows, 1)] if rng.random() < 0.5 else tree, target[:num_rows], fed[:num_rows], rule,
        float(rng.choice([0, 0.3, 0.5, 0.7, 0.9, 1])), int(rng.choice([0, 1, 2, 4, 99])),
        rng.choice([0, -0.0, 0.25, 0.5, 1, NAN, INF, -INF], num_rows).tolist(),
        rng.choice([0.1, MIN_ENTROPY, 0.3, 1, NAN], num_rows).tolist(), (rng.random(num_rows) < 0.9).tolist(),
    )  # fmt: skip


def random_requests(num_reqs, max_drafts, in_trees, is_loose):
    """Requests with all eight rules in turn, or with none."""
    rng = np.random.default_rng(0)
    return [random_request(rng, max_drafts, in_trees, i % 8 * is_loose) for i in range(num_reqs)]
