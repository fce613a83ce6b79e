"""Measure accept_loose on chains against its bandwidth floor and its torch reference (the peer).

python benchmarks/bench_accept_loose.py [--sizes 1,8,64] [--csv FILE] [--json]
"""

from collections.abc import Callable
from typing import Any

import kernel_bench
import torch

from vidspec_kernels.accept_loose import LOWEST, SHIFT, WINDOW, accept_loose

MAX_DRAFTS = 10
# Per request: one bound 4, row 8, rule, share, window 4 each; target and draft tokens 8 + 8, score and entropy 4 + 4,
# a flag 1 a row; out sampled, path and kind 8 + 4 + 1 a column, count 4.
BYTES_PER_REQ = 4 + 8 + 3 * 4 + (8 + 8 + 4 + 4 + 1 + 8 + 4 + 1) * (MAX_DRAFTS + 1) + 4


def case(num_reqs: int) -> Callable[[str], Callable[[], Any]]:
    """Return a function that binds an implementation to a call at this batch size; about half of all drafts match."""
    device = kernel_bench.device()
    generator = torch.Generator().manual_seed(0)
    num_rows = num_reqs * (MAX_DRAFTS + 1)
    inputs = (
        torch.randint(0, 2, (num_rows,), generator=generator),
        torch.randint(0, 2, (num_rows,), generator=generator),
        torch.arange(0, num_rows + 1, MAX_DRAFTS + 1, dtype=torch.int32),
        torch.randperm(num_reqs, generator=generator),
        # LVSpec's rules for some requests, FLy's for others, none for the rest.
        torch.tensor([LOWEST + SHIFT, WINDOW, 0], dtype=torch.int32).repeat(num_reqs)[:num_reqs],
        torch.full((num_reqs,), 0.7),
        torch.full((num_reqs,), 4, dtype=torch.int32),
        torch.rand(num_rows, generator=generator),
        torch.rand(num_rows, generator=generator),
        torch.rand(num_rows, generator=generator) < 0.9,
    )
    inputs = tuple(tensor.to(device) for tensor in inputs)
    return lambda impl: lambda: accept_loose(*inputs, 0.2, MAX_DRAFTS, impl=impl)  # type: ignore[arg-type, misc]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = kernel_bench.parser(__doc__).parse_args(argv)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    return kernel_bench.run(arguments, "accept_loose", ((size, size * BYTES_PER_REQ, case(size)) for size in sizes))


if __name__ == "__main__":
    main()
