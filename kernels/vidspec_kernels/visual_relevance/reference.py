"""`visual_relevance` and `merge_relevance` in torch: the specification."""

import torch
from torch import Tensor

from vidspec_kernels.float8 import as_bytes
from vidspec_kernels.visual_relevance.store import _unit, storage_scale

# float32 elements of stored rows that the reference holds at once: they stay near the core.
STRIP_ENTRIES = 2**20


def visual_relevance_reference(
    queries: Tensor, cu_num_logits: Tensor, rows: Tensor, store: Tensor, block_fill: Tensor, block_table: Tensor,
    num_blocks: Tensor, top_n: int, max_queries: int, max_blocks: int,
) -> Tensor:  # fmt: skip
    """Do what `visual_relevance` does, by batched products of whole requests, padded: the specification.

    Same arguments and result. Holds cosines and a float32 copy of the stored rows of as many requests as have
    STRIP_ENTRIES elements, or of one.
    """
    (num_rows, hidden_size), num_reqs, block_rows = queries.shape, rows.shape[0], store.shape[1]
    row, column, slot = (torch.arange(n, device=queries.device) for n in (num_rows, max_blocks, block_rows))
    req_idx = torch.searchsorted(cu_num_logits[1:].long(), row, right=True)  # R for rows of no request
    local = row - cu_num_logits[req_idx]
    inside = (req_idx < num_reqs) & (local >= 0) & (local < max_queries)  # [num_rows]
    # The last entry takes the rows of no request.
    at = torch.where(inside, req_idx * max_queries + local, num_reqs * max_queries)
    units = queries.new_zeros(num_reqs * max_queries + 1, hidden_size, dtype=torch.float32)
    units.index_copy_(0, at, _unit(queries))
    units = units[:-1].view(num_reqs, max_queries, hidden_size)

    listed = column < num_blocks[rows, None]  # [R, max_blocks]
    blocks = torch.where(listed, block_table[rows, :max_blocks], 0)
    fill = torch.where(listed, block_fill[blocks], 0)
    invalid = (slot >= fill[:, :, None]).view(num_reqs, 1, -1)  # [R, 1, max_blocks * block_rows]
    top = queries.new_full((num_reqs * max_queries + 1, top_n), float("-inf"), dtype=torch.float32)
    num_keys = max_blocks * block_rows
    size = min(top_n, num_keys)
    strips = top[:-1].view(num_reqs, max_queries, top_n)
    per_strip = max(1, STRIP_ENTRIES // (num_keys * hidden_size))
    for first in range(0, num_reqs, per_strip):
        chosen = slice(first, first + per_strip)
        keys = as_bytes(store).index_select(0, blocks[chosen].reshape(-1)).view(store.dtype)
        keys = keys.to(torch.float32).view(-1, num_keys, hidden_size)
        cosines = torch.bmm(units[chosen], keys.transpose(1, 2))
        # By selection: whatever is stored behind a block's valid rows, NaN included, is not used.
        cosines.masked_fill_(invalid[chosen], float("-inf"))
        strips[chosen, :, :size] = cosines.topk(size, dim=2).values
    scale = storage_scale(store.dtype, hidden_size)
    return top.index_select(0, at) if scale == 1 else top.index_select(0, at) / scale


def _merge_relevance_torch(partials: Tensor) -> Tensor:
    num_shards, _, top_n = partials.shape
    if num_shards == 1:
        top = partials[0].contiguous()
    else:
        top = partials.transpose(0, 1).flatten(1).topk(top_n, dim=1).values
    exists = top != float("-inf")
    return top.where(exists, 0.0).sum(dim=1) / exists.sum(dim=1).clamp_(min=1)
