"""tree_accept: the longest path of a draft tree that equals the target's own samples; one program a request."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, array_module, as_array, at_least, at_most, check_vector, launcher, use_triton

MAX_TREE_DRAFTS = 64  # a node's ancestors are the bits of one word


# Vectors that may be slices of others: no variant for each alignment.
@triton.jit(do_not_specialize_on_alignment=["target_tokens_ptr", "draft_tokens_ptr", "cu_num_logits_ptr", "rows_ptr"])
def _tree_accept_kernel(
    # [N]
    target_tokens_ptr,
    # [N]
    draft_tokens_ptr,
    # [R + 1]
    cu_num_logits_ptr,
    # [R]
    rows_ptr,
    # [max_reqs, num_cols]
    parents_ptr,
    parents_stride,
    # [max_reqs, num_cols]
    depths_ptr,
    depths_stride,
    # [max_reqs, num_cols]
    ancestors_ptr,
    ancestors_stride,
    # [R, num_cols]
    sampled_ptr,
    sampled_stride,
    # [R]
    num_sampled_ptr,
    # [R, num_cols]
    path_ptr,
    path_stride,
    num_cols,
    BLOCK: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx)
    num_logits = tl.minimum(tl.load(cu_num_logits_ptr + req_idx + 1) - start, num_cols)
    req_state_idx = tl.load(rows_ptr + req_idx)
    ancestors_ptr += req_state_idx * ancestors_stride

    node = tl.arange(0, BLOCK)
    in_tree = node < num_logits
    is_draft = (node >= 1) & in_tree
    parent = tl.load(parents_ptr + req_state_idx * parents_stride + node, mask=is_draft, other=0)
    depth = tl.load(depths_ptr + req_state_idx * depths_stride + node, mask=is_draft, other=0)
    ancestors = tl.load(ancestors_ptr + node, mask=is_draft, other=0)
    target = tl.load(target_tokens_ptr + start + node, mask=in_tree, other=-1)
    draft = tl.load(draft_tokens_ptr + start + node, mask=is_draft, other=-1)
    expected = tl.load(target_tokens_ptr + start + parent, mask=is_draft, other=-1)

    # Distinct bits: their sum is their union. The shift stays in range where no draft is; no draft stands there.
    one = tl.full([BLOCK], 1, tl.int64)
    bit = one << tl.minimum(tl.maximum(node - 1, 0), 63).to(tl.int64)
    matches = tl.sum(tl.where((draft == expected) & (draft >= 0), bit, 0), axis=0)
    accepted = is_draft & ((ancestors & ~matches) == 0)
    # One maximum for the greatest depth and, within it, the lowest node; the root's is BLOCK - 1.
    key = tl.max(tl.where(accepted, depth * BLOCK + (BLOCK - 1 - node), BLOCK - 1), axis=0)
    last = BLOCK - 1 - key % BLOCK
    num_sampled = tl.minimum(key // BLOCK + 1, num_logits)
    tl.store(num_sampled_ptr + req_idx, num_sampled)

    path_nodes = tl.load(ancestors_ptr + last, mask=last >= 1, other=0)
    on_path = (is_draft & ((path_nodes & bit) != 0)) | ((node == 0) & in_tree)
    beyond = (node >= num_sampled) & (node < num_cols)  # here `node` counts columns
    path_ptr += req_idx * path_stride
    sampled_ptr += req_idx * sampled_stride
    tl.store(path_ptr + depth, node, mask=on_path)
    tl.store(path_ptr + node, node, mask=beyond)
    tl.store(sampled_ptr + depth, target, mask=on_path)
    tl.store(sampled_ptr + node, tl.zeros([BLOCK], tl.int64), mask=beyond)


def tree_accept(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    max_drafts: int,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest path of each request's draft tree that equals what the target sampled itself.

    The rule of `accept_chain` on trees: a node stands iff it and every draft above it is the target's sample at its
    parent. Siblings may hold the same token, so several paths can stand; the deepest wins, of several equally deep
    ones that with the lowest last node. All emitted tokens are the target's own.

    A request's tree has node 0 (the root, its last committed token) and drafts 1..K with parents[i] < i, so that its
    first rows are a tree too; a request may have fewer rows than its tree has nodes. The root's entries of `parents`
    and `depths` are not read, and those of nodes without a row do not matter.

    Args:
        target_tokens: int64 [N], the target's sample at each logits row.
        draft_tokens: int64 [N], input token of each logits row: row i of a request is its node i; -1 = not a draft,
            never accepted.
        cu_num_logits: int32 [R + 1], first logits row of each request; at most max_drafts + 1 rows a request.
        rows: int64 [R], persistent row (`req_state_idx`) of each batch row.
        parents: int32 [max_reqs, >= K + 1], parent of each node; unit stride in its rows, as the next two.
        depths: int32 [max_reqs, >= K + 1], depth of each node; 0 for the root.
        ancestors: int64 [max_reqs, >= K + 1]; bit j - 1 of node i: node j is i or above it. 0 for the root.
        max_drafts: K, 1 to 64.
        impl: See `dispatch.use_triton`.

    Returns:
        sampled: int64 [R, K + 1], the emitted tokens of each request, then zeros.
        num_sampled: int32 [R], 1 + accepted drafts; 0 for a request without rows.
        path: int32 [R, K + 1], the accepted node at each depth from the root on, then each column's own index.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    device = target_tokens.device
    check_vector("target_tokens", target_tokens, torch.int64, device)
    check_vector("draft_tokens", draft_tokens, torch.int64, device)
    check_vector("cu_num_logits", cu_num_logits, torch.int32, device, min_len=1)
    assert target_tokens.shape == draft_tokens.shape, f"{target_tokens.shape} target rows, {draft_tokens.shape} drafts"
    assert 1 <= max_drafts <= MAX_TREE_DRAFTS, f"max_drafts {max_drafts}"
    num_reqs, num_cols = cu_num_logits.shape[0] - 1, max_drafts + 1
    check_vector("rows", rows, torch.int64, device, num_reqs)
    assert rows.shape[0] == num_reqs, f"rows: expected {num_reqs} entries, got {rows.shape[0]}"
    for name, table, dtype in (
        ("parents", parents, torch.int32),
        ("depths", depths, torch.int32),
        ("ancestors", ancestors, torch.int64),
    ):
        assert table.dtype == dtype and table.device == device and table.ndim == 2, f"{name}: {dtype} of two dimensions"
        assert table.shape[1] >= num_cols and table.stride(1) == 1, f"{name}: {num_cols} columns of unit stride"
        assert table.shape[0] == parents.shape[0], f"{name}: {table.shape[0]} rows, parents {parents.shape[0]}"
    if not use_triton(impl, device):
        return tree_accept_reference(
            target_tokens, draft_tokens, cu_num_logits, rows, parents, depths, ancestors, max_drafts
        )
    sampled = target_tokens.new_empty(num_reqs, num_cols)
    num_sampled = cu_num_logits.new_empty(num_reqs)
    path = cu_num_logits.new_empty(num_reqs, num_cols)
    if num_reqs > 0:
        launcher(_tree_accept_kernel, (num_reqs,), device)(
            target_tokens,
            draft_tokens,
            cu_num_logits,
            rows,
            parents,
            parents.stride(0),
            depths,
            depths.stride(0),
            ancestors,
            ancestors.stride(0),
            sampled,
            sampled.stride(0),
            num_sampled,
            path,
            path.stride(0),
            num_cols,
            BLOCK=triton.next_power_of_2(num_cols),
        )
    return sampled, num_sampled, path


def tree_accept_reference(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    rows: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    max_drafts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `tree_accept` does, in numpy or torch without a loop: the specification. Same arguments and results."""
    xp = array_module(rows.device)
    num_cols, num_reqs, num_rows = max_drafts + 1, rows.shape[0], target_tokens.shape[0]
    bounds = xp.asarray(as_array(cu_num_logits), dtype=xp.int64)[:, None]  # [R + 1, 1]
    num_logits = bounds[1:] - bounds[:-1]  # [R, 1]
    col = as_array(torch.arange(num_cols, device=rows.device))  # [K + 1]
    path = col[None] + xp.zeros_like(num_logits)  # [R, K + 1]
    if num_rows == 0:
        return target_tokens.new_zeros(path.shape), _int32(num_logits[:, 0]), _int32(path)
    state_row = as_array(rows)
    row = at_most(bounds[:-1] + col, num_rows - 1)  # [R, K + 1]
    target = as_array(target_tokens)[row]
    req_idx = as_array(torch.arange(num_reqs, device=rows.device))[:, None]

    # Of the drafts, [R, K]. Nodes without a row may say anything; none is the ancestor of one that has a row.
    node = col[1:]  # [K]
    parent = at_most(at_least(as_array(parents)[state_row][:, 1:num_cols], 0), max_drafts)
    depth = xp.asarray(as_array(depths)[state_row][:, 1:num_cols], dtype=xp.int64)
    above = as_array(ancestors)[state_row]  # [R, >= K + 1]
    draft = as_array(draft_tokens)[row][:, 1:]
    bit = 1 << col[:-1]  # [K]
    is_draft = node < num_logits
    stands = (draft == target[req_idx, parent]) & (draft >= 0)
    matches = (stands * bit).sum(1)[:, None]  # distinct bits: their sum is their union
    accepted = is_draft & ((above[:, 1:num_cols] & ~matches) == 0)

    # One maximum for the greatest depth and, within it, the lowest node: depth * (K + 1) - node; 0 for the root.
    key = xp.amax(accepted * (depth * num_cols - node), 1)[:, None]  # [R, 1]
    last_depth = (key + max_drafts) // num_cols
    on_path = (above[req_idx, last_depth * num_cols - key] & bit) != 0
    # A node that is not on the path writes what is there already, the root at depth 0.
    path[req_idx, depth * on_path] = node * on_path
    num_sampled = xp.minimum(last_depth + 1, num_logits)
    sampled = target[req_idx, path] * (col < num_sampled)
    return torch.as_tensor(sampled), _int32(num_sampled[:, 0]), _int32(path)


def _int32(array: Any) -> Tensor:
    return torch.as_tensor(array).to(torch.int32)
