"""accept: chains of ten and trees of 25 drafts, strictly and loosely; about half of all drafts match."""

from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference

from vidspec_kernels import LOWEST, SHIFT, WINDOW, Looseness, Tally, TreeShapes, accept

AXES: dict[str, list[Any]] = {
    "kind": ["strict chain", "strict tree", "loose chain", "loose tree"],
    "num_reqs": [1, 8, 64, 256, 1024],
}
ROUNDS = 100
# Per request in: one bound 4, row 8, whether its drafts are real 1; out: count 4. Per column in: target and draft
# tokens 8 + 4; out: sampled 8. The totals, added to by all requests, stay in the L2 cache.
REQ_BYTES, COLUMN_BYTES = 4 + 8 + 1 + 4, 8 + 4 + 8
# Of trees, out accepted drafts 4, and per column parent, depth and ancestors 4 + 4 + 8, out path 4, twice.
TREE_REQ_BYTES, TREE_COLUMN_BYTES = 4, 4 + 4 + 8 + 4 + 4
# Of loose requests, rule, share and window 4 + 4 + 4, per column score, entropy, a flag 4 + 4 + 1, out kind 1.
LOOSE_REQ_BYTES, LOOSE_COLUMN_BYTES = 4 + 4 + 4, 4 + 4 + 1 + 1


def shapes(num_reqs: int, num_cols: int, rows: torch.Tensor, generator: torch.Generator) -> TreeShapes:
    """Return random trees: a node hangs on one of the three before it, so there are several branches of some length."""
    parents, depths = torch.zeros(2, num_reqs, num_cols, dtype=torch.int32)
    ancestors, every = torch.zeros(num_reqs, num_cols, dtype=torch.int64), torch.arange(num_reqs)
    for node in range(1, num_cols):
        parent = node - 1 - torch.randint(0, min(node, 3), (num_reqs,), generator=generator)
        parents[:, node] = parent
        depths[:, node] = depths[every, parent] + 1
        ancestors[:, node] = ancestors[every, parent] | (1 << (node - 1))
    return TreeShapes(rows, *(table.to(DEVICE) for table in (parents, depths, ancestors)))


def case(kind: str, num_reqs: int) -> Case:
    """Return the case of this batch size."""
    generator = torch.Generator().manual_seed(0)
    is_loose, in_trees = kind.startswith("loose"), kind.endswith("tree")
    num_cols = (25 if in_trees else 10) + 1
    num_rows = num_reqs * num_cols
    tokens = (
        torch.randint(0, 2, (num_rows,), generator=generator).to(DEVICE),
        torch.randint(0, 2, (num_rows,), generator=generator, dtype=torch.int32).to(DEVICE),
        torch.arange(0, num_rows + 1, num_cols, dtype=torch.int32, device=DEVICE),
    )
    rows = torch.randperm(num_reqs, generator=generator).to(DEVICE)
    looseness = Looseness(
        rows,
        # LVSpec's rules for some requests, FLy's for others, none for the rest.
        torch.tensor([LOWEST + SHIFT, WINDOW, 0], dtype=torch.int32, device=DEVICE).repeat(num_reqs)[:num_reqs],
        torch.full((num_reqs,), 0.7, device=DEVICE),
        torch.full((num_reqs,), 4, dtype=torch.int32, device=DEVICE),
        torch.rand(num_rows, generator=generator).to(DEVICE),
        torch.rand(num_rows, generator=generator).to(DEVICE),
        (torch.rand(num_rows, generator=generator) < 0.9).to(DEVICE),
        min_entropy=0.2,
    )
    trees = shapes(num_reqs, num_cols, rows, generator) if in_trees else None
    has_draft = torch.ones(num_reqs, dtype=torch.bool, device=DEVICE)
    tally = Tally(rows, has_draft, torch.zeros(7 + num_cols, dtype=torch.int64, device=DEVICE))
    if in_trees:
        kept = torch.zeros(num_reqs, num_cols, dtype=torch.int32, device=DEVICE)
        tally = tally._replace(path=kept, num_accepted=torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE))
    arguments = (*tokens, num_cols - 1, trees, looseness if is_loose else None, tally)
    per_req = REQ_BYTES + TREE_REQ_BYTES * in_trees + LOOSE_REQ_BYTES * is_loose
    per_column = COLUMN_BYTES + TREE_COLUMN_BYTES * in_trees + LOOSE_COLUMN_BYTES * is_loose
    return Case(
        against_reference(lambda impl: lambda: accept(*arguments, impl=impl)),
        num_reqs * per_req + num_rows * per_column,
    )
