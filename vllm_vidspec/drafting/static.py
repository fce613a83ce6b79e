"""The static tree (SpecVLM): one topology for every request and step, so only tokens move; pure torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_vidspec.config.paths import SPECVLM_PATHS, Path, parse_paths
from vllm_vidspec.drafting.tree import DraftTree, topology_tables


@dataclass(frozen=True)
class Topology:
    """A static tree in our node order; `paths[i]`, `parents[i]` belong to node i + 1.

    Attributes:
        paths: Rank paths: the greedy path first, then by depth, then by path.
        parents: Node index of each parent, 0 = the root; smaller than the node's own.
    """

    paths: tuple[Path, ...]
    parents: tuple[int, ...]

    def cut(self, num_nodes: int) -> "Topology":
        """Return the tree of the first nodes; it may be empty."""
        return Topology(self.paths[:num_nodes], self.parents[:num_nodes])

    def frontiers(self) -> list[list[int]]:
        """Return the nodes with children of each level, in node order; [[0]] for a tree without nodes.

        Node order puts the greedy node first. The length is the number of draft forwards.
        """
        levels: list[list[int]] = [[0]]
        for depth in range(1, max((len(path) for path in self.paths), default=0)):
            nodes = {parent for parent in self.parents if parent and len(self.paths[parent - 1]) == depth}
            levels.append(sorted(nodes))
        return levels


def topology_of(paths: Sequence[Path]) -> Topology:
    """Return checked paths (see `parse_paths`) as a topology.

    The greedy path is as deep as the paths have it; a tree that is deeper elsewhere is the user's choice.
    """
    ordered = tuple(sorted(paths, key=lambda path: (any(path), len(path), path)))
    node_of = {path: node for node, path in enumerate(ordered, start=1)}
    return Topology(ordered, tuple(node_of.get(path[:-1], 0) for path in ordered))


@dataclass(frozen=True)
class _Level:
    """What one level of a topology does, as index tensors on the device.

    Attributes:
        frontier: int64 [max_num_reqs, F], the nodes with children on this level: the greedy one first.
        sources: int64 [m], of the frontier's candidates (flat, F * C) those that become nodes.
        nodes: int64 [m], the nodes that they become.
    """

    frontier: Tensor
    sources: Tensor
    nodes: Tensor


@dataclass(frozen=True)
class _Plan:
    """A topology cut to a budget: its tables (see `DraftTree`) and its levels."""

    num_nodes: int
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    levels: tuple[_Level, ...]


class StaticTree:
    """A `TreePolicy` whose topology is fixed (SpecVLM, section 3; EAGLE-style), by default SpecVLM's 25 nodes.

    Parents, depths and masks are constants of the buffers; a step writes tokens only. `tree.log_probs` is never filled
    in, because nothing in a fixed topology asks for it. A step with a budget below the topology gets its first nodes,
    and no forward that these do not need. Nothing is remembered of a request, and `finish` appends nothing: a fixed
    topology is full, or its budget is.

    Args:
        max_num_reqs: Most requests of a batch.
        device: Where the tensors live.
        paths: Rank paths, see `parse_paths`.
        max_nodes: K, the width of the buffers; by default the number of paths. A topology that is larger is cut.

    Raises:
        VidSpecError: The paths are no tree.
    """

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device | str,
        paths: Sequence[Sequence[int]] = SPECVLM_PATHS,
        max_nodes: int | None = None,
    ):
        topology = topology_of(parse_paths(paths))
        self.max_nodes = len(topology.paths) if max_nodes is None else max_nodes
        self.tree = DraftTree(max_num_reqs, self.max_nodes, device)
        self.topology = topology.cut(self.max_nodes)
        self.num_candidates = max(path[-1] for path in self.topology.paths) + 1
        frontiers = self.topology.frontiers()
        self.max_depth = len(frontiers)
        self.max_frontier = max(map(len, frontiers))
        self.needs_log_probs = False
        self._plans: dict[int, _Plan] = {}
        self._budget = -1  # whose plan is in the buffers
        self._use(self.max_nodes)
        self._num_reqs = 0

    def admit(self, rows_np: np.ndarray) -> None:
        """Do nothing: a fixed topology remembers nothing."""

    def observe(self, rows: Tensor, num_accepted: Tensor) -> None:
        """Do nothing: a fixed topology learns nothing."""

    def begin(self, rows: Tensor, rows_np: np.ndarray, max_nodes: int) -> int:
        """Start a step; see `TreePolicy`. Tokens of the last step stay until the levels overwrite them."""
        self._num_reqs = len(rows_np)
        self._use(max_nodes)
        self.tree.num_nodes[: self._num_reqs] = 0
        return len(self._plan.levels)

    def extend(self, level: int, log_probs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scatter the tokens of one level; see `TreePolicy`. `log_probs` is not looked at."""
        here, tokens = self._plan.levels[level], self.tree.tokens[: self._num_reqs]
        tokens.index_copy_(1, here.nodes, token_ids.view(self._num_reqs, -1).index_select(1, here.sources))
        if level + 1 == len(self._plan.levels):
            return None
        frontier = self._plan.levels[level + 1].frontier
        return frontier[: self._num_reqs], tokens.index_select(1, frontier[0])

    def finish(self, fill: bool) -> None:
        """Set the number of nodes; see `TreePolicy`."""
        self.tree.num_nodes[: self._num_reqs] = self._plan.num_nodes

    def _make_plan(self, topology: Topology) -> _Plan:
        device, levels = self.tree.device, []
        for frontier in topology.frontiers():
            sources, nodes = [], []
            for node, (path, parent) in enumerate(zip(topology.paths, topology.parents, strict=True), start=1):
                if parent in frontier:
                    sources.append(frontier.index(parent) * self.num_candidates + path[-1])
                    nodes.append(node)
            levels.append(
                _Level(
                    torch.tensor(frontier, device=device).repeat(self.tree.max_num_reqs, 1),
                    torch.tensor(sources, dtype=torch.int64, device=device),
                    torch.tensor(nodes, dtype=torch.int64, device=device),
                )
            )
        num_nodes = len(topology.paths)
        parents = [*topology.parents, *[0] * (self.max_nodes - num_nodes)]  # leaves under the root past the nodes
        return _Plan(num_nodes, *topology_tables(parents, device), tuple(levels))

    def _use(self, budget: int) -> None:
        """Bring the constants of a budget's plan into every batch row; it rarely changes, mostly near a text's end."""
        budget = max(0, min(budget, len(self.topology.paths)))
        if budget == self._budget:
            return
        if budget not in self._plans:
            self._plans[budget] = self._make_plan(self.topology.cut(budget))
        self._budget, self._plan = budget, self._plans[budget]
        plan = self._plan
        self.tree.parents.copy_(plan.parents)
        self.tree.depths.copy_(plan.depths)
        self.tree.ancestors.copy_(plan.ancestors)
        self.tree.tokens[:, 1 + plan.num_nodes :] = -1
