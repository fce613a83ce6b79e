"""Special cases of the kernels, each written for itself in plain torch: what the one general kernel is held against."""

import torch


def accept_chains(target_tokens, draft_tokens, cu_num_logits, max_drafts):
    """`accept` of strict chains: the longest prefix of each request's drafts that equals the target's samples."""
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


def accept_trees(target_tokens, draft_tokens, cu_num_logits, max_drafts, trees):
    """`accept` of strict trees: by one union of the bits of all nodes that match."""
    num_cols, num_reqs, num_rows = max_drafts + 1, trees.rows.shape[0], target_tokens.shape[0]
    bounds = cu_num_logits.long()[:, None]  # [R + 1, 1]
    num_logits = bounds[1:] - bounds[:-1]  # [R, 1]
    col = torch.arange(num_cols, device=trees.rows.device)  # [K + 1]
    path = col.repeat(num_reqs, 1)
    row = (bounds[:-1] + col).clamp(max=num_rows - 1)  # [R, K + 1]
    target = target_tokens[row]
    req_idx = torch.arange(num_reqs, device=trees.rows.device)[:, None]
    node = col[1:]  # [K]
    parent = trees.parents[trees.rows][:, 1:num_cols].long().clamp(0, max_drafts)
    depth = trees.depths[trees.rows][:, 1:num_cols].long()
    above = trees.ancestors[trees.rows]  # [R, >= K + 1]
    draft = draft_tokens[row][:, 1:]
    bit = 1 << col[:-1]  # [K]
    stands = (draft == target[req_idx, parent]) & (draft >= 0)
    matches = (stands * bit).sum(1)[:, None]
    accepted = (node < num_logits) & ((above[:, 1:num_cols] & ~matches) == 0)
    # One maximum for the greatest depth and, within it, the lowest node.
    key = (accepted * (depth * num_cols - node)).amax(1)[:, None]  # [R, 1]
    last_depth = (key + max_drafts) // num_cols
    on_path = (above[req_idx, last_depth * num_cols - key] & bit) != 0
    path[req_idx, depth * on_path] = node * on_path
    num_sampled = torch.minimum(last_depth + 1, num_logits)
    sampled = target[req_idx, path] * (col < num_sampled)
    return sampled, num_sampled[:, 0].int(), path.int()
