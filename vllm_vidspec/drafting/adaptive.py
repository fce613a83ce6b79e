"""The adaptive tree (SAGE): deep and narrow where the draft is sure, shallow and wide where it is not."""

import functools
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels import Leaves, PlanRules, TreeGrowBuffers, TreePlans, tree_begin, tree_finish, tree_grow, tree_plan
from vidspec_kernels.warm_up import warm_adaptive_trees
from vllm_vidspec.config.schedule import ADAPTIVE_DEPTHS
from vllm_vidspec.drafting.tree import DraftTree, TreePolicy

# SAGE's numbers (section 5.1): depths and widths of eq. 10 and 11, tokens of the entropy, and the mean acceptance of so
# many steps below or above which trees get shallower or deeper.
SAGE = PlanRules(*ADAPTIVE_DEPTHS, width_min=2, width_max=10, top_k=10, history=10, history_low=2.0, history_high=3.0)
THRESHOLD = 0.1  # a node at level l of a tree of depth D stays only if its path's probability exceeds this times l / D

# What the order of a float32 softmax's sum may add to a log-probability: a path that is certain has one of 0 or just
# below, and a bound of exactly 0 (eq. 12: P_parent = 1) must not be decided by it.
_ROUNDING = 1e-5


def log_thresholds(rules: PlanRules, threshold: float) -> Tensor:
    """Return what a path's log-probability must exceed: log(threshold * l / D) (SAGE, section 3.2).

    It is float32 [depth_max + 1, depth_max], by depth D and level l - 1; the row of D = 0 lets nothing pass.
    """
    levels = torch.arange(1, rules.depth_max + 1, dtype=torch.float64)
    depths = torch.arange(0, rules.depth_max + 1, dtype=torch.float64)
    return (threshold * levels / depths[:, None]).log().float()


def width_bounds(rules: PlanRules, num_candidates: int) -> Tensor:
    """Return the log-probability that a parent's path needs for its child of a rank to be allowed (SAGE eq. 12).

    A child is allowed iff its rank is below W_l = max(1, round(W / l * (0.5 + P_parent))), halves rounded up, and on
    the first level W_1 = W. That is: rank 0 always, rank c >= 1 iff P_parent >= (c + 0.5) l / W - 0.5. The result is
    float32 [width_max + 1, depth_max, C], by width W, level l - 1 and rank; -inf = always, inf = never.
    """
    widths = torch.arange(0, rules.width_max + 1, dtype=torch.float64)[:, None, None]
    levels = torch.arange(1, rules.depth_max + 1, dtype=torch.float64)[:, None]
    ranks = torch.arange(num_candidates, dtype=torch.float64)
    bounds = ((ranks + 0.5) * levels / widths - 0.5).clamp(min=0.0).log() - _ROUNDING  # [width_max + 1, depth_max, C]
    bounds[:, 0] = torch.where(ranks < widths[:, 0], -torch.inf, torch.inf)
    bounds[:, :, 0] = -torch.inf
    return bounds.float()


