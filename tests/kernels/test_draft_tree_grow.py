"""tree_grow: one literal level, and kernel against loop over whole steps: ties, budgets, numbers that are none."""

import pytest
import torch

from tests.kernels.agreement import agree
from tests.kernels.test_draft_tree import make_tables
from vidspec_kernels import PlanRules, TreeGrowBuffers, TreePlans, tree_grow

NEVER = float("inf")
NONE = -float("inf")


def buffers_for(
    plans, device, num_candidates, max_nodes=64, num_levels=4, max_frontier=6, thresholds=None, bounds=None
):
    """Buffers whose persistent row r has the plan (depth, width) of `plans[r]`; by default every candidate passes."""
    num_reqs = len(plans)
    depths, widths = torch.tensor(plans).T
    tree = make_tables(num_reqs, max_nodes, device)
    tree.ancestors[:, 0] = 0
    planned = TreePlans(num_reqs, PlanRules(1, 9, 1, 9, 2, 0, 0.0, 0.0), device)
    planned.depths[:-1], planned.widths[:-1] = depths, widths
    rules = (
        torch.full((num_levels + 1, num_levels), NONE) if thresholds is None else thresholds,
        torch.full((int(widths.max()) + 1, num_levels, num_candidates), NONE) if bounds is None else bounds,
    )
    return TreeGrowBuffers(
        tree, planned, *(tensor.to(device) for tensor in rules), max_parents=1 + num_levels * max_frontier,
        max_frontier=max_frontier,
    )  # fmt: skip


def start(buffers):
    """Make the frontier the roots, as `tree_begin` does."""
    buffers.frontier_nodes[:, 0], buffers.frontier_log_probs[:, 0] = 0, 0.0


def table(num_rows, num_candidates, seed, device):
    """Log-probabilities in quarters, so that many are equal and all sums exact, and distinct tokens."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.randint(0, 12, (num_rows, num_candidates), generator=generator).sort(dim=1).values / 4
    tokens = torch.rand(num_rows, 3 * num_candidates, generator=generator).argsort(dim=1)[:, :num_candidates]
    return log_probs.to(device), tokens.contiguous().to(device)


def grow_step(buffers, rows, budget, num_levels=4, seed=0, trims=False, impl="auto"):
    """Grow a whole step; return the nodes fed at each level."""
    num_reqs, device, max_frontier = len(rows), buffers.device, buffers.max_frontier
    start(buffers)
    width, fed, first_parent = 1, [], 0
    for level in range(num_levels):
        # The same candidates for a node, however wide its frontier is.
        by_place = [
            table(num_reqs, buffers.num_candidates, 1000 * seed + 10 * level + place, device) for place in range(width)
        ]
        log_probs, tokens = (torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*by_place, strict=True))
        num_next = min(max_frontier, width * buffers.num_candidates)
        following = tree_grow(
            buffers, rows, log_probs, tokens, level=level, budget=budget, first_parent=first_parent,
            num_next=num_next, trims=trims, impl=impl,
        )  # fmt: skip
        first_parent += width
        width = following
        assert width == num_next or (trims and impl != "triton" and 1 <= width < num_next)
        nodes, next_tokens, next_log_probs = (part[:num_reqs, :width] for part in buffers.frontier)
        for entries in zip(nodes.tolist(), next_tokens.tolist(), next_log_probs.tolist(), strict=True):
            places = list(zip(*entries, strict=True))
            used = [place for place in places if place[0] > 0]
            assert places == used + [(0, 0, NONE)] * (len(places) - len(used)), "a gap, or something where nothing is"
            fed.append(used)
    return torch.tensor([len(used) for used in fed]), fed


def rules(num_levels, num_candidates, seed):
    """Thresholds and bounds in eighths beside sums of quarters: met exactly half of the time."""
    generator = torch.Generator().manual_seed(seed)
    thresholds = -torch.randint(0, 40, (num_levels + 1, num_levels), generator=generator) / 8
    bounds = -torch.randint(-2, 30, (10, num_levels, num_candidates), generator=generator) / 8
    return {"thresholds": thresholds, "bounds": bounds}


def case(device, plans=((4, 1), (1, 2), (4, 9), (3, 2), (2, 1)), rows=(3, 0, 1, 4), num_candidates=5, budget=9, seed=0,
         max_frontier=6, num_levels=4):  # fmt: skip
    own = rules(num_levels, num_candidates, budget)
    buffers = buffers_for(plans, device, num_candidates, num_levels=num_levels, max_frontier=max_frontier, **own)
    rows = torch.tensor(rows, dtype=torch.int64, device=device)
    return grow_step, {"buffers": buffers, "rows": rows, "budget": budget, "num_levels": num_levels, "seed": seed}


def level_case(device, num_reqs=9):
    plans = [(1 + row % 4, 1 + row % 9) for row in range(num_reqs)]
    buffers = buffers_for(plans, device, 5, max_frontier=4, **rules(4, 5, seed=0))
    start(buffers)
    log_probs, tokens = table(num_reqs, 5, 0, device)
    return tree_grow, {
        "buffers": buffers, "rows": torch.arange(num_reqs, device=device).flip(0), "log_probs": log_probs,
        "token_ids": tokens, "level": 0, "budget": 9, "first_parent": 0, "num_next": 4,
    }  # fmt: skip


def nodes_of(buffers, row, nodes):
    """Return {node: (token, parent, depth, mask without sign, log-probability)} of a row."""
    columns = [buffer[row].tolist() for buffer in buffers.tree.tensors[:5]]
    return {
        node: (columns[0][node], columns[1][node], columns[2][node], columns[3][node] % 2**64, columns[4][node])
        for node in nodes
    }


def test_a_hand_computed_level(device, impl):
    """Catches: the greedy child tested or out of place, a wrong bound, order by place, a parent's mask forgotten."""
    bounds = torch.full((2, 2, 3), NONE)
    bounds[1, 1] = torch.tensor([NONE, -1.0, -0.5])  # level 2: rank 1 wants a parent of -1.0, rank 2 one of -0.5
    thresholds = torch.tensor([[NEVER, NEVER], [NEVER, NEVER], [-1.5, -3.0]])
    buffers = buffers_for([(2, 1)], device, 3, max_nodes=8, num_levels=2, thresholds=thresholds, bounds=bounds)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    log_probs = torch.tensor([[-2.0, -1.0, -1.5]], device=device)
    tokens = torch.tensor([[7, 8, 9]], device=device)
    start(buffers)
    tree_grow(buffers, rows, log_probs, tokens, level=0, budget=8, first_parent=0, num_next=3, impl=impl)
    # The greedy child is below the threshold and stays; -1.5 is not above it.
    assert buffers.frontier_nodes[0, :3].tolist() == [1, 3, 0] and buffers.frontier_tokens[0, :3].tolist() == [7, 8, 0]
    assert buffers.frontier_log_probs[0, :3].tolist() == [-2.0, -1.0, NONE]
    assert nodes_of(buffers, 0, [1, 3]) == {1: (7, 0, 1, 0b001, -2.0), 3: (8, 0, 1, 0b100, -1.0)}
    log_probs = torch.tensor([[-9.0, -0.5, -0.5], [-1.5, -0.25, -0.5]], device=device)
    tokens = torch.tensor([[4, 5, 6], [1, 2, 3]], device=device)
    tree_grow(buffers, rows, log_probs, tokens, level=1, budget=8, first_parent=1, num_next=6, impl=impl)
    # Of node 1 (-2.0) only the greedy child; of node 3 (-1.0) rank 0 (-2.5) and rank 1 (-1.25), not rank 2.
    assert not buffers.frontier_nodes.any() and not buffers.frontier_tokens.any()
    expected = {
        2: (4, 1, 2, 0b00011, -11.0), 4: (2, 3, 2, 0b01100, -1.25), 5: (1, 3, 2, 0b10100, -2.5), 6: (77,) * 5
    }  # fmt: skip
    assert nodes_of(buffers, 0, expected) == expected
    assert buffers.next_free.tolist() == [6]
    left, left_tokens, left_parents = (part[0, :3].tolist() for part in buffers.leftover)
    assert left == [[NONE, NONE, -1.5], [NONE, -2.5, -2.5], [NONE, NONE, -1.5]]
    assert left_tokens == [[7, 8, 9], [4, 5, 6], [1, 2, 3]] and left_parents == [0, 1, 3]


