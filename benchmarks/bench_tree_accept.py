"""Measure tree_accept against its bandwidth floor and its torch reference (the peer).

python benchmarks/bench_tree_accept.py [--sizes 1,8,64] [--csv FILE] [--json]
"""

from collections.abc import Callable
from typing import Any

import kernel_bench
import torch

from vidspec_kernels.tree_accept import tree_accept

MAX_DRAFTS = 25
# Per request: one bound 4, row 8, target and draft tokens 8 + 8 and parent, depth, ancestors 4 + 4 + 8 a node; out
# sampled and path 8 + 4 a column, count 4.
BYTES_PER_REQ = 4 + 8 + (8 + 8 + 4 + 4 + 8 + 8 + 4) * (MAX_DRAFTS + 1) + 4


def case(num_reqs: int) -> Callable[[str], Callable[[], Any]]:
    """Return a function that binds an implementation to a call at this batch size; about half of all drafts match."""
    device = kernel_bench.device()
    generator = torch.Generator().manual_seed(0)
    num_cols = MAX_DRAFTS + 1
    parents, depths = torch.zeros(2, num_reqs, num_cols, dtype=torch.int32)
    ancestors = torch.zeros(num_reqs, num_cols, dtype=torch.int64)
    every = torch.arange(num_reqs)
    for node in range(1, num_cols):
        # One of the three nodes before: several branches of some length.
        parent = node - 1 - torch.randint(0, min(node, 3), (num_reqs,), generator=generator)
        parents[:, node] = parent
        depths[:, node] = depths[every, parent] + 1
        ancestors[:, node] = ancestors[every, parent] | (1 << (node - 1))
    inputs = (
        torch.randint(0, 2, (num_reqs * num_cols,), generator=generator),
        torch.randint(0, 2, (num_reqs * num_cols,), generator=generator),
        torch.arange(0, num_reqs * num_cols + 1, num_cols, dtype=torch.int32),
        torch.randperm(num_reqs, generator=generator),
        parents,
        depths,
        ancestors,
    )
    inputs = tuple(tensor.to(device) for tensor in inputs)
    return lambda impl: lambda: tree_accept(*inputs, MAX_DRAFTS, impl=impl)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = kernel_bench.parser(__doc__).parse_args(argv)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    return kernel_bench.run(arguments, "tree_accept", ((size, size * BYTES_PER_REQ, case(size)) for size in sizes))


if __name__ == "__main__":
    main()
