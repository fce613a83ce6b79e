"""tree_grow: the second level of a step of adaptive trees; the reference works on CPU tensors, also beside a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference

from vidspec_kernels.tree_grow import TreeGrowBuffers, tree_grow

AXES: dict[str, list[Any]] = {"num_reqs": [1, 8, 64, 256, 1024]}
ROUNDS = 100
MAX_NODES, FRONTIER, CANDIDATES, LEVELS = 64, 10, 10, 2
NUM_NEW = 30
# Per request in: 12 a candidate, 16 a frontier node, 8 row, 16 plan, 8 next free; out: 12 a leftover, 8 a parent, 28 a
# node (and 8 for its parent's mask), 20 a place of the next frontier, 8 next free.
BYTES_PER_REQ = 24 * FRONTIER * CANDIDATES + (16 + 8 + 20) * FRONTIER + 36 * NUM_NEW + 40


def case(num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2, num_reqs * FRONTIER, 100, generator=generator).log_softmax(-1)
    log_probs, ids = log_probs.sort(dim=-1, descending=True)
    log_probs, ids = log_probs[..., :CANDIDATES], ids[..., :CANDIDATES]

    def bind(impl: Any) -> Callable[[], Any]:
        device = DEVICE if impl == "triton" else torch.device("cpu")
        shape = (num_reqs, MAX_NODES + 1)
        tensors = (
            torch.full(shape, -1),
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape),
            torch.full((num_reqs,), LEVELS + 1),
            torch.zeros(num_reqs, dtype=torch.int64),
            torch.full((LEVELS + 2, LEVELS), -8.0),
            torch.full((1, LEVELS, CANDIDATES), -torch.inf),
        )
        buffers = TreeGrowBuffers(*(tensor.to(device) for tensor in tensors), max_parents=1 + FRONTIER)
        rows = torch.arange(num_reqs, device=device)
        roots = torch.zeros(num_reqs, 1, dtype=torch.int64, device=device)
        tables = [
            (scores[: num_reqs * width].contiguous().to(device), tokens[: num_reqs * width].contiguous().to(device))
            for scores, tokens, width in zip(log_probs, ids, (1, FRONTIER), strict=True)
        ]
        nodes, _, path = tree_grow(
            buffers, rows, roots, roots.float(), *tables[0],
            level=0, budget=MAX_NODES, first_parent=0, num_next=FRONTIER, impl=impl,
        )  # fmt: skip
        return lambda: tree_grow(
            buffers, rows, nodes, path, *tables[1],
            level=1, budget=MAX_NODES, first_parent=1, num_next=FRONTIER, impl=impl,
        )  # fmt: skip

    return Case(against_reference(bind), num_reqs * BYTES_PER_REQ)
