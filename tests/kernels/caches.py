"""Paged caches as the engines lay them out."""

import torch


def make_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, layout, device, poison):
    """Keys and values full of poison: "flash" as a GPU backend stores them, "cpu" as the CPU engine ("vec") does."""
    if layout == "flash":
        cache = torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), poison, dtype=dtype, device=device)
        return cache[:, 0], cache[:, 1]
    cache = torch.full((num_blocks, num_kv_heads, 2 * block_size, head_size), poison, dtype=dtype, device=device)
    keys, values = cache.chunk(2, dim=2)
    block_stride, head_stride, _, _ = keys.stride()
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return keys.as_strided(shape, (block_stride, 1, head_stride, block_size)), values.permute(0, 2, 1, 3)
