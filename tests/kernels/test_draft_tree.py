"""Launches of draft trees but their growth: kernel, loop and reference against loops, formulas and sorting."""

import math

import pytest
import torch

import vidspec_kernels as kernels
from tests.kernels.agreement import agree
from vidspec_kernels import Leaves, PlacedLevel, TreePlans, tree_begin, tree_finish, tree_place, tree_plan

RULES = kernels.PlanRules(depth_min=2, depth_max=7, width_min=2, width_max=6, top_k=5, history=3, history_low=1.5,
                  history_high=2.5)  # fmt: skip


def make_tables(num_reqs, max_nodes, device):
    """Tables full of garbage."""
    shape = (num_reqs, max_nodes + 1)
    dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.float32)
    tables = (torch.full(shape, 77, dtype=dtype, device=device) for dtype in dtypes)
    return kernels.TreeTables(*tables, torch.full((num_reqs,), 77, dtype=torch.int32, device=device))


def make_template(max_nodes, device, num_nodes=0):
    """A template whose columns all differ."""
    column = torch.arange(max_nodes + 1, dtype=torch.int32, device=device)
    return kernels.TreeTemplate(column - 1, column + 3, column.long() << 40, -column.float(), num_nodes)


def make_growth(tree, rules=RULES, max_parents=9):
    """Buffers full of garbage."""
    device, num_reqs = tree.device, len(tree.num_nodes)
    plans = TreePlans(num_reqs, rules, device)
    plans.max_depths.fill_(rules.depth_max)
    thresholds = torch.zeros(rules.depth_max + 1, rules.depth_max, device=device)
    bounds = torch.zeros(rules.width_max + 1, rules.depth_max, 6, device=device)
    growth = kernels.TreeGrowBuffers(tree, plans, thresholds, bounds, max_parents, max_frontier=4)
    for tensor in (*growth.frontier, *growth.leftover, growth.next_free):
        tensor.fill_(-5)
    return growth


def begin_case(device, num_reqs=3, max_nodes=7):
    """Trees that grow, and what was accepted of the last ones."""
    tree, rows = make_tables(num_reqs + 1, max_nodes, device), torch.arange(num_reqs, device=device).flip(0)
    told = (torch.arange(num_reqs, device=device) % 4).int()
    return tree_begin, {
        "tree": tree, "template": make_template(max_nodes, device, 4), "num_reqs": num_reqs,
        "growth": make_growth(tree), "rows": rows, "num_accepted": told,
    }  # fmt: skip


def plan_case(device):
    """Plans of the next step."""
    log_probs, rows = make_log_probs(3, 6, 0, device)
    plans = TreePlans(4, RULES, device)
    plans.max_depths.fill_(7)
    return tree_plan, {"plans": plans, "rows": rows, "log_probs": log_probs}


def place_case(device, num_reqs=3, frontier=4, num_candidates=5, num_placed=9, num_fed=4):
    """A level of a static tree that takes some of the candidates, in any order."""
    generator = torch.Generator().manual_seed(num_placed)
    offered = torch.randint(0, 999, (num_reqs * frontier, num_candidates), generator=generator)
    sources = torch.randperm(frontier * num_candidates, generator=generator)[:num_placed]
    nodes = torch.randperm(64, generator=generator)[:num_placed] + 1
    parts = (sources, nodes, sources.flip(0)[:num_fed].clone(), torch.full((num_reqs + 1, num_fed), 77))
    level, tree = PlacedLevel(*(part.to(device) for part in parts)), make_tables(num_reqs + 1, 64, device)
    return tree_place, {"tree": tree, "level": level, "num_reqs": num_reqs, "token_ids": offered.to(device)}


def finish_case(device):
    """Trees that are filled up, and whose plans are adopted."""
    finish, arguments = leaves_case(device)
    plans = make_growth(arguments["tree"]).plans
    for place, tensor in enumerate(plans.adopted):
        tensor[:] = 10 * place + torch.arange(len(tensor), device=device)
    next_free = torch.tensor([3, 6, 1], device=device)
    return finish, arguments | {"plans": plans, "rows": torch.tensor([1, 0], device=device), "next_free": next_free}


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


