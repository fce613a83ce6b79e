"""tree_plan: how deep and wide the next tree of each request is (SAGE), in one launch; one program a request."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check, check_contiguous
from vidspec_kernels.dispatch import Impl, launcher, on_host, use_triton
from vidspec_kernels.draft_tree.tables import TreePlans

# Stands for less (-inf, NaN): its exp vanishes beside 1, and so does the product of both.
LEAST_LOGIT = -80.0


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _tree_plan_kernel(
    log_probs_ptr,  # [R, num_candidates]
    rows_ptr,  # [R]
    max_depths_ptr,  # [max_reqs + 1]
    next_confidence_ptr, next_depths_ptr, next_widths_ptr,  # [R]
    num_candidates, log_top_k, depth_min, width_min, width_range, least_logit,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    req_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + req_idx)
    i = tl.arange(0, BLOCK)
    log_probs_ptr += req_idx * num_candidates
    logit = tl.load(log_probs_ptr + i, mask=i < TOP_K, other=-float("inf")) - tl.load(log_probs_ptr)
    logit = tl.where(logit > least_logit, logit, least_logit)
    weight = tl.where(i < TOP_K, tl.exp(logit), 0.0)
    total = tl.sum(weight, axis=0)
    entropy = tl.log(total) - tl.sum(weight * logit, axis=0) / total
    alpha = tl.minimum(tl.maximum(1.0 - entropy / log_top_k, 0.0), 1.0)
    depth = (depth_min + alpha * (tl.load(max_depths_ptr + row) - depth_min)).to(tl.int64)
    width = (width_min + (1.0 - alpha) * width_range).to(tl.int64)
    tl.store(next_confidence_ptr + req_idx, alpha)
    tl.store(next_depths_ptr + req_idx, depth)
    tl.store(next_widths_ptr + req_idx, width)


def tree_plan(plans: TreePlans, rows: Tensor, log_probs: Tensor, *, impl: Impl = "auto") -> None:
    """Turn the confidence of a step's roots into depths and widths (SAGE eq. 10, 11).

    Args:
        plans: In and out: `next_confidence`, `next_depths` and `next_widths` of batch rows 0 to R - 1.
        rows: int64 [R], persistent row of each batch row; only padding rows may be equal.
        log_probs: float32 [R, C >= top_k], of the root's candidates, descending.
    """
    num_reqs, rules = len(rows), plans.rules
    check(plans.device, rows=(rows, torch.int64, 0))
    check_contiguous(plans.device, log_probs=(log_probs, torch.float32, [num_reqs], rules.top_k))
    assert num_reqs <= plans.max_num_reqs, f"{num_reqs} rows, {plans.max_num_reqs} fit"
    if num_reqs == 0:
        return
    if not use_triton(impl, plans.device):
        on_host(impl, plans.device, "tree_plan")(plans, rows, log_probs)
        return
    launcher(_tree_plan_kernel, (num_reqs,), plans.device)(
        log_probs, rows, plans.max_depths, *plans.adopted[:3], log_probs.shape[1],
        math.log(rules.top_k), float(rules.depth_min), float(rules.width_min),
        float(rules.width_max - rules.width_min), LEAST_LOGIT,
        TOP_K=rules.top_k, BLOCK=triton.next_power_of_2(rules.top_k), num_warps=1,
    )  # fmt: skip


def confidence(log_probs: Tensor, top_k: int) -> Tensor:
    """Return how sure the draft is: alpha = 1 - H / log k of its top-k probabilities, renormalised (SAGE eq. 7-9).

    It bounds the best token's share from below: p_1 >= e^-H = k^(alpha - 1). (The paper's lemma 4.3 claims
    p_1 >= 1 / k + alpha (k - 1) / k, which two equally likely tokens contradict.)

    Args:
        log_probs: float32 [n, C >= k], descending.
        top_k: k >= 2.

    Returns:
        float32 [n], in [0, 1]: 0 where all k are equally likely, and for a row without probabilities (NaN); 1 where
        one token has everything.
    """
    logits = log_probs[:, :top_k] - log_probs[:, :1]
    logits = torch.where(logits > LEAST_LOGIT, logits, LEAST_LOGIT)
    weights = logits.exp()
    total = weights.sum(1)
    entropy = total.log() - (weights * logits).sum(1) / total
    return (1.0 - entropy / math.log(top_k)).clamp(0.0, 1.0)
