"""What the tests of the kernels of draft trees share: tables, buffers and garbage in them."""

import torch

from vidspec_kernels import PlanRules, TreeGrowBuffers, TreePlans, TreeTables, TreeTemplate

RULES = PlanRules(depth_min=2, depth_max=7, width_min=2, width_max=6, top_k=5, history=3, history_low=1.5,
                  history_high=2.5)  # fmt: skip


def make_tables(num_reqs, max_nodes, device):
    """Tables full of garbage."""
    shape = (num_reqs, max_nodes + 1)
    dtypes = (torch.int64, torch.int32, torch.int32, torch.int64, torch.float32)
    tables = (torch.full(shape, 77, dtype=dtype, device=device) for dtype in dtypes)
    return TreeTables(*tables, torch.full((num_reqs,), 77, dtype=torch.int32, device=device))


def make_template(max_nodes, device, num_nodes=0):
    """A template whose columns all differ."""
    column = torch.arange(max_nodes + 1, dtype=torch.int32, device=device)
    return TreeTemplate(column - 1, column + 3, column.long() << 40, -column.float(), num_nodes)


def make_growth(tree, rules=RULES, max_parents=9, max_frontier=4, num_candidates=6):
    """Buffers full of garbage."""
    device, num_reqs = tree.device, len(tree.num_nodes)
    plans = TreePlans(num_reqs, rules, device)
    plans.max_depths.fill_(rules.depth_max)
    thresholds = torch.zeros(rules.depth_max + 1, rules.depth_max, device=device)
    bounds = torch.zeros(rules.width_max + 1, rules.depth_max, num_candidates, device=device)
    growth = TreeGrowBuffers(tree, plans, thresholds, bounds, max_parents, max_frontier)
    for tensor in (*growth.frontier, *growth.leftover, growth.next_free):
        tensor.fill_(-5)
    return growth
