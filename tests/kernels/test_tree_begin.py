"""tree_begin: trees made anew, frontiers of roots, and history, kernel and reference against plain loops."""

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.tree_buffers import RULES, everything, make_growth, make_tables, make_template
from vidspec_kernels import tree_begin

BOTH = pytest.mark.parametrize("impl", ["triton", "torch", "numba"])


@BOTH
@pytest.mark.parametrize(("num_reqs", "max_nodes"), [(0, 5), (1, 1), (3, 7), (2, 64)])
def test_trees_become_their_template(device, impl, num_reqs, max_nodes):
    """Catches: the root's token or another request's row touched, a column or the last node forgotten."""
    tree, template = make_tables(num_reqs + 1, max_nodes, device), make_template(max_nodes, device, num_nodes=4)
    tree_begin(tree, template, num_reqs, impl=impl)
    for row in range(num_reqs):
        assert tree.tokens[row].tolist() == [77] + [-1] * max_nodes and tree.num_nodes[row] == 4
        for table, own in zip(tree.tensors[1:5], template.tensors, strict=True):
            assert torch.equal(table[row], own)
    assert all((table[num_reqs] == 77).all() for table in tree.tensors)


@BOTH
@pytest.mark.parametrize("window", [0, 1, 3, 4, 10])
def test_frontiers_and_history(device, impl, window):
    """Against lists of lengths. Catches: a window of another size, a mean over places that are empty, a length that is
    not told counted, a maximum depth beyond its bounds, the thresholds themselves, candidates of the last step left."""
    rules = RULES._replace(history=window)
    tree = make_tables(5, 6, device)
    growth, lengths, depths = make_growth(tree, rules, max_parents=300), [[] for _ in range(6)], [7] * 6
    generator = torch.Generator().manual_seed(window)
    for _ in range(15):
        rows = torch.randperm(5, generator=generator)[:4]
        told = torch.randint(-1, 5, (4,), generator=generator, dtype=torch.int32)
        for row, length in zip(rows.tolist(), told.tolist(), strict=True):
            if length >= 0 and window:
                lengths[row] = [*lengths[row], length][-window:]
                mean = sum(lengths[row]) / len(lengths[row])
                depths[row] = min(max(depths[row] + (mean > 2.5) - (mean < 1.5), 2), 7)
        for tensor in (*growth.frontier, *growth.leftover):
            tensor.fill_(-5)
        tree_begin(tree, make_template(6, device), 4, growth, rows.to(device), told.to(device), impl=impl)
        assert growth.plans.max_depths.tolist() == depths
        assert not growth.frontier_nodes[:4, 0].any() and not growth.frontier_log_probs[:4, 0].any()
        assert growth.leftover_log_probs[:4].isneginf().all() and (growth.leftover_log_probs[4] == -5).all()
    assert (growth.frontier_nodes[:, 1:] == -5).all() and (growth.frontier_nodes[4] == -5).all()


@BOTH
def test_padding_rows_touch_nothing(device, impl):
    """Rows `max_num_reqs`, several of them: no request's history moves. Catches: a table without a row for them."""
    tree = make_tables(6, 5, device)
    growth = make_growth(tree)
    before = [table.clone() for table in growth.plans.observed]
    rows = torch.tensor([6, 2, 6, 6], device=device)
    tree_begin(tree, make_template(5, device), 4, growth, rows, torch.tensor([-1, 0, -1, 3], device=device).int(),
               impl=impl)  # fmt: skip
    for table, old in zip(growth.plans.observed, before, strict=True):
        others = [0, 1, 3, 4, 5]
        assert torch.equal(table[others], old[others]) and len(table) == 7
    assert growth.plans.num_told[2] == 1 and growth.plans.max_depths[2] == 6


def test_kernel_equals_reference_at_a_real_size(device):
    """Catches: a kernel and a reference that differ in anything, at 33 requests and 720 candidates."""
    results = []
    for impl in ("triton", "torch", "numba"):
        where = device if impl == "triton" else torch.device("cpu")
        tree = make_tables(40, 64, where)
        growth = make_growth(tree, max_parents=71, num_candidates=10)
        rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:33].to(where)
        for step in range(3):
            told = torch.randint(-1, 5, (33,), generator=torch.Generator().manual_seed(step)).int().to(where)
            tree_begin(tree, make_template(64, where), 33, growth, rows, told, impl=impl)
        results.append(everything(tree, growth))
    assert all(torch.equal(found, same[0]) for same in zip(*results, strict=True) for found in same)


@pytest.mark.parametrize("impl", ["auto", "triton", "numba", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_begin")
    tree_begin(make_tables(1, 3, device), make_template(3, device), 1, impl=impl)
    assert ran == [branch(impl, device)]


def test_wrapper_refuses(device):
    """Catches: a dropped check."""
    tree, template = make_tables(2, 3, device), make_template(3, device)
    growth, rows, told = make_growth(tree), torch.tensor([1], device=device), torch.zeros(1, device=device).int()
    tree_begin(tree, template, 1, growth, rows, told)
    for arguments, message in (
        ((tree, template, 3), "3 requests, 2 fit"),
        ((tree, make_template(4, device), 1), "template: 5 columns"),
        ((tree, template, 1, growth), "rows, num_accepted: None"),
        ((tree, template, 1, growth, rows.int(), told), "rows"),
        ((tree, template, 1, growth, rows, told.long()), "num_accepted"),
        ((tree, template, 2, growth, rows, told), "1 rows, 1 lengths, 2"),
    ):
        with pytest.raises(AssertionError, match=message):
            tree_begin(*arguments)
