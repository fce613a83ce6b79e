"""What SAGE decides before it grows a tree: the tables of its formulas, plans and history. Confidence and history by
themselves: tests/kernels/test_tree_plan.py and test_tree_begin.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import drive, plans_of, quick, width_by_hand
from vidspec_kernels import dispatch
from vidspec_kernels.draft_tree.plan import confidence
from vllm_vidspec.config import TreeKnobs
from vllm_vidspec.drafting import AdaptiveTree
from vllm_vidspec.drafting import adaptive as adaptive_module


def sure_table(num_rows, num_candidates, sureness):
    """Return log-probabilities from uniform (0) to one sure token (1), and tokens."""
    probs = torch.full((num_candidates,), (1.0 - sureness) / num_candidates)
    probs[0] += sureness
    return probs.log().repeat(num_rows, 1), torch.arange(num_candidates).repeat(num_rows, 1)


def step_with(policy, sureness, rows=(0,), max_nodes=64):
    """Run a step whose candidates all are as sure as given; return the number of draft forwards."""
    return drive(
        policy, list(rows), lambda _, nodes: sure_table(nodes.numel(), policy.num_candidates, sureness), max_nodes
    )


# --- the tables ---


@pytest.mark.parametrize("knobs", [TreeKnobs(), TreeKnobs(depth_min=1, depth_max=20, width_max=32, threshold=0.3)])
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


# --- plans ---


@quick
@given(sureness=st.floats(0.0, 1.0), low=st.integers(1, 4), high=st.integers(4, 12))
def test_a_plan_follows_confidence(sureness, low, high):
    """Catches: eq. 10 and 11 swapped, rounded up or to nearest, minimum and maximum confused."""
    knobs = TreeKnobs(depth_min=low, depth_max=high, width_min=low, width_max=high, history=0)
    policy = AdaptiveTree(3, 64, "cpu", knobs)
    assert plans_of(policy, [0]) == [((low + high) // 2, (low + high) // 2)]  # alpha 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "load_loops", dict)  # the loop adds in another order
        step_with(policy, sureness, rows=(2,))
    alpha = policy.confidence[2]
    assert alpha == confidence(sure_table(1, policy.num_candidates, sureness)[0], 10)[0]
    expected = int(low + alpha * (high - low)), int(low + (1 - alpha) * (high - low))
    assert plans_of(policy, [0, 2]) == [((low + high) // 2, (low + high) // 2), expected]
    assert step_with(policy, sureness, rows=(2,)) == expected[0]
    assert step_with(policy, sureness, rows=(0, 2)) == max(expected[0], (low + high) // 2)


def test_lookahead_uses_the_confidence_of_the_step_before():
    """Catches: a step shaped by its own entropy where the host must know its depth before, and the reverse."""
    ahead = AdaptiveTree(1, 64, "cpu", TreeKnobs())
    own = AdaptiveTree(1, 64, "cpu", TreeKnobs(lookahead=False))
    assert step_with(ahead, 1.0) == 5 and ahead.tree.depths[0].max() == 5  # alpha 0.5
    assert step_with(ahead, 0.0) == 8 and ahead.tree.depths[0].max() == 8
    assert step_with(ahead, 0.0) == 3 and ahead.tree.depths[0].max() == 3
    assert step_with(own, 1.0) == 8 and own.tree.depths[0].max() == 8
    assert step_with(own, 0.0) == 8 and own.tree.depths[0].max() == 3
    nodes = slice(1, int(own.tree.num_nodes[0]) + 1)
    assert own.tree.depths[0, nodes].eq(1).sum() == 10 and own.tree.num_nodes[0] > 10


# --- history ---


def tell(policy, length, rows=(0,), times=1):
    """Tell these rows the acceptance length of a step, None for a step without verification."""
    for _ in range(times):
        accepted = torch.full((len(rows),), -1 if length is None else length, dtype=torch.int32)
        policy.begin(torch.tensor(rows), accepted, 64)


def test_history_limits_the_next_plan():
    """Catches: a maximum depth that is measured and never used, or used with confidence left out; lengths that count
    the target's own token."""
    policy = AdaptiveTree(2, 64, "cpu")
    tell(policy, 0, times=3)
    step_with(policy, 1.0, rows=(0, 1))
    assert plans_of(policy, [0, 1]) == [(5, 2), (8, 2)]
    assert step_with(policy, 1.0, rows=(0,)) == 5
    assert step_with(policy, 1.0, rows=(1, 0)) == 8
    assert [int(policy.tree.depths[row].max()) for row in range(2)] == [8, 5]


def test_admit_forgets():
    """Catches: a request that inherits the plan, the confidence or the history of its row's last owner, also while the
    plan of the last step is still on its way."""
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
    knobs = policy.knobs
    assert knobs.depth_min <= step_with(policy, 0.5, [1, 2]) <= knobs.depth_max


def test_the_plan_is_sent_after_the_first_forward():
    """While it shapes nothing before the step ends. Catches: a host that waits for the last level of a draft, a plan
    that changes the tree whose root made it."""
    policy = AdaptiveTree(1, 64, "cpu")
    before = plans_of(policy, [0])
    rows = torch.tensor([0])
    policy.begin(rows, torch.tensor([-1], dtype=torch.int32), 64)
    policy.extend(0, *sure_table(1, policy.num_candidates, 1.0), rows=rows, max_nodes=64)
    policy.send(np.array([0]))
    assert policy._host_depths.read()[0] == policy.knobs.depth_max != before[0][0]
    assert plans_of(policy, [0]) == before
    policy.finish(False, rows=rows, max_nodes=64)
    assert plans_of(policy, [0]) == [(policy.knobs.depth_max, policy.knobs.width_min)]
