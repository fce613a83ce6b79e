"""The adaptive tree (SAGE): growth against a slow specification, confidence, plans, history, budgets, mutations."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.drafting.test_tree import FakeDraft, check_greedy_first, check_tree, grow, paths_of, work_in_torch
from vidspec_kernels import tree_grow as tree_grow_module
from vllm_vidspec.drafting import AdaptiveTree, SageKnobs, StaticTree, candidates
from vllm_vidspec.drafting import adaptive as adaptive_module
from vllm_vidspec.errors import VidSpecError

quick = settings(max_examples=60, deadline=None)


# --- the specification, slow and plain ---


def width_by_hand(width, level, parent_log_prob):
    """SAGE eq. 12, halves rounded up; the first level has the whole width."""
    if level == 1:
        return width
    parent_prob = Fraction(math.exp(parent_log_prob))
    return max(1, math.floor(Fraction(width, level) * (Fraction(1, 2) + parent_prob) + Fraction(1, 2)))


def grow_by_hand(draft, depth, width, budget, knobs, fill):
    """Return the tree as {path: log-probability}, in node order, and the paths fed on each level.

    Depth and width are the request's plan. Every sum is one of float32 numbers, as the path's probability is.
    """
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


def plans_of(policy, rows):
    """Return the (depth, width) that the next trees of these rows will have."""
    return list(zip(policy._depths[rows].tolist(), policy._widths[rows].tolist(), strict=True))


def set_plans(policy, plans):
    """Give rows 0, 1, ... these plans, as a `finish` would."""
    depths = torch.tensor([depth for depth, _ in plans])
    policy._depths[: len(plans)], policy._widths[: len(plans)] = depths, torch.tensor([width for _, width in plans])
    policy._host_depths.send(np.arange(len(plans)), depths)


def sure_table(num_rows, num_candidates, sureness):
    """Return log-probabilities from uniform (0) to one sure token (1), and tokens."""
    probs = torch.full((num_candidates,), (1.0 - sureness) / num_candidates)
    probs[0] += sureness
    return probs.log().repeat(num_rows, 1), torch.arange(num_candidates).repeat(num_rows, 1)


def step_with(policy, sureness, rows=(0,), max_nodes=64):
    """Run a step whose candidates all are as sure as given; return the number of draft forwards."""
    rows = list(rows)
    num_levels = policy.begin(torch.tensor(rows), np.array(rows), max_nodes)
    width = 1
    for level in range(num_levels):
        frontier = policy.extend(level, *sure_table(len(rows) * width, policy.num_candidates, sureness))
        width = frontier[0].shape[1] if frontier else 0
    policy.finish(False)
    return num_levels


# --- growth ---


@settings(quick, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    sureness=st.sampled_from([0.3, 1.0, 3.0]),
    plans=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 10)), min_size=1, max_size=4),
    budget=st.integers(0, 64),
    threshold=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    fill=st.booleans(),
)
# A deep request beside a shallow one with much more room for others.
@example(seed=1, sureness=1.0, plans=[(2, 10), (8, 2)], budget=10, threshold=0.0, fill=False)
def test_growth_is_the_specification(seed, sureness, plans, budget, threshold, fill):
    """Catches: a wrong width or threshold at any level, another order, a frontier with the wrong nodes, a budget that
    the greedy path does not have, leaves that are not the best of what is left; ties decided by chance."""
    knobs = SageKnobs(depth_min=1, width_min=1, threshold=threshold)
    policy = AdaptiveTree(len(plans) + 1, 64, "cpu", knobs)
    drafts = [FakeDraft(seed + row, policy.num_candidates, sureness) for row in range(len(plans))]
    set_plans(policy, plans)
    fed = grow(policy, drafts, list(range(len(plans))), budget, fill)
    assert len(fed) == max(1, min(budget, max(depth for depth, _ in plans)))
    for row, (draft, plan) in enumerate(zip(drafts, plans, strict=True)):
        check_grown(policy, row, draft, plan, budget, fill, fed)


@quick
@given(
    seed=st.integers(0, 10**6), fill=st.booleans(), budget=st.integers(1, 64), num_steps=st.integers(1, 3),
    use_lookahead=st.booleans(),
)  # fmt: skip
def test_a_batch_is_its_requests(seed, fill, budget, num_steps, use_lookahead):
    """Catches: a request whose tree, confidence or history depends on its neighbours or its place in the batch."""
    knobs = SageKnobs(use_lookahead=use_lookahead)
    together = AdaptiveTree(8, 64, "cpu", knobs)
    alone = [AdaptiveTree(8, 64, "cpu", knobs) for _ in range(8)]
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        rows = rng.permutation(8).tolist()
        num_accepted = torch.from_numpy(rng.integers(-1, 7, 8).astype(np.int32))
        drafts = [FakeDraft(int(rng.integers(10**6)), 10, rng.choice([0.2, 1.0, 4.0])) for _ in rows]
        together.observe(torch.tensor(rows), num_accepted)
        grow(together, drafts, rows, budget, fill)
        for place, row in enumerate(rows):
            own = alone[row]
            own.observe(torch.tensor([row]), num_accepted[place : place + 1])
            grow(own, drafts[place : place + 1], [row], budget, fill)
            for name in ("tokens", "parents", "depths", "ancestors", "log_probs", "num_nodes"):
                assert torch.equal(getattr(together.tree, name)[place], getattr(own.tree, name)[0])
    for row, own in enumerate(alone):
        assert plans_of(own, [row]) == plans_of(together, [row])
        assert own.max_depths[row] == together.max_depths[row] and own.confidence[row] == together.confidence[row]


@quick
@given(seed=st.integers(0, 10**6), budget=st.integers(0, 64), fill=st.booleans())
def test_torch_and_numpy_arrays_agree(seed, budget, fill):
    """Catches: a rule of numpy's that torch does not share, in the text that both run."""
    rng = np.random.default_rng(seed)
    policies = [AdaptiveTree(4, 64, "cpu")]
    with pytest.MonkeyPatch.context() as patch:
        work_in_torch(patch)
        policies.append(AdaptiveTree(4, 64, "cpu"))
        states = [rng.integers(-1, 7, 3).astype(np.int32) for _ in range(3)]
        for num_accepted in states:
            policies[1].observe(torch.tensor([3, 0, 1]), torch.from_numpy(num_accepted))
            grow(policies[1], [FakeDraft(seed + row, 10) for row in range(3)], [3, 0, 1], budget, fill)
    for num_accepted in states:
        policies[0].observe(torch.tensor([3, 0, 1]), torch.from_numpy(num_accepted))
        grow(policies[0], [FakeDraft(seed + row, 10) for row in range(3)], [3, 0, 1], budget, fill)
    first, second = policies
    for name in ("tokens", "parents", "depths", "ancestors", "log_probs", "num_nodes"):
        assert torch.equal(getattr(first.tree, name)[:3], getattr(second.tree, name)[:3])
    assert torch.equal(first.max_depths, second.max_depths)
    torch.testing.assert_close(first.confidence, second.confidence, rtol=0, atol=1e-6)