class AdaptiveTree(TreePolicy):
    """A `TreePolicy` that grows each request's tree to its confidence and history (SAGE, section 3).

    From confidence alpha a tree gets its depth D = floor(D_min + alpha (D_r - D_min)) (eq. 10) and its first width
    W = floor(W_min + (1 - alpha) (W_max - W_min)) (eq. 11); deeper levels get narrower (eq. 12), and less probable
    paths must pass a threshold that rises with the level. D_r starts at D_max and follows the request's acceptance
    lengths. Where the paper leaves it open, or ours differs:

    - The rank-0 path always reaches depth D: thresholds do not bind it, and its nodes are reserved in the budget. A
      draft that equals its target then has D tokens accepted in every step.
    - Before its first measurement a request has alpha 0.5.
    - Trees grow by levels, not depth first, since a level is one draft forward. Within one, better paths come first,
      and at most `max_frontier` = W_max nodes go on to the next (the paper bounds the number of nodes only).
    - Step t's plan for t + 1, its D and W, is made in `finish` (lookahead): the host then knows the batch's largest
      depth without waiting for the device. History that `begin` adds takes effect with the plan that follows it.
      Widths of deeper levels (eq. 12) and thresholds are of step t + 1's own probabilities, as in section 3.2; the
      paper's algorithm 1 (line 18) can be read as making the whole next tree from step t's.
    - P_parent is the probability of the parent's path. At T > 0 it and the entropy are of the noised scores.
    """

    needs_log_probs = True
    has_fixed_levels = False

    def __init__(
        self,
        max_num_reqs: int,
        max_nodes: int,
        device: torch.device | str,
        rules: PlanRules = SAGE,
        threshold: float = THRESHOLD,
    ):
        self.rules = rules
        self.tree = tree = DraftTree(max_num_reqs, max_nodes, device)
        self.max_nodes = max_nodes
        self.max_depth = min(rules.depth_max, max_nodes)
        self.num_candidates = max(rules.width_max, rules.top_k)
        self.max_frontier = rules.width_max
        self.trims = tree.device.type == "cpu"
        self._plans = TreePlans(max_num_reqs, rules, tree.device)
        self.confidence, self.max_depths = self._plans.confidence, self._plans.max_depths
        self.growth = TreeGrowBuffers(
            tree, self._plans, log_thresholds(rules, threshold).to(tree.device),
            width_bounds(rules, self.num_candidates).to(tree.device),
            max_parents=1 + (self.max_depth - 1) * self.max_frontier, max_frontier=self.max_frontier,
        )  # fmt: skip
        self._host_depths = _HostCopy(max_num_reqs + 1, tree.device)
        self._shapes = functools.cache(self._shape_of)  # by budget
        # By requests and frontier nodes, the candidates that were not taken: always the same objects.
        leftover = self.growth.leftover
        self._leaves = functools.cache(lambda reqs, parents: Leaves(*(part[:reqs, :parents] for part in leftover)))
        self.reset_rows(np.arange(max_num_reqs + 1))

    def reset_rows(self, rows_np: np.ndarray) -> None:
        rules, plans, alpha = self.rules, self._plans, 0.5
        rows_np = np.asarray(rows_np, dtype=np.int64)
        rows = torch.from_numpy(rows_np).to(self.tree.device, non_blocking=True)
        depth = int(rules.depth_min + alpha * (rules.depth_max - rules.depth_min))
        width = int(rules.width_min + (1.0 - alpha) * (rules.width_max - rules.width_min))
        plans.confidence.index_fill_(0, rows, alpha)
        plans.max_depths.index_fill_(0, rows, rules.depth_max)
        plans.history.index_fill_(0, rows, 0)
        plans.num_observed.index_fill_(0, rows, 0)
        plans.depths.index_fill_(0, rows, depth)
        plans.widths.index_fill_(0, rows, width)
        self._host_depths.read()[rows_np] = depth

    def warm_up(self, fill: bool) -> None:
        warm_adaptive_trees(self.growth, self.tree.empty, fill)

    def depth(self, max_nodes: int) -> int:
        return len(self._shape(max_nodes).widths)

    def num_levels(self, rows_np: np.ndarray, max_nodes: int) -> int:
        deepest = self.rules.depth_max
        if len(rows_np) > 0:
            # Clipped: a value from the device sizes the host's loops, and a broken draft may have written it.
            deepest = min(max(int(self._host_depths.read()[rows_np].max()), self.rules.depth_min), deepest)
        return min(deepest, self.depth(max_nodes))

    def begin(self, rows: Tensor, num_accepted: Tensor, max_nodes: int) -> None:
        """Start a step. The last acceptance lengths move the maximum depths (SAGE, section 3.3)."""
        tree_begin(self.tree, self.tree.empty, len(rows), self.growth, rows, num_accepted)

    def extend(
        self, level: int, log_probs: Tensor, token_ids: Tensor, *, rows: Tensor, max_nodes: int
    ) -> tuple[Tensor, Tensor] | None:
        if level == 0:
            tree_plan(self._plans, rows, log_probs)
        shape, num_reqs, growth = self._shape(max_nodes), len(rows), self.growth
        is_last = level + 1 == len(shape.widths)
        width = tree_grow(
            growth, rows, log_probs, token_ids, level=level, budget=shape.budget,
            first_parent=shape.first_parents[level], num_next=1 if is_last else shape.widths[level + 1],
            trims=self.trims,
        )  # fmt: skip
        if is_last:
            return None
        return growth.frontier_of(num_reqs, width)

    def frontier(self, level: int, num_reqs: int, max_nodes: int) -> tuple[Tensor, Tensor]:
        return self.growth.frontier_of(num_reqs, self._shape(max_nodes).widths[level])

    def send(self, rows_np: np.ndarray) -> None:
        """Send the planned depths; the deeper levels are still to run, so the copy arrives in time."""
        self._host_depths.send(rows_np, self._plans.next_depths[: len(rows_np)])

    def finish(self, fill: bool, *, rows: Tensor, max_nodes: int) -> None:
        num_reqs, growth, shape = len(rows), self.growth, self._shape(max_nodes)
        # The candidates of all levels; those of levels that this step did not run were cleared by `begin`.
        leaves = self._leaves(num_reqs, shape.first_parents[-1]) if fill else None
        tree_finish(
            self.tree, num_reqs, next_free=growth.next_free, leaves=leaves, max_nodes=shape.budget,
            plans=self._plans, rows=rows,
        )  # fmt: skip

    def _shape(self, max_nodes: int) -> "_Shape":
        return self._shapes(max(0, min(max_nodes, self.max_nodes)))

    def _shape_of(self, budget: int) -> "_Shape":
        """Return what follows from a budget: a frontier is the greedy node, and at most all nodes off its path."""
        max_others, widths = budget - min(self.rules.depth_min, budget), [1]
        while len(widths) < min(self.max_depth, budget):
            widths.append(min(self.max_frontier, widths[-1] * self.num_candidates, 1 + max_others))
        return _Shape(budget, tuple(widths), tuple(accumulate(widths, initial=0)))


class _Shape(NamedTuple):
    """What a step's launches take from its budget."""

    budget: int  # that counts
    widths: tuple[int, ...]  # by level the frontier's columns
    first_parents: tuple[int, ...]  # by level how many columns those above have; the last entry is of all


class _HostCopy:
    """Planned depths `[max_num_reqs]` on the host: sent after a step's first forward, read as the next step drafts.

    Reading waits for the copy: the host decides how many forwards a step has, and all tensor-parallel ranks alike. That
    leaves no device idle: the deeper levels of that draft and the target's whole forward are queued behind the copy.
    """

    def __init__(self, max_num_reqs: int, device: torch.device):
        on_gpu = device.type == "cuda"
        self._values = np.zeros(max_num_reqs, dtype=np.int64)
        self._staged = torch.zeros(max_num_reqs, dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._rows_np: np.ndarray | None = None  # whose values are on the way

    def send(self, rows_np: np.ndarray, values: Tensor) -> None:
        """Start to copy `values`, int64 [R], to the rows given; an earlier copy must have been read."""
        self._staged[: len(rows_np)].copy_(values, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._rows_np = rows_np.copy()

    def read(self) -> np.ndarray:
        """Return all values, int64 [max_num_reqs]; it may be written to."""
        if self._rows_np is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._values[self._rows_np] = self._staged[: len(self._rows_np)].numpy()
            self._rows_np = None
        return self._values
