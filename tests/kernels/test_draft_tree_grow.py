"""tree_grow: one literal level, kernel and reference against a plain loop over whole steps, ties, budgets, dispatch."""

import pytest
import torch

from vidspec_kernels import PlanRules, TreeGrowBuffers, TreePlans, TreeTables, tree_grow

NEVER = float("inf")
NONE = -float("inf")


def buffers_for(
    plans, device, num_candidates, max_nodes=64, num_levels=4, max_frontier=6, thresholds=None, bounds=None
):
    """Buffers whose persistent row r has the plan (depth, width) of `plans[r]`; by default every candidate passes."""
    num_reqs = len(plans)
    own_bits = [0, *(1 << node for node in range(min(max_nodes, 63))), *[-(2**63)] * (max_nodes // 64)]
    depths = torch.tensor([depth for depth, _ in plans])
    widths = torch.tensor([width for _, width in plans])
    tables = (
        torch.full((num_reqs, max_nodes + 1), -1),
        torch.tensor([-1] + [0] * max_nodes, dtype=torch.int32).repeat(num_reqs, 1),
        torch.tensor([0] + [1] * max_nodes, dtype=torch.int32).repeat(num_reqs, 1),
        torch.tensor(own_bits).repeat(num_reqs, 1),
        torch.zeros(num_reqs, max_nodes + 1),
        torch.zeros(num_reqs, dtype=torch.int32),
    )
    planned = TreePlans(num_reqs, PlanRules(1, 9, 1, 9, 2, 0, 0.0, 0.0), device)
    planned.depths[:-1], planned.widths[:-1] = depths, widths
    rules = (
        torch.full((num_levels + 1, num_levels), NONE) if thresholds is None else thresholds,
        torch.full((int(widths.max()) + 1, num_levels, num_candidates), NONE) if bounds is None else bounds,
    )
    return TreeGrowBuffers(
        TreeTables(*(tensor.to(device) for tensor in tables)), planned, *(tensor.to(device) for tensor in rules),
        max_parents=1 + num_levels * max_frontier, max_frontier=max_frontier,
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


def reference_device(device, impl):
    """The reference works on CPU tensors only."""
    return device if impl == "triton" else torch.device("cpu")


def run_step(buffers, rows, device, impl, *, budget, num_levels=4, max_frontier=6, seed=0, trims=False):
    """Run a whole step; return the frontiers `[level][request]` as lists of (node, token, log-probability)."""
    rows, num_reqs = torch.tensor(rows, dtype=torch.int64, device=device), len(rows)
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
        fed.append([])
        for entries in zip(nodes.tolist(), next_tokens.tolist(), next_log_probs.tolist(), strict=True):
            places = list(zip(*entries, strict=True))
            used = [place for place in places if place[0] > 0]
            assert places == used + [(0, 0, NONE)] * (len(places) - len(used)), "a gap, or something where nothing is"
            fed[-1].append(used)
    return fed


def loop_step(plans, rows, *, num_candidates, budget, thresholds, bounds, num_levels=4, max_frontier=6, seed=0):
    """The rules of `tree_grow`: return {node: (token, parent, depth, mask, log-probability)} and the frontiers."""
    trees, fed = [], [[] for _ in range(num_levels)]
    for request, row in enumerate(rows):
        depth, width = min(plans[row][0], budget), plans[row][1]
        nodes = {0: (-1, -1, 0, 0, 0.0)}
        free, frontier = depth + 1, [0]
        for level in range(num_levels):
            ranked, greedy = [], None
            for place, parent in enumerate(frontier):
                log_probs, tokens = table(len(rows), num_candidates, 1000 * seed + 10 * level + place, "cpu")
                for rank in range(num_candidates):
                    score = nodes[parent][4] + log_probs[request, rank].item()
                    entry = (-score, place, rank, int(tokens[request, rank]), parent)
                    if place == rank == 0:
                        greedy = entry
                    elif score > thresholds[depth, level] and nodes[parent][4] >= bounds[width, level, rank]:
                        ranked.append(entry)
            chosen = [(level + 1, greedy)] if level < depth else []
            for entry in sorted(ranked):
                if free <= budget:
                    chosen.append((free, entry))
                    free += 1
            for node, (negated, _, _, token, parent) in chosen:
                nodes[node] = (token, parent, level + 1, nodes[parent][3] | 1 << (node - 1), -negated)
            alive = chosen[: max_frontier if free <= budget else 1] if level + 1 < depth else []
            frontier = [node for node, _ in alive]
            fed[level].append([(node, nodes[node][0], nodes[node][4]) for node in frontier])
        trees.append(nodes)
    return trees, fed


def nodes_of(buffers, row, nodes):
    """Return the same of a row of the buffers, masks without sign."""
    columns = [buffer[row].tolist() for buffer in buffers.tree.tensors[:5]]
    return {
        node: (columns[0][node], columns[1][node], columns[2][node], columns[3][node] % 2**64, columns[4][node])
        for node in nodes
    }


# --- by hand ---


def test_a_hand_computed_level(device, impl):
    """Catches: the greedy child tested or out of place, a threshold that lets the equal pass, a bound that does not,
    order by place instead of probability, a parent's mask forgotten."""
    device = reference_device(device, impl)
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
        2: (4, 1, 2, 0b00011, -11.0), 4: (2, 3, 2, 0b01100, -1.25), 5: (1, 3, 2, 0b10100, -2.5), 6: (-1, 0, 1, 32, 0.0)
    }  # fmt: skip
    assert nodes_of(buffers, 0, expected) == expected
    assert buffers.next_free.tolist() == [6]
    left, left_tokens, left_parents = (part[0, :3].tolist() for part in buffers.leftover)
    assert left == [[NONE, NONE, -1.5], [NONE, -2.5, -2.5], [NONE, NONE, -1.5]]
    assert left_tokens == [[7, 8, 9], [4, 5, 6], [1, 2, 3]] and left_parents == [0, 1, 3]


# --- against the loop ---


@pytest.mark.parametrize("budget", [0, 1, 3, 9, 30, 64])
@pytest.mark.parametrize("num_candidates", [1, 2, 5])
def test_equals_the_loop(device, impl, num_candidates, budget):
    """Catches: sizes at, below or above a power of two, a budget exceeded, ties by chance, a request's neighbour read,
    a persistent row taken for a batch row, a finished request that goes on."""
    device = reference_device(device, impl)
    plans, rows = [(4, 1), (1, 2), (4, 9), (3, 2), (2, 1)], [3, 0, 1, 4]
    generator = torch.Generator().manual_seed(budget)
    # In eighths beside sums of quarters: met exactly half of the time.
    thresholds = -torch.randint(0, 40, (5, 4), generator=generator) / 8
    bounds = -torch.randint(-2, 30, (10, 4, num_candidates), generator=generator) / 8
    shapes = dict(num_candidates=num_candidates, thresholds=thresholds, bounds=bounds)
    buffers = buffers_for(plans, device, **shapes)
    for seed in range(2):  # the second step on the same buffers
        empty = buffers_for(plans, device, **shapes).tree.tensors
        for buffer, values in zip(buffers.tree.tensors, empty, strict=True):
            buffer.copy_(values)
        fed = run_step(buffers, rows, device, impl, budget=budget, seed=seed, trims=seed == 1)
        trees, expected_fed = loop_step(plans, rows, budget=budget, seed=seed, **shapes)
        assert fed == expected_fed
        empty = nodes_of(buffers, len(rows), range(65))
        for request, nodes in enumerate(trees):
            assert nodes_of(buffers, request, range(65)) == {**empty, **nodes}
            depth = min(plans[rows[request]][0], budget)
            assert buffers.next_free[request] == depth + 1 + sum(node > depth for node in nodes)


@pytest.mark.parametrize("num_reqs", [0, 1, 33])
def test_kernel_equals_reference_at_a_real_size(device, num_reqs):
    """Catches: a kernel and a reference that differ in anything, at ten candidates of up to ten nodes."""
    plans = [(1 + row % 4, row % 3) for row in range(max(num_reqs, 1))]
    rows = torch.randperm(num_reqs, generator=torch.Generator().manual_seed(1)).tolist()
    results = []
    for impl in ("triton", "torch", "numba"):
        where = reference_device(device, impl)
        buffers = buffers_for(plans, where, 10, max_frontier=10, thresholds=torch.full((5, 4), -2.0))
        fed = run_step(buffers, rows, where, impl, budget=50, max_frontier=10)
        written = (buffers.next_free, *buffers.tree.tensors, *buffers.leftover, *buffers.frontier)
        results.append((fed, [tensor.cpu()[:num_reqs] for tensor in written]))
    assert results[0][0] == results[1][0] == results[2][0]
    tables = zip(*(tables for _, tables in results), strict=True)
    assert all(torch.equal(found, same[0]) for same in tables for found in same)
    if num_reqs > 1:
        assert len(set(results[0][1][0].tolist())) > 1


def test_all_64_bits(device, impl):
    """Catches: a mask built in 32 bits or in floating point, node 64 lost."""
    device = reference_device(device, impl)
    buffers = buffers_for([(2, 0)], device, 40, num_levels=2)
    run_step(buffers, [0], device, impl, budget=64, num_levels=2)
    assert buffers.next_free.tolist() == [65]
    for node, (_, parent, _, word, _) in nodes_of(buffers, 0, range(1, 65)).items():
        assert word == 1 << (node - 1) | (1 << (parent - 1) if parent else 0)


def test_nan_and_impossible_candidates(device, impl):
    """Catches: NaN that passes a test, upsets the order of others or spreads, and -inf taken for a candidate."""
    device = reference_device(device, impl)
    buffers = buffers_for([(2, 0)], device, 4, num_levels=2)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    log_probs = torch.tensor([[float("nan"), -2.0, float("nan"), -1.0]], device=device)
    tokens = torch.tensor([[1, 2, 3, 4]], device=device)
    start(buffers)
    tree_grow(buffers, rows, log_probs, tokens, level=0, budget=64, first_parent=0, num_next=3, impl=impl)
    assert buffers.frontier_nodes[0, :3].tolist() == [1, 3, 4]
    assert buffers.tree.tokens[0, 1:5].tolist() == [1, -1, 4, 2]
    log_probs = torch.tensor([[0.0] * 4, [NONE] * 4, [float("nan")] * 4], device=device)
    tree_grow(buffers, rows, log_probs, tokens.repeat(3, 1), level=1, budget=64, first_parent=1, num_next=5, impl=impl)
    assert buffers.tree.tokens[0, 2] == 1 and buffers.next_free.tolist() == [5]


# --- dispatch and checks ---


def test_wrapper_refuses(device):
    """Catches: a dropped dtype, stride or shape check."""
    buffers = buffers_for([(2, 0), (2, 0)], device, 4, num_levels=2, max_frontier=2)
    rows = torch.tensor([1, 0], device=device)
    log_probs, tokens = table(2, 4, 0, device)
    good = (rows, log_probs, tokens)
    sizes = dict(level=0, budget=9, first_parent=0, num_next=2)
    tree_grow(buffers, *good, **sizes)
    for place, wrong, message in (
        (0, rows.int(), "rows"), (0, rows.repeat(2), "4 rows, 2 fit"), (1, log_probs.half(), "log_probs"),
        (1, log_probs.t().contiguous().t(), "log_probs: expected contiguous"),
        (1, log_probs[:, :3].contiguous(), "log_probs: expected shape"),
        (1, log_probs.repeat(2, 1)[:3], "log_probs: expected shape"),
        (1, log_probs.repeat(3, 1), "token_ids: expected shape"), (2, tokens[:1], "token_ids: expected shape"),
        (2, tokens.int(), "token_ids"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            tree_grow(buffers, *good[:place], wrong, *good[place + 1 :], **sizes)
    with pytest.raises(AssertionError, match="3 nodes a request"):
        tree_grow(buffers, rows, log_probs.repeat(3, 1), tokens.repeat(3, 1), **sizes)
    for wrong in (dict(level=2), dict(level=-1), dict(budget=65), dict(first_parent=5), dict(num_next=3)):
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            tree_grow(buffers, *good, **{**sizes, **wrong})
    with pytest.raises(ValueError, match="auto, triton, numba or torch"):
        tree_grow(buffers, *good, **sizes, impl="cpu")


def test_buffers_refuse(device):
    """Catches: a dropped check of what every launch trusts."""
    buffers = buffers_for([(2, 0)], device, 4)
    names = ("tokens", "parents", "depths", "ancestors", "log_probs", "num_nodes")
    tables = dict(zip(names, buffers.tree.tensors, strict=True))
    TreeTables(**tables)
    for name in names:
        with pytest.raises(AssertionError, match=name):
            TreeTables(**{**tables, name: tables[name].double()})
    with pytest.raises(AssertionError, match="parents"):
        TreeTables(**{**tables, "parents": tables["parents"][:, :9].contiguous()})
    two_rows = {name: table.repeat(2, *[1] * (table.ndim - 1)) for name, table in tables.items()}
    with pytest.raises(AssertionError, match="ancestors: expected contiguous"):
        TreeTables(**{**two_rows, "ancestors": two_rows["ancestors"].t().contiguous().t()})
    good = dict(
        tree=buffers.tree, plans=buffers.plans, log_thresholds=buffers.rules[0], width_bounds=buffers.rules[1],
        max_parents=9, max_frontier=2,
    )  # fmt: skip
    TreeGrowBuffers(**good)
    for name in ("log_thresholds", "width_bounds"):
        with pytest.raises(AssertionError, match=name):
            TreeGrowBuffers(**{**good, name: good[name].double()})
    with pytest.raises(AssertionError, match="log_thresholds"):
        TreeGrowBuffers(**{**good, "log_thresholds": good["log_thresholds"][:, :1].contiguous()})