@quick
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 64))
def test_fill_meets_the_budget(seed, budget):
    """Catches: too few or too many nodes where vLLM has fixed their number; other nodes changed by the leaves."""
    policy = AdaptiveTree(2, 64, "cpu", SageKnobs(width_max=10))
    drafts = [FakeDraft(seed, 10, 0.2), FakeDraft(seed + 1, 10, 5.0)]
    set_plans(policy, [(3, 10), (8, 2)])
    unfilled = AdaptiveTree(2, 64, "cpu", SageKnobs(width_max=10))
    set_plans(unfilled, [(3, 10), (8, 2)])
    fed = grow(policy, drafts, [0, 1], budget, fill=True)
    grow(unfilled, drafts, [0, 1], budget, fill=False)
    for row in range(2):
        num_candidates = sum(len(level[row]) for level in fed) * policy.num_candidates
        assert int(policy.tree.num_nodes[row]) == min(budget, num_candidates)
        grown = int(unfilled.tree.num_nodes[row])
        for name in ("tokens", "parents", "depths", "ancestors", "log_probs"):
            columns = slice(1, grown + 1)
            assert torch.equal(getattr(policy.tree, name)[row, columns], getattr(unfilled.tree, name)[row, columns])


def test_unusable_candidates_do_no_harm():
    """Catches: NaN or -inf from a broken draft taken as a node, an endless or crashing step."""
    policy = AdaptiveTree(1, 64, "cpu")
    for value in (float("nan"), -float("inf")):
        num_levels = policy.begin(torch.tensor([0]), np.array([0]), 64)
        width = 1
        for level in range(num_levels):
            log_probs = torch.full((width, 10), value)
            if value == -float("inf"):
                log_probs[:, 0] = 0.0  # all that a grammar allows
            frontier = policy.extend(level, log_probs, torch.arange(10).repeat(width, 1))
            width = frontier[0].shape[1] if frontier else 0
            assert width <= 1
        policy.finish(True)
        check_tree(policy.tree, 0)
        assert policy.tree.num_nodes[0] == num_levels
        assert 0.0 <= policy.confidence[0] <= 1.0


