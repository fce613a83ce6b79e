"""Requests for `accept`: how they become its arguments, and the oracle that walks over all paths of plain lists."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from vidspec_kernels import LOWEST, SHIFT, WINDOW, Looseness, Tally, TreeShapes, accept

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


def single(value):
    return float(np.float32(value))


def way(tree, node):
    """The nodes from a child of the root down to this one."""
    return [*way(tree, tree[node]), node] if node else []


def judge(request):
    """The kind of each row's draft, 0 for those that do not stand."""
    tree, target, fed = request.tree, request.target, request.fed
    nodes = range(1, len(target))
    branch = [0] + [way(tree, node)[0] for node in nodes]
    exact = {node: fed[node] >= 0 and fed[node] == target[tree[node]] for node in nodes}

    def some_match_below(node, levels):
        children = [child for child in nodes if tree[child] == node and exact[child]]
        return levels == 0 or any(some_match_below(child, levels - 1) for child in children)

    kinds = [0] * len(target)
    for node in nodes:
        expected = target[tree[node]]
        peers = [peer for peer in nodes if fed[peer] >= 0 and branch[peer] == branch[node]]
        if exact[node]:
            kinds[node] = 1
        elif request.may[node] and node in peers:
            ranked = sorted(
                (INF if math.isnan(request.scores[peer]) else single(request.scores[peer]), peer) for peer in peers
            )
            loose = [peer for _, peer in ranked[: math.floor(single(request.share) * len(peers) + 1e-4)]]
            unsure = single(request.entropies[tree[node]]) > single(MIN_ENTROPY)
            in_loose_set = request.rule & LOWEST and node in loose
            in_window = request.rule & WINDOW and unsure and some_match_below(node, request.window)
            if in_loose_set or in_window:
                kinds[node] = 2
            elif request.rule & SHIFT and expected in [fed[peer] for peer in peers]:
                kinds[node] = 3
    return kinds


def accepted(request):
    """The nodes of the best path of those whose drafts all stand, and the kinds of all nodes."""
    if not request.target:
        return [], []
    kinds = judge(request)
    paths = [[0, *way(request.tree, node)] for node in range(len(request.target))]
    standing = [path for path in paths if all(kinds[node] for node in path[1:])]
    return min(standing, key=lambda path: (-len(path), sum(kinds[node] != 1 for node in path[1:]), path[-1])), kinds


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


def tally_of(arguments, has_draft, max_drafts, wants_kinds=True, keeps=True):
    """A tally for packed arguments, over what is there already."""
    device, num_reqs = arguments["target_tokens"].device, len(arguments["cu_num_logits"]) - 1
    given = arguments["trees"] or arguments["looseness"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(num_reqs + 3, generator=generator)[:num_reqs].to(device) if given is None else given.rows
    real = torch.zeros(num_reqs + 3, dtype=torch.bool, device=device)
    real[rows] = torch.tensor(has_draft, dtype=torch.bool, device=device)
    return Tally(
        rows, real, torch.arange(NUM_SUMS + max_drafts, device=device) << 33,
        torch.full((num_reqs, 3), GARBAGE, device=device) if wants_kinds else None,
        torch.full((num_reqs + 3, max_drafts + 2), GARBAGE, dtype=torch.int32, device=device) if keeps else None,
        torch.full((num_reqs + 3,), GARBAGE, dtype=torch.int32, device=device) if keeps else None,
    )  # fmt: skip


def case(device, in_trees=True, is_loose=True, num_reqs=16, max_drafts=8):
    """Random requests, counted; every third has no real drafts."""
    arguments = pack(random_requests(num_reqs, max_drafts, in_trees, is_loose), max_drafts, device, in_trees, is_loose)
    return accept, arguments | {"tally": tally_of(arguments, [i % 3 > 0 for i in range(num_reqs)], max_drafts)}


def check(impl, requests, device, max_drafts=None, in_trees=True, is_loose=True):
    max_drafts = max_drafts if max_drafts is not None else max(1, *(len(request.tree) - 1 for request in requests))
    sampled, num_sampled, path, kinds = accept(**pack(requests, max_drafts, device, in_trees, is_loose), impl=impl)
    assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
    assert sampled.shape == (len(requests), max_drafts + 1) and num_sampled.shape == (len(requests),)
    for given, name, dtype in ((in_trees, path, torch.int32), (is_loose, kinds, torch.int8)):
        assert name is None if not given else name.dtype == dtype and name.shape == sampled.shape
    for req_idx, request in enumerate(requests):
        nodes, kind = accepted(request)
        rest = [0] * (max_drafts + 1 - len(nodes))
        emitted = [request.fed[node] for node in nodes[1:]] + [request.target[node] for node in nodes[-1:]]
        assert num_sampled[req_idx] == len(nodes)
        assert sampled[req_idx].tolist() == emitted + rest
        if in_trees:
            assert path[req_idx].tolist() == nodes + list(range(len(nodes), max_drafts + 1))
        if is_loose:
            assert kinds[req_idx].tolist() == [kind[node] for node in nodes[1:]] + [0] * len(nodes[:1]) + rest


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


def random_requests(num_reqs, max_drafts, in_trees=True, is_loose=True, seed=0):
    """Requests with all eight rules in turn, or with none."""
    rng = np.random.default_rng(seed)
    return [random_request(rng, max_drafts, in_trees, i % 8 * is_loose) for i in range(num_reqs)]
