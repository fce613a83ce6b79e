"""visual_relevance: one step, against a dense product with torch.topk.

`batch` is requests x text rows of each, and every request has `num_tokens` video tokens of its own. The peer gets the
stored rows densely, of float8 stores in the queries' dtype, and unit queries: neither is timed. The floor counts the
stored rows once, in the store's dtype.
"""

from typing import Any

import torch

from benchmarks.kernels.timing import DEVICE, ON_GPU, Case
from vidspec_kernels import storage_scale, store_states, visual_relevance

AXES: dict[str, list[Any]] = {
    "store": ["bfloat16"], "hidden": [5120], "batch": ["1x6", "1x26", "8x26"], "num_tokens": [25_000], "top_n": [10],
}  # fmt: skip
TINY = {"store": ["bfloat16", "float8_e4m3fn"], "hidden": [128], "batch": ["2x3"], "num_tokens": [200], "top_n": [10]}
ROUNDS = 30
BLOCK_ROWS = 64


def case(store: str, hidden: int, batch: str, num_tokens: int, top_n: int) -> Case:
    dtype, query_dtype = getattr(torch, store), torch.bfloat16 if ON_GPU else torch.float32
    num_reqs, num_queries = map(int, batch.split("x"))
    generator = torch.Generator(DEVICE).manual_seed(0)
    max_blocks = -(-num_tokens // BLOCK_ROWS)
    num_blocks = num_reqs * max_blocks
    blocks = torch.randperm(num_blocks, generator=generator, device=DEVICE).view(num_reqs, max_blocks)
    fill = torch.full((num_blocks,), BLOCK_ROWS, dtype=torch.int32, device=DEVICE)
    fill[blocks[:, -1]] = num_tokens - (max_blocks - 1) * BLOCK_ROWS
    # Rows beyond the last block's fill hold states too. By chunks: a float32 copy would be gigabytes.
    paged = torch.empty(num_blocks, BLOCK_ROWS, hidden, dtype=dtype, device=DEVICE)
    for slots in torch.arange(num_blocks * BLOCK_ROWS, device=DEVICE).split(8192):
        states = torch.randn(len(slots), hidden, generator=generator, device=DEVICE)
        store_states(states, slots - slots[0], slots, paged)
    queries = torch.randn(num_reqs * num_queries, hidden, generator=generator, device=DEVICE).to(query_dtype)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=DEVICE) * num_queries
    rows = torch.arange(num_reqs, device=DEVICE)
    counts = torch.full((num_reqs,), max_blocks, dtype=torch.int32, device=DEVICE)
    arguments = (queries, starts, rows, paged, fill, blocks.int(), counts, top_n, num_queries, max_blocks)

    scale = storage_scale(dtype, hidden)
    # Through bytes: float8 cannot be indexed everywhere.
    dense = paged.view(torch.uint8)[blocks].view(dtype).flatten(1, 2)[:, :num_tokens]
    dense = dense.to(query_dtype).transpose(1, 2)  # [R, hidden, num_tokens]
    units = torch.nn.functional.normalize(queries.float(), dim=1).to(query_dtype)
    units = units.view(num_reqs, num_queries, hidden)
    calls = {
        "triton" if ON_GPU else "torch": lambda: visual_relevance(*arguments),
        "matmul_topk": lambda: (torch.bmm(units, dense) / scale).topk(top_n, dim=2).values.flatten(0, 1),
    }
    return Case(
        calls,
        num_bytes=num_reqs * num_tokens * hidden * dtype.itemsize,
        flops=2 * num_reqs * num_queries * num_tokens * hidden,
        dtype=query_dtype,
        results=dict.fromkeys(calls, lambda result: result),
    )