# --- the tables ---


@pytest.mark.parametrize("knobs", [SageKnobs(), SageKnobs(depth_min=1, depth_max=20, width_max=64, threshold=0.3)])
def test_tables_are_the_papers_formulas(knobs):
    """Catches: a level counted from 0, a bound for the wrong rank, rounding other than half up."""
    thresholds = adaptive_module.log_thresholds(knobs)
    bounds = adaptive_module.width_bounds(knobs, knobs.width_max)
    assert thresholds.dtype == bounds.dtype == torch.float32
    for depth in range(1, knobs.depth_max + 1):
        for level in range(1, depth + 1):
            assert thresholds[depth, level - 1].exp() == pytest.approx(knobs.threshold * level / depth, rel=1e-5)
    for width in range(1, knobs.width_max + 1, 3):
        for level in range(1, knobs.depth_max + 1):
            for parent_log_prob in (0.0, -0.1, -0.5, -1.3, -3.0):
                allowed = (bounds[width, level - 1] <= parent_log_prob).tolist()
                limit = min(width_by_hand(width, level, parent_log_prob), knobs.width_max)
                assert allowed == [True] * limit + [False] * (knobs.width_max - limit)


# --- confidence ---


def confidence_by_hand(log_probs, top_k):
    """SAGE eq. 7-9 in float64."""
    probs = [math.exp(value) for value in log_probs[:top_k]]
    shares = [prob / sum(probs) for prob in probs]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return 1 - entropy / math.log(top_k)


