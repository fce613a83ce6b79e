"""begin_step: a step of chains, or of trees of 25 nodes, with contexts of 25,000 tokens."""

from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference

from vidspec_kernels import StepBuffers, StepTables, begin_step

AXES: dict[str, list[Any]] = {"kind": ["chain", "tree"], "num_reqs": [1, 8, 64, 256]}
ROUNDS = 100
BLOCK_SIZE, MAX_BLOCKS, NUM_POS_AXES, MAX_DRAFTS, NUM_TOKENS, MAX_LEN = 16, 2048, 3, 25, 25_000, 32_768
# Per request in: rows 8, counts 4 + 4 + 4, noise 4 + 8, delta 8, fed 8, tokens 4 + 8; out: 8 vectors of 44 together,
# length 4, fed 8; of each of two tokens id 4, slot 8, positions 24.
BYTES_PER_REQ = 60 + 56 + 2 * (12 + 8 * NUM_POS_AXES)


def case(kind: str, num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    num_cols = MAX_DRAFTS + 1 if kind == "tree" else 0

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(DEVICE)

    tables = StepTables(
        num_tokens=ints(NUM_TOKENS, NUM_TOKENS + 1, num_reqs),
        text=ints(0, 1000, num_reqs, MAX_LEN),
        last_sampled=ints(0, 1000, num_reqs, 1, dtype=torch.int64),
        num_dropped=ints(0, 1, num_reqs),
        pos_delta=ints(-20_000, 0, num_reqs, dtype=torch.int64),
        block_table=ints(0, 100_000, num_reqs, MAX_BLOCKS),
        fed=ints(0, 2**25, num_reqs + 1, dtype=torch.int64),
        path=ints(0, MAX_DRAFTS + 1, num_reqs, num_cols) if num_cols else None,
    )
    positions = torch.zeros(NUM_POS_AXES, 2 * num_reqs, dtype=torch.int64, device=DEVICE)
    out = StepBuffers.allocate(num_reqs, MAX_BLOCKS, positions, num_cols)
    rows = torch.randperm(num_reqs, generator=generator).to(DEVICE)
    sampled, heat = ints(1, 6, num_reqs), torch.rand(num_reqs, generator=generator).to(DEVICE)
    arguments = (rows, None, sampled, None, heat, tables.pos_delta, tables, out)
    sizes = {"size": num_reqs, "block_size": BLOCK_SIZE, "max_position": MAX_LEN - 1, "max_drafts": MAX_DRAFTS}
    table_bytes = 4 * (NUM_TOKENS // BLOCK_SIZE + 2)
    return Case(
        against_reference(lambda impl: lambda: begin_step(*arguments, **sizes, impl=impl)),  # type: ignore[arg-type]
        num_reqs * (BYTES_PER_REQ + 2 * table_bytes + 8 * num_cols),
    )
