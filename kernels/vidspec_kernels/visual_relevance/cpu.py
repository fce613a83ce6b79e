"""Loops of `visual_relevance`, around a product of torch."""

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.compiled import compiled, precedes
from vidspec_kernels.visual_relevance.reference import STRIP_ENTRIES, visual_relevance_reference
from vidspec_kernels.visual_relevance.store import storage_scale


@compiled("float32[:, :, :], int32[:], int64[:, :], float32, float32[:, :]")
def _select(cosines, cu_num_logits, sizes, scale, top):
    """Put the largest cosines of each row into `top`, descending, NaN before all others."""
    top_n = top.shape[1]
    for r in range(len(sizes)):
        for i in range(sizes[r, 0]):
            best = top[cu_num_logits[r] + i]
            for key in range(sizes[r, 1]):
                score = cosines[r, i, key] / scale
                if not precedes(score, best[top_n - 1]):
                    continue
                place = top_n - 1
                while place > 0 and precedes(score, best[place - 1]):
                    best[place] = best[place - 1]
                    place -= 1
                best[place] = score


@compiled(
    "float32[:, :], int32[:], int64[:], float32[:, :, :], int32[:], int32[:, :], int32[:], int64, "
    "float32[:, :, :], float32[:, :, :], int64[:, :]"
)
def _gather(queries, cu_num_logits, rows, store, block_fill, block_table, num_blocks, max_queries, units, keys, sizes):
    """Write each request's unit queries and its stored rows, and how many there are of both; the rest is left alone."""
    for r in range(len(rows)):
        first, row, num_keys = cu_num_logits[r], rows[r], 0
        sizes[r, 0] = min(cu_num_logits[r + 1] - first, max_queries)
        for i in range(sizes[r, 0]):
            total = np.float32(0.0)
            for d in range(queries.shape[1]):
                total += queries[first + i, d] * queries[first + i, d]
            norm = np.sqrt(total)
            scale = np.float32(1.0) / norm if not norm <= 0.0 else np.float32(0.0)
            for d in range(queries.shape[1]):
                units[r, i, d] = queries[first + i, d] * scale
        for column in range(min(num_blocks[row], block_table.shape[1])):
            block = block_table[row, column]
            for slot in range(block_fill[block]):
                for d in range(queries.shape[1]):
                    keys[r, num_keys, d] = store[block, slot, d]
                num_keys += 1
        sizes[r, 1] = num_keys


def visual_relevance(
    queries: Tensor, cu_num_logits: Tensor, rows: Tensor, store: Tensor, block_fill: Tensor, block_table: Tensor,
    num_blocks: Tensor, top_n: int, max_queries: int, max_blocks: int,
) -> Tensor:  # fmt: skip
    """Do what `visual_relevance` does, with the products in torch; what is not float32 is the reference's."""
    if queries.dtype != torch.float32 or store.dtype != torch.float32:
        return visual_relevance_reference(
            queries, cu_num_logits, rows, store, block_fill, block_table, num_blocks, top_n, max_queries, max_blocks
        )
    (num_rows, hidden_size), num_reqs, num_keys = queries.shape, len(rows), max_blocks * store.shape[1]
    tables = (store, block_fill, block_table, num_blocks)
    scale = storage_scale(store.dtype, hidden_size)
    top = queries.new_full((num_rows, top_n), float("-inf"))
    per_strip = max(1, STRIP_ENTRIES // (num_keys * hidden_size))  # requests
    for first in range(0, num_reqs, per_strip):
        last = min(first + per_strip, num_reqs)
        strip, sizes = cu_num_logits[first : last + 1], np.empty((last - first, 2), dtype=np.int64)
        # Zeros: products of uninitialised memory would be wasted, or slow.
        units = queries.new_zeros(last - first, max_queries, hidden_size)
        keys = queries.new_zeros(last - first, num_keys, hidden_size)
        _gather(queries, strip, rows[first:last], *tables, max_queries, units, keys, sizes)
        _select(torch.bmm(units, keys.transpose(1, 2)), strip, sizes, scale, top)
    return top
