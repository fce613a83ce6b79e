"""The tensors that growing draft trees read and write in every step, checked once."""

from typing import Any

import torch
from torch import Tensor

from vidspec_kernels.arrays import arrays_of, as_meta, check_contiguous
from vidspec_kernels.draft_tree.tables import TreePlans, TreeTables


class TreeGrowBuffers:
    """The tensors that growth reads and writes in every step; checked once, here, instead of in every launch.

    All of a step that later levels need lies here, at addresses that never change.

    Args:
        tree: In and out.
        plans: Depths and widths by persistent row: levels that a request's tree gets, and what selects `width_bounds`.
        log_thresholds: float32 [max_depth + 1, L], by depth and level: the log-probability a path must exceed.
        width_bounds: float32 [max_width + 1, L, C], by width, level and rank: the log-probability that a parent's path
            must reach for its child of that rank.
        max_parents: P, frontier nodes of all levels of a step together.
        max_frontier: F_max, the most nodes of a frontier.

    Attributes:
        frontier_nodes: int64 [max_num_reqs, F_max] by batch row, the nodes that the next level grows from.
        frontier_tokens: int64 [max_num_reqs, F_max].
        frontier_log_probs: float32 [max_num_reqs, F_max], of the path.
        next_free: int64 [max_num_reqs] by batch row, the first node index beyond the greedy path that is free.
        leftover_log_probs: float32 [max_num_reqs, P, C], path log-probability of every candidate of the step; -inf once
            it is a node.
        leftover_tokens: int64 [max_num_reqs, P, C].
        leftover_parents: int64 [max_num_reqs, P], node index of the candidates' parent.
    """

    def __init__(
        self, tree: TreeTables, plans: TreePlans, log_thresholds: Tensor, width_bounds: Tensor, max_parents: int,
        max_frontier: int,
    ):  # fmt: skip
        self.tree, self.plans, self.device = tree, plans, tree.device
        _, self.num_levels, self.num_candidates = width_bounds.shape
        self.max_parents, self.max_frontier = max_parents, max_frontier
        check_contiguous(
            self.device, log_thresholds=(log_thresholds, torch.float32, 0, [self.num_levels]),
            width_bounds=(width_bounds, torch.float32, 0, 0, 0),
        )  # fmt: skip
        assert plans.device == self.device, f"plans: expected {self.device}"
        max_num_reqs = len(tree.num_nodes)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(max_num_reqs, *shape, dtype=torch.int64, device=self.device)

        self.frontier_nodes, self.frontier_tokens = numbers(max_frontier), numbers(max_frontier)
        self.frontier_log_probs = torch.zeros(max_num_reqs, max_frontier, device=self.device)
        self.next_free = numbers()
        shape = (max_num_reqs, max_parents, self.num_candidates)
        self.leftover_log_probs = torch.full(shape, -torch.inf, device=self.device)
        self.leftover_tokens, self.leftover_parents = numbers(*shape[1:]), numbers(max_parents)
        # In the kernel's order, and the same as arrays for the loop.
        self.rules = (log_thresholds, width_bounds)
        self.frontier = (self.frontier_nodes, self.frontier_tokens, self.frontier_log_probs)
        self.leftover = (self.leftover_log_probs, self.leftover_tokens, self.leftover_parents)
        self.tensors = (
            plans.depths, plans.widths, *self.rules, self.next_free, *tree.tensors[:5], *self.leftover, *self.frontier
        )  # fmt: skip
        self.arrays = arrays_of(self.tensors)
        self.ready: dict[Any, Any] = {}  # calls (see `dispatch.remember`)
        self._frontiers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by (requests, width), both bounded

    def frontier_of(self, num_reqs: int, width: int) -> tuple[Tensor, Tensor]:
        """Return nodes and tokens int64 [num_reqs, width] of a frontier; each size is cut once."""
        key = (num_reqs, width)
        if key not in self._frontiers:
            self._frontiers[key] = self.frontier_nodes[:num_reqs, :width], self.frontier_tokens[:num_reqs, :width]
        return self._frontiers[key]

    def as_meta(self) -> "TreeGrowBuffers":
        return TreeGrowBuffers(
            self.tree.as_meta(), self.plans.as_meta(), as_meta(self.rules[0]), as_meta(self.rules[1]),
            self.max_parents, self.max_frontier,
        )  # fmt: skip
