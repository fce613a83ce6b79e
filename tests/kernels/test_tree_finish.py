"""tree_finish: numbers of nodes, leaves and adopted plans, kernel and reference against sorting."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.tree_buffers import everything, make_growth, make_tables
from vidspec_kernels import Leaves, tree_finish

BOTH = pytest.mark.parametrize("impl", ["triton", "torch", "numba"])


def make_chains(num_reqs, max_nodes, num_nodes, device):
    """Tables whose row r is a chain of `num_nodes[r]` nodes, garbage behind."""
    tree = make_tables(num_reqs, max_nodes, device)
    for row, count in enumerate(num_nodes):
        words = [(1 << node) - 1 for node in range(count + 1)]
        tree.parents[row, : count + 1] = torch.arange(-1, count)
        tree.depths[row, : count + 1] = torch.arange(count + 1)
        tree.ancestors[row, : count + 1] = torch.tensor([word - (word >> 63 << 64) for word in words])
        tree.tokens[row, : count + 1] = 9_000 + torch.arange(count + 1)
        tree.log_probs[row, : count + 1] = 0.0
        tree.num_nodes[row] = count
    return tree


def make_leaves(num_reqs, num_parents, num_candidates, device, seed=0, lowest=9):
    """Candidates with many ties, some that are none, rows apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_reqs, num_parents + 2, num_candidates)
    log_probs = -torch.randint(0, lowest, shape, generator=generator) / 4
    log_probs[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
    log_probs[torch.rand(shape, generator=generator) < 0.1] = torch.nan
    tokens = torch.randint(0, 99, shape, generator=generator)
    parents = torch.randint(0, 3, shape[:2], generator=generator)
    return Leaves(*(part.to(device)[:, :num_parents] for part in (log_probs, tokens, parents)))


def row_of(tree, row):
    """Return (token, parent, depth, mask, log-probability) of a row's nodes."""
    columns = [table[row, : int(tree.num_nodes[row]) + 1].tolist() for table in tree.tensors[:5]]
    return [list(node) for node in zip(*columns, strict=True)]


def filled_by_sorting(nodes, leaves, row, max_nodes):
    """Return a row's nodes and the leaves that it must get."""
    log_probs, tokens, parents = (part[row].tolist() for part in (leaves.log_probs, leaves.token_ids, leaves.parents))
    ranked = sorted(
        (-value, place, rank)
        for place, values in enumerate(log_probs)
        for rank, value in enumerate(values)
        if value > -float("inf")
    )
    nodes = list(nodes)
    for negated, place, rank in ranked:
        if len(nodes) > max_nodes:
            break
        _, _, depth, word, _ = nodes[parents[place]]
        bit = 1 << (len(nodes) - 1)
        nodes.append([tokens[place][rank], parents[place], depth + 1, word | (bit - (bit >> 63 << 64)), -negated])
    return nodes


@BOTH
@pytest.mark.parametrize(
    ("num_nodes", "num_parents", "num_candidates", "max_nodes", "width"),
    [
        ([2, 3], 1, 1, 3, 3),
        ([2, 5, 7], 3, 5, 7, 9),
        ([40, 64], 9, 10, 64, 64),
        ([4], 30, 10, 64, 64),  # several turns of sorting
        ([2], 3, 3, 64, 64),  # candidates run out
    ],
)
def test_leaves_are_the_best_candidates(device, impl, num_nodes, num_parents, num_candidates, max_nodes, width):
    """Catches: an order other than by probability then index, a budget exceeded or not met, -inf or NaN taken, node
    64's bit, another request's candidate, what lies past the leaves touched."""
    num_reqs = len(num_nodes)
    tree = make_chains(num_reqs + 1, width, num_nodes, device)
    leaves = make_leaves(num_reqs, num_parents, num_candidates, device, seed=max_nodes)
    expected = [filled_by_sorting(row_of(tree, row), leaves, row, max_nodes) for row in range(num_reqs)]
    before = everything(tree)
    tree_finish(tree, num_reqs, leaves=leaves, max_nodes=max_nodes, impl=impl)
    for row, nodes in enumerate(expected):
        assert row_of(tree, row) == nodes
        for table, old in zip(tree.tensors[:5], before, strict=False):
            assert torch.equal(table[row, len(nodes) :].cpu(), old[row, len(nodes) :])
    assert all((table[num_reqs] == 77).all() for table in tree.tensors)


@BOTH
@pytest.mark.parametrize("fills", [False, True])
def test_counts_and_adopts(device, impl, fills):
    """Catches: the number of the step before, a plan adopted by the wrong row or by requests that are not there."""
    tree = make_chains(4, 8, [3, 5, 8], device)
    growth = make_growth(tree)
    plans, rows = growth.plans, torch.tensor([3, 0, 4], device=device)  # 4: padding
    growth.next_free[:] = torch.tensor([4, 6, 9, 1])
    tree.num_nodes.fill_(1)
    for place, tensor in enumerate(plans.adopted):
        tensor[:] = 10 * place + torch.arange(len(tensor), device=device)
    tree_finish(
        tree, 3, next_free=growth.next_free, leaves=make_leaves(3, 4, 6, device) if fills else None, max_nodes=8,
        plans=plans, rows=rows, impl=impl,
    )  # fmt: skip
    assert tree.num_nodes.tolist() == ([8, 8, 8, 1] if fills else [3, 5, 8, 1])
    assert plans.confidence.tolist() == [1.0, 31.0, 32.0, 0.0, 2.0]
    assert plans.depths.tolist() == [11, 41, 42, 10, 12] and plans.widths.tolist() == [21, 51, 52, 20, 22]


@pytest.mark.parametrize("impl", ["auto", "triton", "numba", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_finish")
    tree_finish(make_chains(1, 3, [1], device), 1, impl=impl)
    assert ran == [branch(impl, device)]


def test_wrapper_refuses(device):
    """Catches: a dropped check."""
    tree = make_chains(2, 4, [2, 2], device)
    good, rows, plans = make_leaves(2, 3, 4, device), torch.tensor([1, 0], device=device), make_growth(tree).plans
    tree_finish(tree, 2, leaves=good, max_nodes=4, plans=plans, rows=rows)
    for arguments, message in (
        (dict(num_reqs=3), "3 requests, 2 fit"),
        (dict(next_free=rows.int()), "next_free"),
        (dict(leaves=good, max_nodes=5), "max_nodes 5, 4 fit"),
        (dict(num_reqs=1, leaves=good), "leaves: of 2 requests, not 1"),
        (dict(plans=plans), "rows: None"),
        (dict(plans=plans, rows=rows[:1]), "1 rows, 2 requests"),
    ):
        with pytest.raises(AssertionError, match=message):
            tree_finish(tree, **{"num_reqs": 2, **arguments})
    for wrong, message in (
        (dict(log_probs=good.log_probs.double()), "log_probs"),
        (dict(token_ids=good.token_ids[:1]), "token_ids: expected shape"),
        (dict(token_ids=good.token_ids.contiguous()), "token_ids: another stride"),
        (dict(parents=good.parents.int()), "parents"),
        (dict(parents=good.parents.t().contiguous().t()), "parents: expected contiguous"),
    ):
        with pytest.raises(AssertionError, match=message):
            replace(good, **wrong)