@quick
@given(
    seed=st.integers(0, 2**32), scale=st.sampled_from([0.1, 1.0, 10.0, 60.0]), top_k=st.integers(2, 10),
    num_lost=st.integers(0, 9),
)  # fmt: skip
def test_confidence_is_one_minus_the_normalised_entropy(seed, scale, top_k, num_lost):
    """Catches: all candidates instead of the top k, no renormalisation, log of another base, NaN from -inf; and checks
    what alpha says of the best token, p_1 >= k^(alpha - 1)."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * scale
    log_probs = logits.log_softmax(1).sort(dim=1, descending=True).values[:, :10].contiguous()
    log_probs[:, 10 - num_lost :] = -float("inf")
    alpha = adaptive_module.confidence(log_probs, top_k)
    assert alpha.dtype == torch.float32 and alpha.min() >= 0 and alpha.max() <= 1
    for row in range(3):
        assert alpha[row].item() == pytest.approx(confidence_by_hand(log_probs[row].tolist(), top_k), abs=2e-6)
        best = (log_probs[row, 0] - log_probs[row, :top_k].logsumexp(0)).exp().item()
        assert best >= top_k ** (alpha[row].item() - 1) - 1e-5


def test_the_papers_bound_does_not_hold():
    """Two equal tokens of ten: alpha is 1 - log 2 / log 10, p_1 is 0.5 = k^(alpha - 1), and SAGE's lemma 4.3 (eq. 13)
    would promise 1 / k + alpha (k - 1) / k = 0.73. So nothing here relies on it."""
    alpha = adaptive_module.confidence(torch.tensor([[math.log(0.5)] * 2 + [-float("inf")] * 8]), 10).item()
    assert 10 ** (alpha - 1) == pytest.approx(0.5, abs=1e-5)
    assert 0.1 + alpha * 0.9 > 0.72


def test_confidence_at_its_ends():
    """Catches: a uniform or certain distribution beyond [0, 1] by rounding, NaN from NaN."""
    inf = float("inf")
    log_probs = torch.tensor([[-2.3] * 10, [0.0] + [-inf] * 9, [float("nan")] * 10, [0.0] + [-90.0] * 9])
    alpha = adaptive_module.confidence(log_probs, 10)
    assert alpha.tolist() == pytest.approx([0.0, 1.0, 0.0, 1.0], abs=1e-6)
    assert alpha[1] == alpha[3] == 1.0


# --- plans ---


@quick
@given(sureness=st.floats(0.0, 1.0), low=st.integers(1, 4), high=st.integers(4, 12))
def test_a_plan_follows_confidence(sureness, low, high):
    """Catches: eq. 10 and 11 swapped, rounded up or to nearest, minimum and maximum confused."""
    knobs = SageKnobs(depth_min=low, depth_max=high, width_min=low, width_max=high, use_history=False)
    policy = AdaptiveTree(3, 64, "cpu", knobs)
    assert plans_of(policy, [0]) == [((low + high) // 2, (low + high) // 2)]  # alpha 0.5
    step_with(policy, sureness, rows=(2,))
    alpha = policy.confidence[2]
    assert alpha == adaptive_module.confidence(sure_table(1, policy.num_candidates, sureness)[0], 10)[0]
    expected = int(low + alpha * (high - low)), int(low + (1 - alpha) * (high - low))
    assert plans_of(policy, [0, 2]) == [((low + high) // 2, (low + high) // 2), expected]
    assert step_with(policy, sureness, rows=(2,)) == expected[0]
    assert step_with(policy, sureness, rows=(0, 2)) == max(expected[0], (low + high) // 2)


def test_lookahead_uses_the_confidence_of_the_step_before():
    """Catches: a step shaped by its own entropy where the host must know its depth before, and the reverse."""
    ahead = AdaptiveTree(1, 64, "cpu", SageKnobs())
    own = AdaptiveTree(1, 64, "cpu", SageKnobs(use_lookahead=False))
    assert step_with(ahead, 1.0) == 5 and ahead.tree.depths[0].max() == 5  # alpha 0.5
    assert step_with(ahead, 0.0) == 8 and ahead.tree.depths[0].max() == 8
    assert step_with(ahead, 0.0) == 3 and ahead.tree.depths[0].max() == 3
    assert step_with(own, 1.0) == 8 and own.tree.depths[0].max() == 8
    assert step_with(own, 0.0) == 8 and own.tree.depths[0].max() == 3
    nodes = slice(1, int(own.tree.num_nodes[0]) + 1)
    assert own.tree.depths[0, nodes].eq(1).sum() == 10 and own.tree.num_nodes[0] > 10


@quick
@given(seed=st.integers(0, 10**6), sureness=st.sampled_from([0.1, 1.0, 5.0]), budget=st.integers(0, 64))
def test_growth_without_lookahead_is_the_specification(seed, sureness, budget):
    """Catches: a tree that starts with the plan of the step before."""
    policy = AdaptiveTree(3, 64, "cpu", SageKnobs(use_lookahead=False))
    drafts = [FakeDraft(seed + row, 10, sureness) for row in range(3)]
    fed = grow(policy, drafts, [2, 0, 1], budget)
    assert len(fed) == max(1, min(8, budget))
    for row, draft in enumerate(drafts):
        alpha = adaptive_module.confidence(torch.from_numpy(draft(())[0])[None], 10)[0]
        check_grown(policy, row, draft, (int(3 + alpha * 5), int(2 + (1 - alpha) * 8)), budget, False, fed)


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 8])
def test_a_budget_below_the_depth_is_the_chain(budget):
    """Catches: a truncated step that spends its budget on other nodes, or runs forwards for nothing."""
    policy = AdaptiveTree(1, 64, "cpu")
    step_with(policy, 1.0)
    assert step_with(policy, 0.9, max_nodes=budget) == budget
    assert policy.tree.parents[0, : budget + 1].tolist() == list(range(-1, budget))
    assert int(policy.tree.num_nodes[0]) == budget


def test_buffers_smaller_than_the_paper():
    """Catches: a depth or a frontier that does not fit a small K."""
    for max_nodes in (1, 2, 3, 6):
        policy, draft = AdaptiveTree(1, max_nodes, "cpu"), FakeDraft(1, 10, 0.1)
        for _ in range(2):
            plan = plans_of(policy, [0])[0]
            fed = grow(policy, [draft], [0], 64, fill=True)
            check_grown(policy, 0, draft, plan, max_nodes, True, fed)


# --- history ---


def history_by_hand(lengths, knobs):
    """Return the maximum depth after each step; None is a step without verification."""
    depth, seen, depths = knobs.depth_max, [], []
    for length in lengths:
        if length is not None:
            seen = [*seen, length][-knobs.history_window :]
            mean = Fraction(sum(seen), len(seen))
            depth += (mean > Fraction(knobs.history_high)) - (mean < Fraction(knobs.history_low))
            depth = min(max(depth, knobs.depth_min), knobs.depth_max)
        depths.append(depth)
    return depths


def check_history(policy, row, lengths):
    depths = []
    for length in lengths:
        policy.observe(torch.tensor([row]), torch.tensor([-1 if length is None else length], dtype=torch.int32))
        depths.append(int(policy.max_depths[row]))
    assert depths == history_by_hand(lengths, policy.knobs)


@settings(quick, max_examples=200)
@given(
    lengths=st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=40),
    window=st.integers(1, 12),
    low=st.sampled_from([0.0, 1.5, 2.0]),
    high=st.sampled_from([2.0, 3.0, 4.5]),
)
@example(lengths=[0, None, None, 0], window=10, low=2.0, high=3.0)  # not four steps down
@example(lengths=[0, 0, 0, 0, 9, 1, None, 1], window=2, low=2.0, high=3.0)  # the 9 stays in the window
def test_history_moves_the_maximum_depth(lengths, window, low, high):
    """Catches: a window of another size, a mean that counts empty places, steps without verification counted, depths
    beyond their bounds, a change at the thresholds themselves."""
    knobs = SageKnobs(history_window=window, history_low=low, history_high=high)
    check_history(AdaptiveTree(3, 64, "cpu", knobs), 1, lengths)


def test_history_by_hand():
    """Catches: no hysteresis between 2 and 3; the thresholds themselves leave the depth alone."""
    policy = AdaptiveTree(1, 64, "cpu")
    # Means: 0, 0, 4 / 3, 2, 2.4, 3, 3 3/7, then down.
    lengths = [0, 0, 4, 4, 4, 6, 6]
    check_history(policy, 0, lengths)
    assert history_by_hand(lengths, policy.knobs) == [7, 6, 5, 5, 5, 5, 6]
    for _ in range(20):
        policy.observe(torch.tensor([0]), torch.tensor([0], dtype=torch.int32))
    assert policy.max_depths.tolist() == [3]
    for _ in range(20):
        policy.observe(torch.tensor([0]), torch.tensor([5], dtype=torch.int32))
    assert policy.max_depths.tolist() == [8]


def test_history_limits_the_next_plan():
    """Catches: a maximum depth that is measured and never used, or used with confidence left out."""
    policy = AdaptiveTree(2, 64, "cpu")
    for _ in range(3):
        policy.observe(torch.tensor([0]), torch.tensor([0], dtype=torch.int32))
    step_with(policy, 1.0, rows=(0, 1))
    assert plans_of(policy, [0, 1]) == [(5, 2), (8, 2)]
    assert step_with(policy, 1.0, rows=(0,)) == 5
    assert step_with(policy, 1.0, rows=(1, 0)) == 8
    assert [int(policy.tree.depths[row].max()) for row in range(2)] == [8, 5]


def test_admit_forgets():
    """Catches: a request that inherits the plan, the confidence or the history of its row's last owner, also while the
    plan of the last step is still on its way."""
    policy = AdaptiveTree(3, 64, "cpu")
    for _ in range(5):
        policy.observe(torch.tensor([0, 2]), torch.tensor([0, 0], dtype=torch.int32))
    step_with(policy, 1.0, rows=(0, 2))
    policy.admit(np.array([2]))
    assert policy.confidence[[0, 2]].tolist() == [1.0, 0.5]
    assert policy.max_depths.tolist() == [3, 8, 8]
    assert plans_of(policy, [0, 2]) == [(3, 2), (5, 6)]
    assert step_with(policy, 0.5, rows=(0,)) == 3
    assert step_with(policy, 0.5, rows=(2,)) == 5
    check_history(policy, 2, [3, 1, 0, 0])


def test_history_can_be_off():
    """Catches: a knob that does nothing."""
    policy = AdaptiveTree(1, 64, "cpu", SageKnobs(use_history=False))
    for _ in range(9):
        policy.observe(torch.tensor([0]), torch.tensor([0], dtype=torch.int32))
    assert policy.max_depths.tolist() == [8]


# --- knobs ---


@pytest.mark.parametrize(
    "wrong",
    [
        dict(depth_min=0), dict(depth_min=9), dict(depth_max=65), dict(width_min=0), dict(width_min=11),
        dict(width_max=65), dict(entropy_top_k=1), dict(entropy_top_k=65), dict(threshold=-0.1), dict(threshold=1.1),
        dict(history_window=0), dict(history_low=3.5), dict(history_low=-1.0),
    ],
)  # fmt: skip
def test_wrong_knobs_are_one_clear_line(wrong):
    """Catches: a value accepted that no tree can have."""
    with pytest.raises(VidSpecError, match=f"^adaptive tree: .*{next(iter(wrong))}") as error:
        SageKnobs(**wrong)
    assert "\n" not in str(error.value)


def test_defaults_are_the_papers():
    """Catches: a default that drifts (SAGE, section 5.1), and the sizes that the engine reads."""
    knobs = SageKnobs()
    assert (knobs.depth_min, knobs.depth_max, knobs.width_min, knobs.width_max) == (3, 8, 2, 10)
    assert (knobs.entropy_top_k, knobs.threshold, knobs.history_window) == (10, 0.1, 10)
    assert (knobs.history_low, knobs.history_high) == (2.0, 3.0)
    policy = AdaptiveTree(1, 64, "cpu")
    assert (policy.max_nodes, policy.max_depth, policy.num_candidates, policy.max_frontier) == (64, 8, 10, 10)
    assert AdaptiveTree(1, 64, "cpu", SageKnobs(entropy_top_k=20)).num_candidates == 20


# --- mutations ---


def grown_example(budget=20):
    """Grow one wide tree of depth 6; return what `check_grown` wants."""
    policy, draft, plan = AdaptiveTree(1, 64, "cpu"), FakeDraft(5, 10, 1.0), (6, 8)
    set_plans(policy, [plan])
    fed = grow(policy, [draft], [0], budget)
    return policy, 0, draft, plan, budget, False, fed


def test_the_mutated_example_is_right():
    """The example of the mutations below passes without them, and its budget binds."""
    example = grown_example()
    check_grown(*example)
    assert example[0].tree.num_nodes[0] == 20


def test_mutation_greedy_path_not_reserved(monkeypatch):
    """Mutation: other nodes take the greedy path's places. Seen to fail `check_grown`."""
    right = adaptive_module.tree_grow

    def unreserved(buffers, *args, level, **kwargs):
        if level == 1:
            buffers.next_free -= 4
        return right(buffers, *args, level=level, **kwargs)

    monkeypatch.setattr(adaptive_module, "tree_grow", unreserved)
    with pytest.raises(AssertionError):
        check_grown(*grown_example())


