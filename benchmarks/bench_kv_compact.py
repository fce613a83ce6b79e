"""Measure kv_compact against its bandwidth floor and its torch reference (the peer).

python benchmarks/bench_kv_compact.py [--sizes 1,8,32] [--path scattered|identity] [--csv FILE] [--json]

Scattered: five accepted drafts of 25, four of them to be moved. Identity: the same without a move, the cost of looking.
"""

from collections.abc import Callable
from typing import Any

import kernel_bench
import torch

from vidspec_kernels.kv_compact import CacheList, kv_compact

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, MAX_BLOCKS, MAX_DRAFTS = 28, 4, 128, 16, 4, 25
PATHS = {"scattered": [1, 4, 9, 16, 22], "identity": [1, 2, 3, 4, 5]}


def caches(num_blocks: int) -> CacheList:
    """Return the caches of a 7B model in the layout and dtype of this device's engine."""
    device = kernel_bench.device()
    layers = []
    for _ in range(NUM_LAYERS):
        if device.type == "cuda":
            cache = torch.zeros(
                num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16, device=device
            )
            layers.append((cache[..., :HEAD_SIZE], cache[..., HEAD_SIZE:]))
        else:
            # A block holds K as [head_size, block_size], then V.
            keys, values = torch.zeros(num_blocks, NUM_KV_HEADS, 2, BLOCK_SIZE * HEAD_SIZE).unbind(2)
            keys = keys.unflatten(2, (HEAD_SIZE, BLOCK_SIZE)).permute(0, 3, 1, 2)
            layers.append((keys, values.unflatten(2, (BLOCK_SIZE, HEAD_SIZE)).transpose(1, 2)))
    return CacheList(layers)


def num_bytes(num_reqs: int, name: str) -> int:
    """Return what must be read and written: counts and paths, and where entries move the rest."""
    nodes = PATHS[name]
    moves = sum(node != j for j, node in enumerate(nodes, 1))
    item_bytes = 2 if torch.cuda.is_available() else 4
    entry = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_SIZE * item_bytes
    # Per request: count 4 and a node 4 each; with moves row 8, start 4, two block ids 4 + 4 a move.
    return num_reqs * (4 + 4 * len(nodes) + (12 + moves * (8 + 2 * entry) if moves else 0))


def case(num_reqs: int, name: str) -> Callable[[str], Callable[[], Any]]:
    """Return a function that binds an implementation to a call at this batch size."""
    device = kernel_bench.device()
    generator = torch.Generator().manual_seed(0)
    nodes = torch.tensor(PATHS[name], dtype=torch.int32)
    path = torch.arange(MAX_DRAFTS + 1, dtype=torch.int32).repeat(num_reqs, 1)
    path[:, 1 : 1 + len(nodes)] = nodes
    table = torch.randperm(num_reqs * MAX_BLOCKS, generator=generator).view(num_reqs, MAX_BLOCKS) + 1
    inputs = (
        table.int().to(device),
        torch.randperm(num_reqs, generator=generator).to(device),
        torch.randint(0, MAX_BLOCKS * BLOCK_SIZE - MAX_DRAFTS, (num_reqs,), generator=generator).int().to(device),
        path.to(device),
        torch.full((num_reqs,), len(nodes), dtype=torch.int32, device=device),
    )
    whole = caches(num_reqs * MAX_BLOCKS + 1)
    return lambda impl: lambda: kv_compact(whole, *inputs, impl=impl)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    parser = kernel_bench.parser(__doc__)
    parser.set_defaults(sizes="1,2,4,8,16,32")
    parser.add_argument("--path", choices=list(PATHS), default="scattered", help="whether accepted entries move")
    arguments = parser.parse_args(argv)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    name = arguments.path
    return kernel_bench.run(
        arguments, "kv_compact", ((size, num_bytes(size, name), case(size, name)) for size in sizes)
    )


if __name__ == "__main__":
    main()
