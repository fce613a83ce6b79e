"""kv_compact: five accepted drafts of 25, of which four are to be moved, or none: the cost of looking."""

from typing import Any

import torch
from bench_kernels import DEVICE, ON_GPU, Case, against_reference

from vidspec_kernels import CacheList, kv_compact

AXES: dict[str, list[Any]] = {"path": ["scattered", "identity"], "num_reqs": [1, 2, 4, 8, 16, 32]}
ROUNDS = 100
NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, MAX_BLOCKS, MAX_DRAFTS = 28, 4, 128, 16, 4, 25
PATHS = {"scattered": [1, 4, 9, 16, 22], "identity": [1, 2, 3, 4, 5]}


def caches(num_blocks: int) -> CacheList:
    """Return the caches of a 7B model in the layout and dtype of this device's engine."""
    layers = []
    for _ in range(NUM_LAYERS):
        if ON_GPU:
            cache = torch.zeros(
                num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE
            )
            layers.append((cache[..., :HEAD_SIZE], cache[..., HEAD_SIZE:]))
        else:
            # A block holds K as [head_size, block_size], then V.
            keys, values = torch.zeros(num_blocks, NUM_KV_HEADS, 2, BLOCK_SIZE * HEAD_SIZE).unbind(2)
            keys = keys.unflatten(2, (HEAD_SIZE, BLOCK_SIZE)).permute(0, 3, 1, 2)
            layers.append((keys, values.unflatten(2, (BLOCK_SIZE, HEAD_SIZE)).transpose(1, 2)))
    return CacheList(layers)


def bytes_of(num_reqs: int, path: str) -> int:
    """Return what must be read and written: counts and paths, and where entries move the rest."""
    nodes = PATHS[path]
    moves = sum(node != j for j, node in enumerate(nodes, 1))
    item_bytes = 2 if ON_GPU else 4
    entry = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_SIZE * item_bytes
    # Per request: count 4 and a node 4 each; with moves row 8, start 4, two block ids 4 + 4 a move.
    return num_reqs * (4 + 4 * len(nodes) + (12 + moves * (8 + 2 * entry) if moves else 0))


def case(path: str, num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    nodes = torch.tensor(PATHS[path], dtype=torch.int32)
    paths = torch.arange(MAX_DRAFTS + 1, dtype=torch.int32).repeat(num_reqs, 1)
    paths[:, 1 : 1 + len(nodes)] = nodes
    table = torch.randperm(num_reqs * MAX_BLOCKS, generator=generator).view(num_reqs, MAX_BLOCKS) + 1
    inputs = (
        table.int().to(DEVICE),
        torch.randperm(num_reqs, generator=generator).to(DEVICE),
        torch.randint(0, MAX_BLOCKS * BLOCK_SIZE - MAX_DRAFTS, (num_reqs,), generator=generator).int().to(DEVICE),
        paths.to(DEVICE),
        torch.full((num_reqs,), len(nodes), dtype=torch.int32, device=DEVICE),
    )
    whole = caches(num_reqs * MAX_BLOCKS + 1)
    return Case(against_reference(lambda impl: lambda: kv_compact(whole, *inputs, impl=impl)), bytes_of(num_reqs, path))