def test_mutation_threshold_not_scaled_by_level(monkeypatch):
    """Mutation: every level has the last one's threshold. Seen to fail `check_grown`."""
    right = adaptive_module.log_thresholds
    monkeypatch.setattr(
        adaptive_module,
        "log_thresholds",
        lambda knobs: right(knobs)[:, :1].expand(-1, knobs.depth_max).contiguous() + math.log(knobs.depth_max),
    )
    with pytest.raises(AssertionError):
        check_grown(*grown_example(budget=64))


def test_mutation_width_does_not_decay(monkeypatch):
    """Mutation: every level is as wide as the first (no eq. 12). Seen to fail `check_grown`."""
    right = adaptive_module.width_bounds
    monkeypatch.setattr(
        adaptive_module,
        "width_bounds",
        lambda knobs, num: right(knobs, num)[:, :1].expand(-1, knobs.depth_max, -1).contiguous(),
    )
    with pytest.raises(AssertionError):
        check_grown(*grown_example(budget=64))


def test_mutation_a_siblings_bit(monkeypatch):
    """Mutation: a node's mask also has the node before it. Seen to fail `check_grown`."""
    bits = tree_grow_module._OWN_BITS
    monkeypatch.setattr(tree_grow_module, "_OWN_BITS", bits | np.roll(bits, 1))
    with pytest.raises(AssertionError):
        check_grown(*grown_example())