@pytest.mark.parametrize("budget", [0, 1, 3, 9, 30, 64])
@pytest.mark.parametrize("num_candidates", [1, 2, 5])
def test_equals_the_loop(device, num_candidates, budget):
    """Catches: powers of two, a budget exceeded, ties by chance, a neighbour read, a finished request that goes on."""
    for seed in range(2):
        left = agree(case, device, num_candidates=num_candidates, budget=budget, seed=seed)
        assert (left[".buffers.next_free"][:4] <= budget + 1).all()
        # What trims writes fewer columns, and the same nodes.
        step, arguments = case(torch.device("cpu"), num_candidates=num_candidates, budget=budget, seed=seed)
        step(**arguments, trims=True)
        assert torch.equal(arguments["buffers"].tree.tokens, left[".buffers.tree.tokens"])
        assert torch.equal(arguments["buffers"].next_free, left[".buffers.next_free"])


@pytest.mark.parametrize("num_reqs", [1, 33])
def test_a_real_size(device, num_reqs):
    plans = [(1 + row % 4, row % 3) for row in range(num_reqs)]
    rows = torch.randperm(num_reqs, generator=torch.Generator().manual_seed(1)).tolist()
    left = agree(case, device, plans, rows, 10, 50, max_frontier=10)
    assert num_reqs == 1 or len(set(left[".buffers.next_free"].tolist())) > 1


def test_all_64_bits(device, impl):
    """Catches: a mask built in 32 bits or in floating point, node 64 lost."""
    buffers = buffers_for([(2, 0)], device, 40, num_levels=2)
    grow_step(buffers, torch.zeros(1, dtype=torch.int64, device=device), 64, num_levels=2, impl=impl)
    assert buffers.next_free.tolist() == [65]
    for node, (_, parent, _, word, _) in nodes_of(buffers, 0, range(1, 65)).items():
        assert word == 1 << (node - 1) | (1 << (parent - 1) if parent else 0)


def test_nan_and_impossible_candidates(device, impl):
    """Catches: NaN that passes a test, upsets the order of others or spreads, and -inf taken for a candidate."""
    buffers = buffers_for([(2, 0)], device, 4, num_levels=2)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    log_probs = torch.tensor([[float("nan"), -2.0, float("nan"), -1.0]], device=device)
    tokens = torch.tensor([[1, 2, 3, 4]], device=device)
    start(buffers)
    tree_grow(buffers, rows, log_probs, tokens, level=0, budget=64, first_parent=0, num_next=3, impl=impl)
    assert buffers.frontier_nodes[0, :3].tolist() == [1, 3, 4]
    assert buffers.tree.tokens[0, 1:5].tolist() == [1, 77, 4, 2]
    log_probs = torch.tensor([[0.0] * 4, [NONE] * 4, [float("nan")] * 4], device=device)
    tree_grow(buffers, rows, log_probs, tokens.repeat(3, 1), level=1, budget=64, first_parent=1, num_next=5, impl=impl)
    assert buffers.tree.tokens[0, 2] == 1 and buffers.next_free.tolist() == [5]
