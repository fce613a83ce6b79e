"""`guidance_scores` in torch: the strips that run on a CPU."""

import itertools

import torch
import triton
from torch import Tensor

# float32 entries of one strip on the CPU, 8 MB of logits and as much of weights: shorter strips make slower products.
_STRIP_ENTRIES = 2**21


def _guidance_scores_torch(
    query: Tensor, key_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, query_pos: Tensor, out: Tensor,
    out_row: Tensor, num_keys: Tensor, scale: float, lse: Tensor | None, max_queries_per_req: int,
    scales: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Do the same with matrix products over strips of whole rows: each logit is computed once, not twice.

    Holds one KV head's keys in float32 and two strips of _STRIP_ENTRIES (or one row, if that is longer).
    """
    head_dim = query.shape[2]
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = query.shape[1] // num_kv_heads
    bounds = query_start_loc.tolist()
    for req_idx, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        pos = query_pos[start:end].repeat_interleave(group)  # [rows]: a query's heads, then the next query's
        first_limit, num_seen = int(pos.min()) + 1, int(pos.max()) + 1
        num_written = min(int(num_keys[req_idx]), out.shape[1], num_seen)
        if num_written <= 0:
            continue
        hidden = torch.arange(first_limit, num_seen, device=pos.device) > pos[:, None]  # [rows, num_seen - first_limit]
        blocks = block_table[req_idx, : triton.cdiv(num_seen, block_size)]
        sums = out[out_row[req_idx], :num_written]
        ones = query.new_ones(len(pos), dtype=torch.float32)
        strip = max(1, min(_STRIP_ENTRIES // num_seen, len(pos)))
        logits = query.new_empty(strip, num_seen, dtype=torch.float32)
        weights = torch.empty_like(logits)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            # [head_dim, keys]: of a cache that holds blocks as [head_dim, block_size], this order copies fastest.
            keys = key_cache[:, :, kv_head].transpose(1, 2).index_select(0, blocks).permute(1, 0, 2)
            keys = keys.reshape(head_dim, -1)[:, :num_seen].to(torch.float32)
            rows = query[start:end, heads].reshape(-1, head_dim)
            rows = rows.to(torch.float32) * scale
            for head_scale in scales:
                rows = rows if head_scale is None else rows * head_scale[kv_head]
            for top in range(0, len(pos), strip):
                size = min(strip, len(pos) - top)
                torch.mm(rows[top : top + size], keys, out=logits[:size])
                logits[:size, first_limit:].masked_fill_(hidden[top : top + size], float("-inf"))
                if lse is None:
                    torch.softmax(logits[:size], dim=1, out=weights[:size])
                else:
                    shift = lse[start:end, heads].reshape(-1, 1)[top : top + size]
                    torch.exp(logits[:size] - shift, out=weights[:size])
                sums += ones[top : top + size] @ weights[:size, :num_written]