def test_mutation_the_targets_own_token_counts(monkeypatch):
    """Mutation: acceptance lengths with the target's own token. Seen to fail `check_history`."""
    policy = AdaptiveTree(1, 64, "cpu")
    right = policy.observe
    monkeypatch.setattr(policy, "observe", lambda rows, num_accepted: right(rows, num_accepted + 1))
    with pytest.raises(AssertionError):
        check_history(policy, 0, [1, 1, 3, 4, 2])


# --- what is no number ---


def step_on_logits(policy, logits_of, rows, fill):
    """Run a step on logits, as the engine's drafter does; return the number of draft forwards."""
    num_levels = policy.begin(torch.tensor(rows), np.array(rows), policy.max_nodes)
    width = 1
    for level in range(num_levels):
        found = candidates(logits_of(len(rows) * width), policy.num_candidates, policy.needs_log_probs)
        frontier = policy.extend(level, *found)
        width = frontier[0].shape[1] if frontier else 0
    policy.finish(fill)
    return num_levels


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
    """A draft whose arithmetic overflows: its trees are worthless and nothing else.

    Catches: a plan, a parent or a token out of its range, which a device would read past its tables.
    """
    generator, num_tokens = torch.Generator().manual_seed(seed), 40
    rows = [2, 0]

    def logits_of(num_rows):
        logits = torch.randn(num_rows, num_tokens, generator=generator)
        return logits.masked_fill(torch.rand(num_rows, num_tokens, generator=generator) < share, poison)

    with pytest.MonkeyPatch.context() as patch:
        if works_in_torch:
            work_in_torch(patch)
        policy = make()
        for num_accepted in ([-1, 3], [0, 5], [2, -1]):
            policy.observe(torch.tensor(rows), torch.tensor(num_accepted, dtype=torch.int32))
            assert 1 <= step_on_logits(policy, logits_of, rows, fill) <= policy.max_depth
            for row in range(len(rows)):
                check_tree(policy.tree, row)
                used = policy.tree.tokens[row, 1 : 1 + int(policy.tree.num_nodes[row])]
                assert ((used >= 0) & (used < num_tokens)).all()


