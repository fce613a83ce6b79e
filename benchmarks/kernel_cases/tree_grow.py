"""tree_grow: a step of adaptive trees of two levels; the reference works on CPU tensors, also beside a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference

from vidspec_kernels import PlanRules, TreeGrowBuffers, TreePlans, tree_begin, tree_grow
from vllm_vidspec.drafting import DraftTree

AXES: dict[str, list[Any]] = {"num_reqs": [1, 8, 64, 256, 1024]}
ROUNDS = 100
MAX_NODES, FRONTIER, CANDIDATES, LEVELS = 64, 10, 10, 2
NUM_NEW, NUM_PARENTS = 40, 1 + FRONTIER
# Per request out: 28 a column and 4 a leftover as it begins; then 12 a leftover, 8 a parent, 28 a node (and 8 for its
# parent's mask), 20 a place of the next frontier; in: 12 a candidate, 16 a frontier node. About 100 beside.
BYTES_PER_REQ = 28 * (MAX_NODES + 1) + NUM_PARENTS * (28 * CANDIDATES + 24 + 20) + 36 * NUM_NEW + 100


def case(num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2, num_reqs * FRONTIER, 100, generator=generator).log_softmax(-1)
    log_probs, ids = log_probs.sort(dim=-1, descending=True)
    log_probs, ids = log_probs[..., :CANDIDATES], ids[..., :CANDIDATES]

    def bind(impl: Any) -> Callable[[], Any]:
        device = DEVICE if impl == "triton" else torch.device("cpu")
        tree, shape = DraftTree(num_reqs, MAX_NODES, device), (LEVELS + 2, LEVELS)
        plans = TreePlans(num_reqs, PlanRules(1, LEVELS + 1, 1, 1, 2, 0, 0.0, 0.0), device)
        plans.depths.fill_(LEVELS + 1)
        bounds = torch.full((1, LEVELS, CANDIDATES), -torch.inf, device=device)
        thresholds = torch.full(shape, -8.0, device=device)
        buffers = TreeGrowBuffers(tree, plans, thresholds, bounds, max_parents=1 + FRONTIER, max_frontier=FRONTIER)
        rows = torch.arange(num_reqs, device=device)
        tables = [
            (scores[: num_reqs * width].contiguous().to(device), tokens[: num_reqs * width].contiguous().to(device))
            for scores, tokens, width in zip(log_probs, ids, (1, FRONTIER), strict=True)
        ]
        sampled = torch.full((num_reqs,), -1, dtype=torch.int32, device=device)

        def grow() -> None:
            tree_begin(tree, tree.empty, num_reqs, buffers, rows, sampled, impl=impl)
            for level, table in enumerate(tables):
                tree_grow(
                    buffers, rows, *table, level=level, budget=MAX_NODES, first_parent=level, num_next=FRONTIER,
                    impl=impl,
                )  # fmt: skip

        return grow

    return Case(against_reference(bind), num_reqs * BYTES_PER_REQ)
