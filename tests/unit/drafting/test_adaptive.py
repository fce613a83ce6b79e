"""The adaptive tree (SAGE): growth against a slow specification, plans and history."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import FakeDraft, check_greedy_first, check_tree, drive, grow, paths_of, quick
from vllm_vidspec.drafting import AdaptiveTree
from vllm_vidspec.drafting import adaptive as adaptive_module
from vllm_vidspec.drafting.adaptive import SAGE, THRESHOLD


def plans_of(policy, rows):
    """Return the (depth, width) that the next trees of these rows will have."""
    plans = policy.growth.plans
    return list(zip(plans.depths[rows].tolist(), plans.widths[rows].tolist(), strict=True))


def set_plans(policy, plans):
    """Give rows 0, 1, ... these plans, as a `finish` would."""
    depths = torch.tensor([depth for depth, _ in plans])
    here = policy.growth.plans
    here.depths[: len(plans)], here.widths[: len(plans)] = depths, torch.tensor([width for _, width in plans])
    policy._host_depths.send(np.arange(len(plans)), depths)


def width_by_hand(width, level, parent_log_prob):
    """SAGE eq. 12, halves rounded up; the first level has the whole width."""
    if level == 1:
        return width
    parent_prob = Fraction(math.exp(parent_log_prob))
    return max(1, math.floor(Fraction(width, level) * (Fraction(1, 2) + parent_prob) + Fraction(1, 2)))


def grow_by_hand(draft, depth, width, budget, width_max, threshold, fill):
    """Return {path: log-probability} in node order and the paths fed on each level; sums are of float32 numbers."""
    depth = min(depth, budget)
    greedy, log_probs = [()], {(): np.float32(0)}
    others, unused, fed = [], [], []
    frontier = [()]
    for level in range(1, depth + 1):
        fed.append(frontier)
        allowed = []
        for at, parent in enumerate(frontier):
            own_log_probs, tokens = draft(parent)
            limit = width_by_hand(width, level, log_probs[parent])
            for rank, (log_prob, token) in enumerate(zip(own_log_probs, tokens, strict=True)):
                path, total = (*parent, int(token)), log_probs[parent] + log_prob
                log_probs[path] = total
                if parent == greedy[-1] and rank == 0:
                    continue
                unused.append((-total, level, at, rank, path))
                if rank < limit and math.exp(total) > threshold * level / depth:
                    allowed.append(unused[-1])
        greedy.append((*greedy[-1], int(draft(greedy[-1])[1][0])))
        room = budget - depth - len(others)
        chosen = [path for *_, path in sorted(allowed)[:room]]
        others += chosen
        # Where no room is left, children of others could not be taken.
        frontier = [greedy[-1], *(chosen[: width_max - 1] if len(others) < budget - depth else [])]
    nodes = greedy[1:] + others
    if fill:
        rest = sorted(entry for entry in unused if entry[-1] not in others)
        nodes += [path for *_, path in rest[: budget - len(nodes)]]
    return {path: log_probs[path] for path in nodes}, fed or [[()]]


def check_grown(policy, row, draft, plan, budget, fill, fed, threshold=THRESHOLD):
    """Assert that a row holds the tree of the specification, in its node order, and that it was fed as there."""
    depth, width = plan
    expected, expected_fed = grow_by_hand(draft, depth, width, budget, policy.rules.width_max, threshold, fill)
    check_tree(policy.tree, row)
    check_greedy_first(policy.tree, row, draft, min(depth, budget))
    num_nodes = int(policy.tree.num_nodes[row])
    assert num_nodes <= budget
    assert paths_of(policy.tree, row, num_nodes)[1:] == list(expected)
    assert policy.tree.log_probs[row, 1 : num_nodes + 1].tolist() == [float(value) for value in expected.values()]
    assert [level[row] for level in fed[: len(expected_fed)]] == expected_fed
    assert not any(level[row] for level in fed[len(expected_fed) :])


@settings(quick, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    sureness=st.sampled_from([0.3, 1.0, 3.0]),
    plans=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 10)), min_size=1, max_size=4),
    budget=st.integers(0, 64),
    max_nodes=st.sampled_from([64, 64, 64, 1, 2, 3, 6]),
    threshold=st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.99]),
    fill=st.booleans(),
)
# A deep request beside a shallow one with much more room for others.
@example(seed=1, sureness=1.0, plans=[(2, 10), (8, 2)], budget=10, max_nodes=64, threshold=0.0, fill=False)
# A budget below the depth, and buffers below both: the chain.
@example(seed=1, sureness=1.0, plans=[(8, 2)], budget=5, max_nodes=64, threshold=0.0, fill=False)
@example(seed=1, sureness=0.1, plans=[(5, 6)], budget=64, max_nodes=3, threshold=0.1, fill=True)
def test_growth_is_the_specification(seed, sureness, plans, budget, max_nodes, threshold, fill):
    """Catches: a wrong width or threshold at any level, another order, a frontier with the wrong nodes, a budget that
    the greedy path does not have, leaves that are not the best of what is left; ties decided by chance; a tree that
    does not fit a small K; forwards for nothing; with `fill`, too few or too many nodes."""
    rules = SAGE._replace(depth_min=1, width_min=1)
    policy = AdaptiveTree(len(plans) + 1, max_nodes, "cpu", rules, threshold)
    sizes = (policy.max_nodes, policy.max_depth, policy.num_candidates, policy.max_frontier)
    assert sizes == (max_nodes, min(8, max_nodes), 10, 10)
    drafts = [FakeDraft(seed + row, policy.num_candidates, sureness) for row in range(len(plans))]
    set_plans(policy, plans)
    fed = grow(policy, drafts, list(range(len(plans))), budget, fill)
    budget = min(budget, max_nodes)
    assert len(fed) == max(1, min(budget, max(depth for depth, _ in plans)))
    for row, (draft, plan) in enumerate(zip(drafts, plans, strict=True)):
        check_grown(policy, row, draft, plan, budget, fill, fed, threshold)


def sure_table(num_rows, num_candidates, sureness):
    """Return log-probabilities from uniform (0) to one sure token (1), and tokens."""
    probs = torch.full((num_candidates,), (1.0 - sureness) / num_candidates)
    probs[0] += sureness
    return probs.log().repeat(num_rows, 1), torch.arange(num_candidates).repeat(num_rows, 1)


def step_with(policy, sureness, rows=(0,)):
    """Run a step whose candidates all are as sure as given; return the number of draft forwards."""
    return drive(policy, list(rows), lambda _, nodes: sure_table(nodes.numel(), policy.num_candidates, sureness))


@pytest.mark.parametrize(
    ("rules", "threshold"), [(SAGE, THRESHOLD), (SAGE._replace(depth_min=1, depth_max=20, width_max=32), 0.3)]
)
def test_tables_are_the_papers_formulas(rules, threshold):
    """Catches: a level counted from 0, a bound for the wrong rank, rounding other than half up; trees that depend on
    the order in which a softmax was summed, which puts a certain parent at 0 or just below."""
    thresholds = adaptive_module.log_thresholds(rules, threshold)
    bounds = adaptive_module.width_bounds(rules, rules.width_max)
    assert thresholds.dtype == bounds.dtype == torch.float32
    assert torch.equal(bounds <= 0.0, bounds <= -2e-6)
    for depth in range(1, rules.depth_max + 1):
        for level in range(1, depth + 1):
            assert thresholds[depth, level - 1].exp() == pytest.approx(threshold * level / depth, rel=1e-5)
    for width in range(1, rules.width_max + 1, 3):
        for level in range(1, rules.depth_max + 1):
            for parent_log_prob in (0.0, -0.1, -0.5, -1.3, -3.0):
                allowed = (bounds[width, level - 1] <= parent_log_prob).tolist()
                limit = min(width_by_hand(width, level, parent_log_prob), rules.width_max)
                assert allowed == [True] * limit + [False] * (rules.width_max - limit)


def test_lookahead_uses_the_confidence_of_the_step_before():
    """Catches: a step shaped by its own entropy where the host must know its depth before."""
    ahead = AdaptiveTree(1, 64, "cpu")
    assert step_with(ahead, 1.0) == 5 and ahead.tree.depths[0].max() == 5  # alpha 0.5
    assert step_with(ahead, 0.0) == 8 and ahead.tree.depths[0].max() == 8
    assert step_with(ahead, 0.0) == 3 and ahead.tree.depths[0].max() == 3


def tell(policy, length, rows=(0,), times=1):
    """Tell these rows the acceptance length of a step, None for a step without verification."""
    for _ in range(times):
        accepted = torch.full((len(rows),), -1 if length is None else length, dtype=torch.int32)
        policy.begin(torch.tensor(rows), accepted, 64)


def test_history_limits_the_next_plan():
    """Catches: a maximum depth never used, or without confidence; lengths that count the target's own token."""
    policy = AdaptiveTree(2, 64, "cpu")
    tell(policy, 1, times=3)  # 2 with the target's own, which would be enough
    step_with(policy, 1.0, rows=(0, 1))
    assert plans_of(policy, [0, 1]) == [(5, 2), (8, 2)]
    assert step_with(policy, 1.0, rows=(0,)) == 5
    assert step_with(policy, 1.0, rows=(1, 0)) == 8
    assert [int(policy.tree.depths[row].max()) for row in range(2)] == [8, 5]


def test_admit_forgets():
    """Catches: plan, confidence or history of its row's last owner, also of a plan that is still on its way."""
    policy = AdaptiveTree(3, 64, "cpu")
    tell(policy, 0, (0, 2), times=5)
    step_with(policy, 1.0, rows=(0, 2))
    policy.reset_rows(np.array([2]))
    assert policy.confidence[[0, 2]].tolist() == [1.0, 0.5]
    assert policy.max_depths[:3].tolist() == [3, 8, 8]
    assert plans_of(policy, [0, 2]) == [(3, 2), (5, 6)]
    assert step_with(policy, 0.5, rows=(0,)) == 3
    assert step_with(policy, 0.5, rows=(2,)) == 5


@pytest.mark.parametrize("garbage", [-(2**63), -1, 0, 9, 2**62])
def test_depths_from_the_device_are_not_trusted(garbage):
    """Catches: a loop over levels that the buffers do not have, sized by a word that the device never wrote."""
    policy = AdaptiveTree(3, 64, "cpu")
    policy._host_depths.send(np.array([1, 2]), torch.tensor([5, garbage]))
    assert SAGE.depth_min <= step_with(policy, 0.5, [1, 2]) <= SAGE.depth_max
