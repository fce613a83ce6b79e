"""tree_place: one level of static trees, kernel and reference against a loop."""

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.tree_buffers import make_tables
from vidspec_kernels import PlacedLevel, tree_place


def make_inputs(num_reqs, frontier, num_candidates, num_placed, num_fed, device):
    """A level that takes some of the candidates, in any order, and what is offered."""
    generator = torch.Generator().manual_seed(num_placed)
    offered = torch.randint(0, 999, (num_reqs * frontier, num_candidates), generator=generator)
    sources = torch.randperm(frontier * num_candidates, generator=generator)[:num_placed]
    nodes = torch.randperm(64, generator=generator)[:num_placed] + 1
    fed_tokens = torch.full((num_reqs + 1, num_fed), 77)
    tensors = (sources, nodes, sources.flip(0)[:num_fed].clone(), fed_tokens)
    return PlacedLevel(*(tensor.to(device) for tensor in tensors)), offered.to(device)


@pytest.mark.parametrize("impl", ["triton", "torch", "numba"])
@pytest.mark.parametrize(
    ("num_reqs", "frontier", "num_candidates", "num_placed", "num_fed"),
    [(0, 1, 4, 2, 1), (1, 1, 1, 1, 0), (3, 4, 5, 9, 4), (2, 10, 64, 64, 33)],
)
def test_equals_the_loop(device, impl, num_reqs, frontier, num_candidates, num_placed, num_fed):
    """Catches: another request's candidate, a rank for a place, nodes or rows touched that are not the level's."""
    tree = make_tables(num_reqs + 1, 64, device)
    level, offered = make_inputs(num_reqs, frontier, num_candidates, num_placed, num_fed, device)
    tree_place(tree, level, num_reqs, offered, impl=impl)
    sources, nodes, fed = level.sources.tolist(), level.nodes.tolist(), level.fed_sources.tolist()
    for row in range(num_reqs):
        own = offered[row * frontier : (row + 1) * frontier].flatten().tolist()
        expected = [77] * 65
        for source, node in zip(sources, nodes, strict=True):
            expected[node] = own[source]
        assert tree.tokens[row].tolist() == expected
        assert level.fed_tokens[row].tolist() == [own[source] for source in fed]
    assert (tree.tokens[num_reqs] == 77).all() and (level.fed_tokens[num_reqs] == 77).all()
    assert all((table == 77).all() for table in tree.tensors[1:])


@pytest.mark.parametrize("impl", ["auto", "triton", "numba", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_place")
    level, offered = make_inputs(1, 1, 2, 1, 1, device)
    tree_place(make_tables(1, 64, device), level, 1, offered, impl=impl)
    assert ran == [branch(impl, device)]


def test_wrapper_refuses(device):
    """Catches: a dropped check."""
    tree, (level, offered) = make_tables(2, 64, device), make_inputs(2, 2, 3, 2, 1, device)
    tree_place(tree, level, 2, offered)
    for arguments, message in (
        ((3, offered), "3 requests, 2 fit"),
        ((2, offered.int()), "token_ids"),
        ((2, offered.t().contiguous().t()), "token_ids: expected contiguous"),
        ((2, offered[:3]), "token_ids: 3 rows of 2 requests"),
    ):
        with pytest.raises(AssertionError, match=message):
            tree_place(tree, level, *arguments)
