"""accept_chain: which drafts of a chain stand, by equality with the target's own samples; one program a request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, check_vector, launcher, use_triton


# Vectors that may be slices of others: no variant for each alignment.
@triton.jit(do_not_specialize_on_alignment=["target_tokens_ptr", "draft_tokens_ptr", "cu_num_logits_ptr"])
def _accept_chain_kernel(
    # [N]
    target_tokens_ptr,
    # [N]
    draft_tokens_ptr,
    # [R + 1]
    cu_num_logits_ptr,
    # [R, num_cols]
    sampled_ptr,
    sampled_stride,
    # [R]
    num_sampled_ptr,
    num_cols,
    BLOCK: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx)
    num_logits = tl.minimum(tl.load(cu_num_logits_ptr + req_idx + 1) - start, num_cols)

    col = tl.arange(0, BLOCK)
    target = tl.load(target_tokens_ptr + start + col, mask=col < num_logits, other=-1)
    draft = tl.load(draft_tokens_ptr + start + col + 1, mask=col + 1 < num_logits, other=-1)
    # The last row has no draft after it, so at least one column mismatches; -1 never stands.
    matches = (target == draft) & (draft >= 0) & (col + 1 < num_logits)
    num_accepted = tl.min(tl.where(matches, BLOCK, col), axis=0)
    num_sampled = tl.minimum(num_accepted + 1, num_logits)

    tl.store(num_sampled_ptr + req_idx, num_sampled)
    kept = tl.where(col < num_sampled, target, 0)
    tl.store(sampled_ptr + req_idx * sampled_stride + col, kept, mask=col < num_cols)


def accept_chain(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    max_drafts: int,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of each request's drafts that equals what the target sampled itself.

    Shared-noise coupling (METHODS 0; Daliri, Musco, Suresh 2025): the target is sampled at every logits row as
    vanilla decoding would; the draft fed at row j + 1 stands iff it is the target's sample at row j, and the first
    mismatch emits that sample. All emitted tokens are the target's own.

    Args:
        target_tokens: int64 [N], the target's sample at each logits row.
        draft_tokens: int64 [N], input token of each logits row: a request's first row is its root, the others are its
            drafts; -1 = not a draft, never accepted.
        cu_num_logits: int32 [R + 1], first logits row of each request; at most max_drafts + 1 rows a request.
        max_drafts: K >= 0.
        impl: See `dispatch.use_triton`.

    Returns:
        sampled: int64 [R, K + 1], the emitted tokens of each request, then zeros.
        num_sampled: int32 [R], 1 + accepted drafts; 0 for a request without rows.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    device = target_tokens.device
    check_vector("target_tokens", target_tokens, torch.int64, device)
    check_vector("draft_tokens", draft_tokens, torch.int64, device)
    check_vector("cu_num_logits", cu_num_logits, torch.int32, device, min_len=1)
    assert target_tokens.shape == draft_tokens.shape, f"{target_tokens.shape} target rows, {draft_tokens.shape} drafts"
    assert max_drafts >= 0, f"max_drafts {max_drafts}"
    if not use_triton(impl, device):
        return accept_chain_reference(target_tokens, draft_tokens, cu_num_logits, max_drafts)
    num_reqs = cu_num_logits.shape[0] - 1
    num_cols = max_drafts + 1
    sampled = target_tokens.new_empty(num_reqs, num_cols)
    num_sampled = cu_num_logits.new_empty(num_reqs)
    if num_reqs > 0:
        launcher(_accept_chain_kernel, (num_reqs,), device)(
            target_tokens,
            draft_tokens,
            cu_num_logits,
            sampled,
            sampled.stride(0),
            num_sampled,
            num_cols,
            BLOCK=triton.next_power_of_2(num_cols),
        )
    return sampled, num_sampled


def accept_chain_reference(
    target_tokens: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor, max_drafts: int
) -> tuple[Tensor, Tensor]:
    """Do what `accept_chain` does, in plain torch without a loop: the specification. Same arguments and results."""
    num_cols = max_drafts + 1
    starts = cu_num_logits[:-1].to(torch.int64)  # [R]
    num_logits = (cu_num_logits[1:] - cu_num_logits[:-1]).clamp(max=num_cols)  # [R]
    col = torch.arange(num_cols, device=target_tokens.device)  # [K + 1]
    if target_tokens.shape[0] == 0:
        return target_tokens.new_zeros(starts.shape[0], num_cols), torch.zeros_like(num_logits)
    last = target_tokens.shape[0] - 1
    row = starts[:, None] + col  # [R, K + 1]
    target = target_tokens[row.clamp(max=last)]
    draft = draft_tokens[(row + 1).clamp(max=last)]
    matches = (target == draft) & (draft >= 0) & (col + 1 < num_logits[:, None])
    num_accepted = matches.to(torch.int32).cumprod(dim=1).sum(dim=1)
    num_sampled = torch.minimum(num_accepted.to(torch.int32) + 1, num_logits)
    return target.where(col < num_sampled[:, None], 0), num_sampled
