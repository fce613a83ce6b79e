"""tree_plan: confidence, depths and widths, kernel and reference against the formulas in float64."""

import math

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.tree_buffers import RULES, make_growth, make_tables
from vidspec_kernels import TreePlans, tree_plan

BOTH = pytest.mark.parametrize("impl", ["triton", "torch", "numba"])


def confidence_by_hand(log_probs, top_k):
    """SAGE eq. 7-9 in float64."""
    probs = [math.exp(value) for value in log_probs[:top_k]]
    shares = [prob / sum(probs) for prob in probs]
    return 1 + sum(share * math.log(share) for share in shares if share > 0) / math.log(top_k)


def make_inputs(num_reqs, num_candidates, seed, device):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_reqs, 30, generator=generator) * torch.rand(num_reqs, 1, generator=generator) * 6
    log_probs = logits.log_softmax(1).sort(dim=1, descending=True).values[:, :num_candidates]
    return log_probs.contiguous().to(device), torch.randperm(num_reqs, generator=generator).to(device)


@BOTH
@pytest.mark.parametrize("adopts", [False, True])
@pytest.mark.parametrize(("num_reqs", "top_k", "num_candidates"), [(0, 2, 2), (1, 2, 9), (3, 5, 6), (33, 8, 8)])
def test_plans_are_the_formulas(device, impl, adopts, num_reqs, top_k, num_candidates):
    """Catches: candidates beyond the top k, eq. 10 and 11 swapped, another row's maximum depth, a plan that shapes
    trees before its step, one that does not where it must."""
    plans = TreePlans(num_reqs + 1, RULES._replace(top_k=top_k), device)
    plans.max_depths.copy_(torch.arange(num_reqs + 2) % 6 + 2)
    tables = (plans.confidence, plans.depths, plans.widths)
    for tensor in plans.adopted:
        tensor.fill_(-3)
    log_probs, rows = make_inputs(num_reqs, num_candidates, top_k, device)
    tree_plan(plans, rows, log_probs, adopts=adopts, impl=impl)
    for req, row in enumerate(rows.tolist()):
        alpha = plans.next_confidence[req].item()
        assert alpha == pytest.approx(confidence_by_hand(log_probs[req].tolist(), top_k), abs=2e-6)
        exact = 2 + alpha * (plans.max_depths[row].item() - 2), 2 + (1 - alpha) * 4
        planned = plans.next_depths[req].item(), plans.next_widths[req].item()
        for got, value in zip(planned, exact, strict=True):
            assert got in (int(value - 1e-5), int(value + 1e-5)), "not rounded down"
        adopted = (alpha, *planned) if adopts else (-3.0, -3, -3)
        assert tuple(table[row].item() for table in tables) == adopted
    untouched = [tensor[num_reqs:] for tensor in plans.adopted]
    assert all((tensor == -3).all() for tensor in untouched)


@BOTH
def test_what_is_no_number(device, impl):
    """Catches: a uniform or certain distribution beyond [0, 1] by rounding, NaN from NaN, a depth that is garbage."""
    inf = float("inf")
    log_probs = torch.tensor([[-2.3] * 5, [0.0] + [-inf] * 4, [float("nan")] * 5, [-inf] * 5, [0.0] + [-90.0] * 4])
    plans = TreePlans(5, RULES, device)
    plans.max_depths.fill_(7)
    rows = torch.tensor([4, 5, 5, 0, 5], device=device)  # 5: padding
    tree_plan(plans, rows, log_probs.to(device), adopts=True, impl=impl)
    assert plans.next_confidence.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0, 1.0], abs=2e-6)
    assert plans.next_depths.tolist() == [2, 7, 2, 2, 7]
    first, *others = plans.next_widths.tolist()
    assert others[0] == others[3] == 2 and {first, others[1], others[2]} <= {5, 6}  # alpha is 0 but for a rounding
    assert not plans.depths[1:4].any()


def test_kernel_equals_reference_at_a_real_size(device):
    """Catches: a rule that the kernel and the reference do not share."""
    results = []
    for impl in ("triton", "torch", "numba"):
        where = device if impl == "triton" else torch.device("cpu")
        plans = make_growth(make_tables(33, 8, where)).plans
        log_probs, rows = make_inputs(33, 10, 4, where)
        tree_plan(plans, rows, log_probs, adopts=True, impl=impl)
        results.append([tensor.cpu() for tensor in plans.adopted])
    for first, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(first, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", ["auto", "triton", "numba", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_plan")
    log_probs, rows = make_inputs(2, 5, 0, device)
    tree_plan(TreePlans(2, RULES, device), rows, log_probs, adopts=False, impl=impl)
    assert ran == [branch(impl, device)]


def test_wrapper_refuses(device):
    """Catches: a dropped check."""
    plans, (log_probs, rows) = TreePlans(2, RULES, device), make_inputs(2, 6, 0, device)
    for wrong_rows, wrong, message in (
        (rows.int(), log_probs, "rows"),
        (rows, log_probs.double(), "log_probs"),
        (rows, log_probs[:, :4].contiguous(), "log_probs: shape"),
        (rows, log_probs[:, :5], "log_probs: expected contiguous"),
        (rows[:1], log_probs, "log_probs: expected shape"),
        (rows.repeat(2), log_probs.repeat(2, 1), "4 rows, 2 fit"),
    ):
        with pytest.raises(AssertionError, match=message):
            tree_plan(plans, wrong_rows, wrong, adopts=False)