@pytest.mark.parametrize("window", [0, 1, 3, 4, 10])
def test_frontiers_and_history(device, impl, window):
    """Against lists of lengths, rows of padding (5) among them. Catches: another window, a mean over empty places, a
    depth beyond its bounds, a table without a row for padding."""
    rules = RULES._replace(history=window)
    tree = make_tables(5, 6, device)
    growth, lengths, depths = make_growth(tree, rules, max_parents=300), [[] for _ in range(6)], [7] * 6
    generator = torch.Generator().manual_seed(window)
    for _ in range(15):
        rows = torch.cat((torch.randperm(5, generator=generator)[:2], torch.tensor([5, 5])))
        told = torch.randint(-1, 5, (4,), generator=generator, dtype=torch.int32)
        told[3] = -1
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


def confidence_by_hand(log_probs, top_k):
    """SAGE eq. 7-9 in float64."""
    probs = [math.exp(value) for value in log_probs[:top_k]]
    shares = [prob / sum(probs) for prob in probs]
    return 1 + sum(share * math.log(share) for share in shares if share > 0) / math.log(top_k)


def make_log_probs(num_reqs, num_candidates, seed, device):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_reqs, 30, generator=generator) * torch.rand(num_reqs, 1, generator=generator) * 6
    log_probs = logits.log_softmax(1).sort(dim=1, descending=True).values[:, :num_candidates]
    return log_probs.contiguous().to(device), torch.randperm(num_reqs, generator=generator).to(device)


@pytest.mark.parametrize(("num_reqs", "top_k", "num_candidates"), [(0, 2, 2), (1, 2, 9), (3, 5, 6), (33, 8, 8)])
def test_plans_are_the_formulas(device, impl, num_reqs, top_k, num_candidates):
    """Catches: candidates beyond the top k, eq. 10 and 11 swapped, another row's maximum depth, a plan a step off."""
    plans = TreePlans(num_reqs + 1, RULES._replace(top_k=top_k), device)
    plans.max_depths.copy_(torch.arange(num_reqs + 2) % 6 + 2)
    tables = (plans.confidence, plans.depths, plans.widths)
    for tensor in plans.adopted:
        tensor.fill_(-3)
    log_probs, rows = make_log_probs(num_reqs, num_candidates, top_k, device)
    tree_plan(plans, rows, log_probs, impl=impl)
    for req, row in enumerate(rows.tolist()):
        alpha = plans.next_confidence[req].item()
        assert alpha == pytest.approx(confidence_by_hand(log_probs[req].tolist(), top_k), abs=2e-6)
        exact = 2 + alpha * (plans.max_depths[row].item() - 2), 2 + (1 - alpha) * 4
        planned = plans.next_depths[req].item(), plans.next_widths[req].item()
        for got, value in zip(planned, exact, strict=True):
            assert got in (int(value - 1e-5), int(value + 1e-5)), "not rounded down"
        assert tuple(table[row].item() for table in tables) == (-3.0, -3, -3)
    untouched = [tensor[num_reqs:] for tensor in plans.adopted]
    assert all((tensor == -3).all() for tensor in untouched)


def test_what_is_no_number(device, impl):
    """Catches: a uniform or certain distribution beyond [0, 1] by rounding, NaN from NaN, a depth that is garbage."""
    inf = float("inf")
    log_probs = torch.tensor([[-2.3] * 5, [0.0] + [-inf] * 4, [float("nan")] * 5, [-inf] * 5, [0.0] + [-90.0] * 4])
    plans = TreePlans(5, RULES, device)
    plans.max_depths.fill_(7)
    rows = torch.tensor([4, 5, 5, 0, 5], device=device)  # 5: padding
    tree_plan(plans, rows, log_probs.to(device), impl=impl)
    assert plans.next_confidence.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0, 1.0], abs=2e-6)
    assert plans.next_depths.tolist() == [2, 7, 2, 2, 7]
    first, *others = plans.next_widths.tolist()
    assert others[0] == others[3] == 2 and {first, others[1], others[2]} <= {5, 6}  # alpha is 0 but for a rounding
    assert not plans.depths[1:4].any()


@pytest.mark.parametrize("sizes", [(0, 1, 4, 2, 1), (1, 1, 1, 1, 0), (3, 4, 5, 9, 4), (2, 10, 64, 64, 33)])
def test_place_equals_the_loop(device, sizes):
    """Catches: another request's candidate, a rank for a place, nodes or rows touched that are not the level's."""
    left = agree(place_case, device, *sizes)
    assert (left[".tree.tokens"][sizes[0]] == 77).all() and (left[".level.fed_tokens"][sizes[0]] == 77).all()


