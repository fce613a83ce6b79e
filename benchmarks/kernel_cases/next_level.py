"""next_level: one level of chains, or of trees of five nodes a level."""

from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference

from vidspec_kernels import LevelBuffers, StepBuffers, next_level

AXES: dict[str, list[Any]] = {"kind": ["chain", "tree"], "num_reqs": [1, 8, 64, 256, 1024]}
ROUNDS = 100
BLOCK_SIZE, MAX_BLOCKS, NUM_POS_AXES, LEVEL, MAX_DRAFTS, WIDTH = 16, 512, 3, 2, 25, 5
# Per request in: row 8, root 4, logical position 8, delta 8, one block id 4, fed 8; out: length 4, fed 8. Per place
# out: positions 24, logical position 8, slot 8; of a tree also node 8, token 8, mask 8 in, token 4, mask 8 out.
BYTES_PER_REQ, BYTES_PER_PLACE, BYTES_PER_NODE = 52, 8 * NUM_POS_AXES + 16, 36


def case(kind: str, num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    in_trees = kind == "tree"
    width = WIDTH if in_trees else 1

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    positions = torch.zeros(NUM_POS_AXES, 2 * width * num_reqs, dtype=torch.int64, device=DEVICE)
    step = StepBuffers.allocate(num_reqs, MAX_BLOCKS, positions)
    step.rows.copy_(torch.randperm(num_reqs, generator=generator))
    step.root_slot.copy_(ints(0, BLOCK_SIZE * MAX_BLOCKS - MAX_DRAFTS, num_reqs))
    step.batch_table.copy_(ints(0, 100_000, num_reqs, MAX_BLOCKS))
    out = LevelBuffers.allocate(num_reqs, positions, WIDTH if in_trees else 0)
    fed = torch.zeros(num_reqs + 1, dtype=torch.int64, device=DEVICE)
    nodes = torch.rand(num_reqs, MAX_DRAFTS, generator=generator).argsort(1)[:, :width].to(DEVICE)
    trees = (nodes, ints(0, 1000, num_reqs, width), ints(0, 2**25, num_reqs, MAX_DRAFTS + 1)) if in_trees else ()
    sizes = {"size": num_reqs, "level": LEVEL, "block_size": BLOCK_SIZE, "max_position": 32_767}
    return Case(
        against_reference(lambda impl: lambda: next_level(step, out, fed, *trees, **sizes, impl=impl)),  # type: ignore[arg-type]
        num_reqs * (BYTES_PER_REQ + width * (BYTES_PER_PLACE + in_trees * BYTES_PER_NODE)),
    )
