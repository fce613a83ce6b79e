"""step: one level of chains, or of trees of five nodes a level."""

from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference

from vidspec_kernels import step

AXES: dict[str, list[Any]] = {"kind": ["chain", "tree"], "num_reqs": [1, 8, 64, 256, 1024]}
ROUNDS = 100
BLOCK_SIZE, MAX_BLOCKS, NUM_POS_AXES, LEVEL, MAX_DRAFTS = 16, 512, 3, 2, 25
# Per request in: row 8, num_slots 4, num_tokens 4, pos_delta 8, one block id 4; out: length 4. Per place in: a tree's
# node 8; out: positions 24, logical position 8, slot 8.
BYTES_PER_REQ, BYTES_PER_PLACE = 8 + 4 + 4 + 8 + 4 + 4, 8 * NUM_POS_AXES + 8 + 8


def case(kind: str, num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    in_trees, frontier = kind == "tree", 5 if kind == "tree" else 1

    def ints(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(DEVICE)

    inputs = (
        torch.randperm(num_reqs, generator=generator).to(DEVICE),
        ints(0, BLOCK_SIZE * MAX_BLOCKS - MAX_DRAFTS, (num_reqs,), torch.int32),
        ints(1, 30_000, (num_reqs,), torch.int32),
        ints(-20_000, 0, (num_reqs,), torch.int64),
        ints(0, 100_000, (num_reqs, MAX_BLOCKS), torch.int32),
        ints(0, MAX_DRAFTS + 1, (num_reqs, frontier), torch.int64) if in_trees else None,
    )
    num_places = num_reqs * frontier
    arguments = {
        "positions": torch.zeros(NUM_POS_AXES, num_places + 1, dtype=torch.int64, device=DEVICE)[:, :num_places],
        "logical_pos": torch.zeros(num_places, dtype=torch.int64, device=DEVICE),
        "seq_lens": torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE),
        "slot_mapping": torch.zeros(num_places, dtype=torch.int64, device=DEVICE),
        "block_size": BLOCK_SIZE,
        "level": LEVEL,
        "max_position": 32_767,
    }
    num_bytes = num_reqs * BYTES_PER_REQ + num_places * (BYTES_PER_PLACE + 8 * in_trees)
    return Case(
        against_reference(lambda impl: lambda: step(*inputs, **arguments, impl=impl)),  # type: ignore[arg-type]
        num_bytes,
    )
