"""The adaptive tree (SAGE): growth against a slow specification, budgets, devices, mutations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import (
    FakeDraft,
    candidates,
    check_greedy_first,
    check_tree,
    drive,
    grow,
    paths_of,
    quick,
    set_plans,
    width_by_hand,
    work_in_torch,
)
from vidspec_kernels.draft_tree.plan import confidence
from vllm_vidspec.config import TreeKnobs
from vllm_vidspec.drafting import AdaptiveTree, StaticTree
from vllm_vidspec.drafting import adaptive as adaptive_module

# --- the specification, slow and plain ---


def grow_by_hand(draft, depth, width, budget, knobs, fill):
    """Return the tree as {path: log-probability}, in node order, and the paths fed on each level. Depth and width are
    the request's plan. Every sum is one of float32 numbers, as the path's probability is."""
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
                if rank < limit and math.exp(total) > knobs.threshold * level / depth:
                    allowed.append(unused[-1])
        greedy.append((*greedy[-1], int(draft(greedy[-1])[1][0])))
        room = budget - depth - len(others)
        chosen = [path for *_, path in sorted(allowed)[:room]]
        others += chosen
        # Where no room is left, children of others could not be taken.
        frontier = [greedy[-1], *(chosen[: knobs.width_max - 1] if len(others) < budget - depth else [])]
    nodes = greedy[1:] + others
    if fill:
        rest = sorted(entry for entry in unused if entry[-1] not in others)
        nodes += [path for *_, path in rest[: budget - len(nodes)]]
    return {path: log_probs[path] for path in nodes}, fed or [[()]]


def check_grown(policy, row, draft, plan, budget, fill, fed):
    """Assert that a row holds the tree of the specification, in its node order, and that it was fed as there."""
    depth, width = plan
    expected, expected_fed = grow_by_hand(draft, depth, width, budget, policy.knobs, fill)
    check_tree(policy.tree, row)
    check_greedy_first(policy.tree, row, draft, min(depth, budget))
    num_nodes = int(policy.tree.num_nodes[row])
    assert num_nodes <= budget
    assert paths_of(policy.tree, row, num_nodes)[1:] == list(expected)
    assert policy.tree.log_probs[row, 1 : num_nodes + 1].tolist() == [float(value) for value in expected.values()]
    assert [level[row] for level in fed[: len(expected_fed)]] == expected_fed
    assert not any(level[row] for level in fed[len(expected_fed) :])


# --- growth ---


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
    knobs = TreeKnobs(depth_min=1, width_min=1, threshold=threshold)
    policy = AdaptiveTree(len(plans) + 1, max_nodes, "cpu", knobs)
    sizes = (policy.max_nodes, policy.max_depth, policy.num_candidates, policy.max_frontier)
    assert sizes == (max_nodes, min(8, max_nodes), 10, 10)
    drafts = [FakeDraft(seed + row, policy.num_candidates, sureness) for row in range(len(plans))]
    set_plans(policy, plans)
    fed = grow(policy, drafts, list(range(len(plans))), budget, fill)
    budget = min(budget, max_nodes)
    assert len(fed) == max(1, min(budget, max(depth for depth, _ in plans)))
    for row, (draft, plan) in enumerate(zip(drafts, plans, strict=True)):
        check_grown(policy, row, draft, plan, budget, fill, fed)


@quick
@given(seed=st.integers(0, 10**6), sureness=st.sampled_from([0.1, 1.0, 5.0]), budget=st.integers(0, 64))
def test_growth_without_lookahead_is_the_specification(seed, sureness, budget):
    """Catches: a tree that starts with the plan of the step before."""
    policy = AdaptiveTree(3, 64, "cpu", TreeKnobs(lookahead=False))
    drafts = [FakeDraft(seed + row, 10, sureness) for row in range(3)]
    fed = grow(policy, drafts, [2, 0, 1], budget)
    assert len(fed) == max(1, min(8, budget))
    for row, draft in enumerate(drafts):
        alpha = confidence(torch.from_numpy(draft(())[0])[None], 10)[0]
        check_grown(policy, row, draft, (int(3 + alpha * 5), int(2 + (1 - alpha) * 8)), budget, False, fed)


# --- mutations ---


def grown_example():
    """Grow one wide tree of depth 6; return what `check_grown` wants."""
    policy, draft, plan = AdaptiveTree(1, 64, "cpu"), FakeDraft(5, 10, 1.0), (6, 8)
    set_plans(policy, [plan])
    return policy, 0, draft, plan, 64, False, grow(policy, [draft], [0], 64)


def last_threshold(right):
    """Give every level the last one's threshold."""
    return lambda knobs: right(knobs)[:, :1].expand(-1, knobs.depth_max).contiguous() + math.log(knobs.depth_max)


def first_width(right):
    """Make every level as wide as the first (no eq. 12)."""
    return lambda knobs, num: right(knobs, num)[:, :1].expand(-1, knobs.depth_max, -1).contiguous()


@pytest.mark.parametrize(("name", "mutation"), [("log_thresholds", last_threshold), ("width_bounds", first_width)])
def test_mutations_of_growth(monkeypatch, name, mutation):
    """Each is seen to fail `check_grown`, which the example passes without them; of the kernel: tests/kernels."""
    check_grown(*grown_example())
    monkeypatch.setattr(adaptive_module, name, mutation(getattr(adaptive_module, name)))
    with pytest.raises(AssertionError):
        check_grown(*grown_example())


# --- what is no number ---


@pytest.mark.parametrize("works_in_torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "make", [lambda: AdaptiveTree(3, 25, "cpu"), lambda: StaticTree(3, "cpu")], ids=["sage", "static"]
)
@quick
@given(
    seed=st.integers(0, 10**6),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
    share=st.sampled_from([0.02, 0.5, 1.0]),
    fill=st.booleans(),
)
def test_logits_that_are_no_numbers(make, works_in_torch, seed, poison, share, fill):
    """A draft whose arithmetic overflows: its trees are worthless and nothing else. Catches: a plan, a confidence, a
    parent or a token out of its range, which a device would read past its tables."""
    generator, num_tokens = torch.Generator().manual_seed(seed), 40
    rows = [2, 0]

    def candidates_of(level, nodes):
        shape = (nodes.numel(), num_tokens)
        logits = torch.randn(shape, generator=generator)
        logits = logits.masked_fill(torch.rand(shape, generator=generator) < share, poison)
        return candidates(logits, policy.num_candidates, policy.needs_log_probs)

    with pytest.MonkeyPatch.context() as patch:
        if works_in_torch:
            work_in_torch(patch)
        policy = make()
        for num_accepted in ([-1, 3], [0, 5], [2, -1]):
            accepted = torch.tensor(num_accepted, dtype=torch.int32)
            drive(policy, rows, candidates_of, policy.max_nodes, fill, accepted)
            for row in range(len(rows)):
                check_tree(policy.tree, row)
                used = policy.tree.tokens[row, 1 : 1 + int(policy.tree.num_nodes[row])]
                assert ((used >= 0) & (used < num_tokens)).all()
            if isinstance(policy, AdaptiveTree):
                assert ((policy.confidence >= 0) & (policy.confidence <= 1)).all()
