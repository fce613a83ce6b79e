"""Measure chain_step against its bandwidth floor and its torch reference (the peer).

python benchmarks/bench_chain_step.py [--sizes 1,8,64] [--csv FILE] [--json]
"""

from collections.abc import Callable
from typing import Any

import kernel_bench
import torch

from vidspec_kernels.chain_step import chain_step

BLOCK_SIZE, MAX_BLOCKS, NUM_POS_AXES, LEVEL = 16, 512, 3, 2
# Per request in: row 8, num_slots 4, num_tokens 4, pos_delta 8, one block id 4; out: positions 24, logical position 8,
# length 4, slot 8.
BYTES_PER_REQ = 8 + 4 + 4 + 8 + 4 + 8 * NUM_POS_AXES + 8 + 4 + 8


def case(num_reqs: int) -> Callable[[str], Callable[[], Any]]:
    """Return a function that binds an implementation to a call at this batch size."""
    device = kernel_bench.device()
    generator = torch.Generator().manual_seed(0)

    def ints(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

    inputs = (
        torch.randperm(num_reqs, generator=generator).to(device),
        ints(0, BLOCK_SIZE * MAX_BLOCKS - LEVEL, (num_reqs,), torch.int32),
        ints(1, 30_000, (num_reqs,), torch.int32),
        ints(-20_000, 0, (num_reqs,), torch.int64),
        ints(0, 100_000, (num_reqs, MAX_BLOCKS), torch.int32),
    )
    out = {
        "positions": torch.zeros(NUM_POS_AXES, num_reqs + 1, dtype=torch.int64, device=device)[:, :num_reqs],
        "logical_pos": torch.zeros(num_reqs, dtype=torch.int64, device=device),
        "seq_lens": torch.zeros(num_reqs, dtype=torch.int32, device=device),
        "slot_mapping": torch.zeros(num_reqs, dtype=torch.int64, device=device),
    }
    sizes = {"block_size": BLOCK_SIZE, "level": LEVEL, "max_position": 30_000}
    return lambda impl: lambda: chain_step(*inputs, **sizes, impl=impl, **out)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = kernel_bench.parser(__doc__).parse_args(argv)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    return kernel_bench.run(arguments, "chain_step", ((size, size * BYTES_PER_REQ, case(size)) for size in sizes))


if __name__ == "__main__":
    main()
