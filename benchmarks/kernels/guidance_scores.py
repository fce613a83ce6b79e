"""guidance_scores: one layer of one request, against attention whose weights are all held at once.

`num_queries` text queries are the last of `num_keys` cached keys. On a GPU a second row gets the rows' log-sum-exps, as
the engine gets them from FlashAttention, and makes one pass. The floor counts one pass.
"""

from typing import Any

import torch

from benchmarks.kernels.timing import DEVICE, ON_GPU, Case
from vidspec_kernels import guidance_scores

# Heads, KV heads, head size; keys; queries.
AXES: dict[str, list[Any]] = {"shape": ["28x4x128"], "num_keys": [25_000], "num_queries": [16, 64]}
TINY = {"shape": ["8x2x64"], "num_keys": [64, 100], "num_queries": [16]}
ROUNDS = 7
BLOCK_SIZE = 32


def materialised(
    query: torch.Tensor, key_cache: torch.Tensor, block_table: torch.Tensor, query_pos: torch.Tensor,
    out: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """Add softmax(Q K^T) summed over queries and heads, all weights held at once: what the kernel avoids."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    keys = key_cache[block_table[0]].flatten(0, 1)[: out.shape[1]].permute(1, 2, 0)  # [num_kv_heads, D, keys]
    rows = query.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    pos = query_pos.repeat_interleave(num_heads // num_kv_heads)
    hidden = torch.arange(out.shape[1], device=out.device) > pos[:, None]  # [rows, keys]
    logits = torch.matmul(rows, keys).float() * scale  # [num_kv_heads, rows, keys]
    out[0] += logits.masked_fill_(hidden, float("-inf")).softmax(dim=-1).sum(dim=(0, 1))


def case(shape: str, num_keys: int, num_queries: int) -> Case:
    num_heads, num_kv_heads, head_dim = map(int, shape.split("x"))
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    generator = torch.Generator().manual_seed(0)
    max_blocks = -(-num_keys // BLOCK_SIZE)
    num_blocks = max_blocks + 8
    if ON_GPU:
        cache = torch.randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    else:
        # The CPU engine's: a block holds K as [head_dim, block_size], then V.
        cache = torch.randn(num_blocks, num_kv_heads, 2, head_dim, BLOCK_SIZE, generator=generator)
        cache = cache[:, :, 0].permute(0, 3, 1, 2)
    query = torch.randn(num_queries, num_heads, head_dim, generator=generator).to(DEVICE, dtype)
    table = torch.randperm(num_blocks, generator=generator)[None, :max_blocks].int().to(DEVICE)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=DEVICE)
    pos = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, num_keys, device=DEVICE)
    row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    size = torch.full((1,), num_keys, dtype=torch.int32, device=DEVICE)
    scale = head_dim**-0.5
    arguments = (query, cache, table, starts, pos, out, row, size, scale)
    calls = {
        "triton" if ON_GPU else "torch": lambda: guidance_scores(*arguments),
        "materialised": lambda: materialised(query, cache, table, pos, out, scale),
    }
    if ON_GPU:
        # Of any values: a pass takes as long.
        lse = torch.full((num_heads, num_queries), 10.0, device=DEVICE).T
        calls["triton, LSE given"] = lambda: guidance_scores(*arguments, lse=lse)
    return Case(
        calls,
        num_bytes=num_keys * num_kv_heads * head_dim * dtype.itemsize,
        flops=2 * num_queries * num_heads * num_keys * head_dim,
        dtype=dtype,
    )
