"""What the launches of draft trees read and write in every step: node tables, plans and frontiers, checked once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vidspec_kernels.arrays import Tensors, arrays_of, as_meta, check_contiguous


@dataclass(eq=False)
class TreeTables(Tensors):
    """The trees of a batch, one batch row each, column 0 the root."""

    tokens: Tensor  # int64 [max_num_reqs, K + 1], contiguous as all of these
    parents: Tensor  # int32 [max_num_reqs, K + 1], smaller than the node's own index; root -1
    depths: Tensor  # int32 [max_num_reqs, K + 1], edges up to the root
    ancestors: Tensor  # int64 [max_num_reqs, K + 1]; bit j - 1 of node i is set iff node j is i or an ancestor of i
    log_probs: Tensor  # float32 [max_num_reqs, K + 1], the draft's log-probability of the path to the node
    num_nodes: Tensor  # int32 [max_num_reqs], draft nodes of the tree

    def __post_init__(self) -> None:
        self.num_cols = self.tokens.shape[-1]
        shape = ([self.tokens.shape[0]], [self.num_cols])
        check_contiguous(
            self.device, tokens=(self.tokens, torch.int64, *shape), parents=(self.parents, torch.int32, *shape),
            depths=(self.depths, torch.int32, *shape), ancestors=(self.ancestors, torch.int64, *shape),
            log_probs=(self.log_probs, torch.float32, *shape), num_nodes=(self.num_nodes, torch.int32, shape[0]),
        )  # fmt: skip

    def as_meta(self) -> "TreeTables":
        return TreeTables(*map(as_meta, self.tensors))


@dataclass(frozen=True)
class TreeTemplate(Tensors):
    """What a tree is at the beginning of a step, but its tokens."""

    parents: Tensor  # int32 [K + 1], contiguous as all of these
    depths: Tensor  # int32 [K + 1]
    ancestors: Tensor  # int64 [K + 1]
    log_probs: Tensor  # float32 [K + 1]
    num_nodes: int = 0  # Draft nodes


class PlanRules(NamedTuple):
    """The numbers of SAGE's plans."""

    depth_min: int  # Least depth of a tree; `depth_max` the greatest
    depth_max: int
    width_min: int  # Least number of the root's children; `width_max` the greatest
    width_max: int
    top_k: int  # Tokens whose probabilities make the entropy, >= 2
    history: int  # Steps whose mean acceptance moves the greatest depth; 0 = it stays
    history_low: float  # A mean below it makes trees shallower; one above `history_high` deeper
    history_high: float


class TreePlans:
    """What adaptive trees remember of requests by persistent row, and the plans that a step makes by batch row.

    There is one persistent row more than requests, for the padding rows of a batch; what it holds is in range.

    Args:
        max_num_reqs: Most requests of a batch, and persistent rows.
        rules: How plans are made.
        device: Where the tensors live.

    Attributes:
        confidence: float32 [max_num_reqs + 1], alpha of the request's last plan.
        max_depths: float32 [max_num_reqs + 1], D_r, what alpha 1 means.
        depths: int64 [max_num_reqs + 1], levels of the request's tree.
        widths: int64 [max_num_reqs + 1], its root's children.
        history: int64 [max_num_reqs + 1, window], a ring of acceptance lengths; 0 = none yet.
        num_observed: int64 [max_num_reqs + 1], acceptance lengths so far: the next one's place in the ring, modulo.
        next_confidence: float32 [max_num_reqs] by batch row, the plan that this step's roots make.
        next_depths: int64 [max_num_reqs].
        next_widths: int64 [max_num_reqs].
    """

    def __init__(self, max_num_reqs: int, rules: PlanRules, device: torch.device | str):
        self.max_num_reqs, self.rules, num_rows = max_num_reqs, rules, max_num_reqs + 1

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.confidence, self.max_depths = torch.zeros(num_rows, device=device), torch.zeros(num_rows, device=device)
        self.depths, self.widths, self.num_observed = numbers(num_rows), numbers(num_rows), numbers(num_rows)
        self.history = numbers(num_rows, rules.history)
        self.next_confidence = torch.zeros(max_num_reqs, device=device)
        self.next_depths, self.next_widths = numbers(max_num_reqs), numbers(max_num_reqs)
        self.device = self.depths.device
        # In the kernels' order: a step's plan and where it goes, and what an acceptance length moves.
        self.adopted = (
            self.next_confidence, self.next_depths, self.next_widths, self.confidence, self.depths, self.widths
        )  # fmt: skip
        self.observed = (self.history, self.num_observed, self.max_depths)
        self.adopted_arrays = arrays_of(self.adopted)
        self.observed_arrays = arrays_of(self.observed)

    def as_meta(self) -> "TreePlans":
        return TreePlans(self.max_num_reqs, self.rules, "meta")
