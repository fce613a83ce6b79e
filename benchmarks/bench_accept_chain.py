"""Measure accept_chain against its bandwidth floor and its torch reference (the peer).

python benchmarks/bench_accept_chain.py [--sizes 1,8,64] [--csv FILE] [--json]
"""

from collections.abc import Callable
from typing import Any

import kernel_bench
import torch

from vidspec_kernels.accept_chain import accept_chain

MAX_DRAFTS = 10
# Per request: target and draft tokens 8 + 8 a row, one bound 4; out sampled 8 a column, count 4.
BYTES_PER_REQ = (8 + 8 + 8) * (MAX_DRAFTS + 1) + 4 + 4


def case(num_reqs: int) -> Callable[[str], Callable[[], Any]]:
    """Return a function that binds an implementation to a call at this batch size; about half of all drafts match."""
    device = kernel_bench.device()
    generator = torch.Generator().manual_seed(0)
    num_rows = num_reqs * (MAX_DRAFTS + 1)
    target = torch.randint(0, 2, (num_rows,), generator=generator)
    draft = torch.randint(0, 2, (num_rows,), generator=generator)
    bounds = torch.arange(0, num_rows + 1, MAX_DRAFTS + 1, dtype=torch.int32)
    inputs = (target.to(device), draft.to(device), bounds.to(device))
    return lambda impl: lambda: accept_chain(*inputs, MAX_DRAFTS, impl=impl)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = kernel_bench.parser(__doc__).parse_args(argv)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    return kernel_bench.run(arguments, "accept_chain", ((size, size * BYTES_PER_REQ, case(size)) for size in sizes))


if __name__ == "__main__":
    main()