def test_place_by_hand(device, impl):
    """Two requests with two frontier nodes of three candidates: candidates 4, 0 and 2 become nodes 3, 1 and 9."""
    offered = torch.arange(100, 112, device=device).view(4, 3)
    level = PlacedLevel(*(torch.tensor(part, device=device) for part in ([4, 0, 2], [3, 1, 9], [2, 4])),
                        torch.full((3, 2), 77, device=device))  # fmt: skip
    tree = make_tables(3, 9, device)
    tree_place(tree, level, 2, offered, impl=impl)
    expected = [[77, first, 77, first + 4, *[77] * 5, first + 2] for first in (100, 106)]
    assert tree.tokens.tolist() == [*expected, [77] * 10]
    assert level.fed_tokens.tolist() == [[102, 104], [108, 110], [77, 77]]


def make_chains(num_reqs, max_nodes, num_nodes, device):
    """Tables whose row r is a chain of `num_nodes[r]` nodes, garbage behind."""
    tree = make_tables(num_reqs, max_nodes, device)
    for row, count in enumerate(num_nodes):
        bits = torch.ones(count + 1, dtype=torch.int64) << torch.arange(count + 1)
        tree.parents[row, : count + 1] = torch.arange(-1, count)
        tree.depths[row, : count + 1] = torch.arange(count + 1)
        tree.ancestors[row, : count + 1] = bits.cumsum(0) - bits
        tree.tokens[row, : count + 1] = 9_000 + torch.arange(count + 1)
        tree.log_probs[row, : count + 1] = 0.0
        tree.num_nodes[row] = count
    return tree


def make_leaves(num_reqs, num_parents, num_candidates, device, seed=0):
    """Candidates with many ties, some that are none, rows apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_reqs, num_parents + 2, num_candidates)
    log_probs = -torch.randint(0, 9, shape, generator=generator) / 4
    log_probs[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
    log_probs[torch.rand(shape, generator=generator) < 0.1] = torch.nan
    tokens = torch.randint(0, 99, shape, generator=generator)
    parents = torch.randint(0, 3, shape[:2], generator=generator)
    return Leaves(*(part.to(device)[:, :num_parents] for part in (log_probs, tokens, parents)))


def leaves_case(device, num_nodes=(2, 5), num_parents=3, num_candidates=5, max_nodes=7, width=9):
    """Chains that leaves are to fill up, and a row of no request."""
    tree = make_chains(len(num_nodes) + 1, width, num_nodes, device)
    leaves = make_leaves(len(num_nodes), num_parents, num_candidates, device, seed=max_nodes)
    return tree_finish, {"tree": tree, "num_reqs": len(num_nodes), "leaves": leaves, "max_nodes": max_nodes}


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
def test_leaves_are_the_best_candidates(device, num_nodes, num_parents, num_candidates, max_nodes, width):
    """Catches: another order, a budget not met, -inf or NaN taken, node 64's bit, what lies past the leaves touched."""
    left = agree(leaves_case, device, num_nodes, num_parents, num_candidates, max_nodes, width)
    for row, before in enumerate(num_nodes):
        log_probs = left[".leaves.log_probs"][row].flatten()
        candidates = log_probs[log_probs > -torch.inf].sort(descending=True).values
        count = min(max_nodes - before, len(candidates))
        assert left[".tree.num_nodes"][row] == before + count
        assert torch.equal(left[".tree.log_probs"][row, before + 1 : before + count + 1], candidates[:count])
    assert all((left[f".tree.{name}"][len(num_nodes)] == 77).all() for name in ("tokens", "parents", "num_nodes"))


def test_leaves_by_hand(device, impl):
    """A chain of two nodes; of the candidates -2 (twice), -1, -inf and NaN the best three, of equal ones the first."""
    tree = make_chains(1, 6, [2], device)
    scores = torch.tensor([[[-2.0, -torch.inf], [torch.nan, -1.0], [-2.0, -3.0]]], device=device)
    tokens = torch.tensor([[[10, 11], [12, 13], [14, 15]]], device=device)
    leaves = Leaves(scores, tokens, torch.tensor([[0, 1, 2]], device=device))
    tree_finish(tree, 1, leaves=leaves, max_nodes=5, impl=impl)
    assert tree.num_nodes.item() == 5 and tree.tokens[0, 3:].tolist() == [13, 10, 14, 77]
    assert tree.parents[0, 3:].tolist() == [1, 0, 2, 77] and tree.depths[0, 3:].tolist() == [2, 1, 3, 77]
    assert tree.ancestors[0, 3:].tolist() == [0b101, 0b1000, 0b10011, 77]
    assert tree.log_probs[0, 3:].tolist() == [-1.0, -2.0, -2.0, 77.0]


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
