"""tree_finish: what follows the last level of draft trees, in one launch; one program a request."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launcher, on_host, use_triton
from vidspec_kernels.draft_tree.tables import TreePlans, TreeTables

# The bits of infinity: what is no candidate has these or more.
_INF_BITS = 0x7F800000
_NUM_SORTED = 256  # candidates that a program sorts at a time, or as many as there are nodes


@dataclass(frozen=True)
class Leaves:
    """Candidates that may become leaves, checked once; rows may be apart, a row is contiguous."""

    log_probs: Tensor  # float32 [R, P, C], of the path to the candidate, <= 0; -inf or NaN = none
    token_ids: Tensor  # int64 [R, P, C]
    parents: Tensor  # int64 [R, P], node index of each C candidates' parent

    def __post_init__(self) -> None:
        num_reqs, num_parents, num_candidates = self.log_probs.shape
        shape = ([num_reqs], [num_parents], [num_candidates])
        check(
            self.log_probs.device, log_probs=(self.log_probs, torch.float32, *shape),
            token_ids=(self.token_ids, torch.int64, *shape), parents=(self.parents, torch.int64, *shape[:2]),
        )  # fmt: skip
        for name in ("log_probs", "token_ids", "parents"):
            is_dense = num_reqs == 0 or getattr(self, name)[0].is_contiguous()
            assert is_dense, f"{name}: expected contiguous rows"
        assert self.log_probs.stride(0) == self.token_ids.stride(0) or num_reqs <= 1, "token_ids: another stride"


@triton.jit(
    do_not_specialize=["total", "max_nodes", "leaves_stride", "parents_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "leaf_log_probs_ptr", "leaf_tokens_ptr", "leaf_parents_ptr"],
)
def _tree_finish_kernel(
    tree_tokens_ptr, tree_parents_ptr, tree_depths_ptr, tree_ancestors_ptr, tree_log_probs_ptr,  # [R, num_cols]
    tree_num_nodes_ptr,  # [R]
    next_free_ptr,  # [R]; None: the number of nodes is there
    leaf_log_probs_ptr, leaf_tokens_ptr, leaves_stride,  # [R, total]; None: nothing is appended
    leaf_parents_ptr, parents_stride,  # [R, total // num_candidates]
    rows_ptr,  # [R]; None: no plan is adopted
    next_confidence_ptr, next_depths_ptr, next_widths_ptr,  # [R]
    confidence_ptr, depths_ptr, widths_ptr,  # [max_reqs + 1]
    num_cols, num_candidates, total, max_nodes,
    BEST: tl.constexpr, CHUNK: tl.constexpr, INF_BITS: tl.constexpr,
):  # fmt: skip
    req_idx = tl.program_id(0).to(tl.int64)
    if next_free_ptr is None:
        num_nodes = tl.load(tree_num_nodes_ptr + req_idx)
    else:
        num_nodes = (tl.load(next_free_ptr + req_idx) - 1).to(tl.int32)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + req_idx)
        confidence = tl.load(next_confidence_ptr + req_idx)
        depth = tl.load(next_depths_ptr + req_idx)
        width = tl.load(next_widths_ptr + req_idx)
        tl.store(confidence_ptr + row, confidence)
        tl.store(depths_ptr + row, depth)
        tl.store(widths_ptr + row, width)

    if leaf_log_probs_ptr is not None:
        leaf_log_probs_ptr += req_idx * leaves_stride
        leaf_tokens_ptr += req_idx * leaves_stride
        leaf_parents_ptr += req_idx * parents_stride
        # Keys that no two candidates share, the best one's the highest: of numbers <= 0 the bits without the sign rise
        # as the number falls, and the index decides between equal ones.
        least = -(tl.full([BEST], 0x7FFFFFFF, tl.int64) << 32)
        best = least
        for first in range(0, total, CHUNK):
            i = first + tl.arange(0, CHUNK)
            score = tl.load(leaf_log_probs_ptr + i, mask=i < total, other=-float("inf"))
            bits = tl.abs(score).to(tl.int32, bitcast=True).to(tl.int64)
            key = -((bits << 32) | i.to(tl.int64))
            best = tl.topk(tl.reshape(tl.join(best, tl.topk(key, BEST)), [2 * BEST]), BEST)
        best = -best
        is_leaf = (best >> 32) < INF_BITS
        j = tl.arange(0, BEST)
        num_leaves = tl.minimum(tl.sum(is_leaf.to(tl.int32), axis=0), max_nodes - num_nodes)
        is_new = j < num_leaves
        source = (best & 0xFFFFFFFF).to(tl.int32)
        node = num_nodes + 1 + j
        parent = tl.load(leaf_parents_ptr + source // num_candidates, mask=is_new, other=0)
        tree = req_idx * num_cols
        leaf_depth = tl.load(tree_depths_ptr + tree + parent, mask=is_new, other=0) + 1
        own_bit = tl.full([BEST], 1, tl.int64) << tl.where(is_new, node - 1, 0).to(tl.int64)
        ancestors = tl.load(tree_ancestors_ptr + tree + parent, mask=is_new, other=0) | own_bit
        token = tl.load(leaf_tokens_ptr + source, mask=is_new, other=0)
        score = tl.load(leaf_log_probs_ptr + source, mask=is_new, other=0.0)
        tl.store(tree_tokens_ptr + tree + node, token, mask=is_new)
        tl.store(tree_parents_ptr + tree + node, parent.to(tl.int32), mask=is_new)
        tl.store(tree_depths_ptr + tree + node, leaf_depth, mask=is_new)
        tl.store(tree_ancestors_ptr + tree + node, ancestors, mask=is_new)
        tl.store(tree_log_probs_ptr + tree + node, score, mask=is_new)
        num_nodes += num_leaves
    tl.store(tree_num_nodes_ptr + req_idx, num_nodes)


def tree_finish(
    tree: TreeTables, num_reqs: int, *, next_free: Tensor | None = None, leaves: Leaves | None = None,
    max_nodes: int = 0, plans: TreePlans | None = None, rows: Tensor | None = None, impl: Impl = "auto",
) -> None:  # fmt: skip
    """End a step for batch rows 0 to num_reqs - 1: count the nodes, fill the trees up, adopt the plans it has made.

    Leaves are the most probable candidates, appended best first, of equal ones the lower index first, until a tree has
    `max_nodes` nodes or its candidates are used up.

    Args:
        tree: In and out.
        num_reqs: R.
        next_free: int64 [>= R], one more than the nodes that each tree has; None: `tree.num_nodes` has the count.
        leaves: What trees are filled up with; None: they are not.
        max_nodes: At most K, at least what any of the trees has.
        plans: In and out: those of this step become those of `rows`; None: nothing is adopted.
        rows: int64 [R], persistent row of each batch row; only padding rows may be equal.
    """
    device = tree.device
    assert 0 <= num_reqs <= len(tree.num_nodes), f"{num_reqs} requests, {len(tree.num_nodes)} fit"
    check(device, next_free=(next_free, torch.int64, num_reqs))
    if leaves is not None:
        assert len(leaves.log_probs) == num_reqs, f"leaves: of {len(leaves.log_probs)} requests, not {num_reqs}"
        assert leaves.log_probs.device == device, f"leaves: expected {device}"
        assert 0 <= max_nodes < tree.num_cols, f"max_nodes {max_nodes}, {tree.num_cols - 1} fit"
    if plans is not None:
        assert rows is not None, "rows: None"
        check(device, rows=(rows, torch.int64, [num_reqs]))
    if num_reqs == 0:
        return
    if not use_triton(impl, device):
        on_host(impl, device, "tree_finish")(tree, num_reqs, next_free, leaves, max_nodes, plans, rows)
        return
    adopted = (None,) * 7 if plans is None else (rows, *plans.adopted)
    candidates: tuple[Any, ...] = (None, None, 0, None, 0)
    num_candidates, total, block = 1, 0, max(16, triton.next_power_of_2(tree.num_cols - 1))
    if leaves is not None:
        log_probs, parents = leaves.log_probs, leaves.parents
        candidates = (log_probs, leaves.token_ids, log_probs.stride(0), parents, parents.stride(0))
        num_candidates, total = log_probs.shape[2], log_probs[0].numel()
    launcher(_tree_finish_kernel, (num_reqs,), device)(
        *tree.tensors, next_free, *candidates, *adopted, tree.num_cols, num_candidates, total, max_nodes,
        BEST=block, CHUNK=max(_NUM_SORTED, block), INF_BITS=_INF_BITS,
    )  # fmt: skip