@pytest.mark.parametrize("garbage", [-(2**63), -1, 0, 9, 2**62])
def test_depths_from_the_device_are_not_trusted(garbage):
    """Catches: a loop over levels that the buffers do not have, sized by a word that the device never wrote."""
    policy = AdaptiveTree(3, 64, "cpu")
    policy._host_depths.send(np.array([1, 2]), torch.tensor([5, garbage]))
    knobs = policy.knobs
    assert knobs.depth_min <= step_with(policy, 0.5, [1, 2]) <= knobs.depth_max


def test_the_plan_is_sent_after_the_first_forward():
    """While it shapes nothing before the step ends. Catches: a host that waits for the last level of a draft, a plan
    that changes the tree whose root made it."""
    policy = AdaptiveTree(1, 64, "cpu")
    before = plans_of(policy, [0])
    policy.begin(torch.tensor([0]), np.array([0]), 64)
    policy.extend(0, *sure_table(1, policy.num_candidates, 1.0))
    assert policy._host_depths.read()[0] == policy.knobs.depth_max != before[0][0]
    assert plans_of(policy, [0]) == before
    policy.finish(False)
    assert plans_of(policy, [0]) == [(policy.knobs.depth_max, policy.knobs.width_min)]


@pytest.mark.gpu
@pytest.mark.parametrize("use_lookahead", [True, False])
def test_the_gpu_grows_the_same_trees(use_lookahead):
    """Catches: a kernel, a torch rule or a late host copy that makes another tree on the GPU."""
    knobs = SageKnobs(use_lookahead=use_lookahead)
    policies = [AdaptiveTree(5, 64, device, knobs) for device in ("cpu", "cuda")]
    generator = torch.Generator().manual_seed(0)
    rows_np = np.array([4, 1, 2])
    for step in range(12):
        # Unequal enough that no rounding decides a plan.
        table = (torch.randn(3, 9, 64, 400, generator=generator) * (1 + step % 4)).log_softmax(-1).sort(descending=True)
        log_probs, ids = table.values[..., :10], table.indices[..., :10]
        num_accepted = torch.randint(-1, 7, (3,), generator=generator, dtype=torch.int32)
        trees = []
        for policy in policies:
            device = policy.tree.device
            rows = torch.from_numpy(rows_np).to(device)
            policy.observe(rows, num_accepted.to(device))
            nodes = torch.zeros(3, 1, dtype=torch.int64, device=device)
            for level in range(policy.begin(rows, rows_np, 64)):
                at = (torch.arange(3)[:, None], level, nodes.cpu())
                frontier = policy.extend(
                    level, log_probs[at].flatten(0, 1).to(device), ids[at].flatten(0, 1).to(device)
                )
                nodes = frontier[0] if frontier else nodes
            policy.finish(step % 2 == 0)
            buffers = (policy.tree.tokens, policy.tree.parents, policy.tree.ancestors, policy.tree.num_nodes)
            trees.append([buffer.cpu() for buffer in buffers])
        assert all(torch.equal(first, second) for first, second in zip(*trees, strict=True))
