"""The static tree (SpecVLM): one topology for every request and step; only the tokens change."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels import PlacedLevel, TreeTemplate, tree_begin, tree_place
from vidspec_kernels.warm_up import warm_static_trees
from vllm_vidspec.config.static_tree import SPECVLM_PATHS, Path, parse_paths
from vllm_vidspec.drafting.tree import DraftTree, TreePolicy, topology_tables


@dataclass(frozen=True)
class Topology:
    """A static tree in our node order; `paths[i]`, `parents[i]` belong to node i + 1."""

    paths: tuple[Path, ...]  # Rank paths: the greedy path first, then by depth, then by path
    parents: tuple[int, ...]  # Node index of each parent, 0 = the root; smaller than the node's own

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
    """Return checked paths (see `parse_paths`) as a topology; another path may be deeper than the greedy one."""
    ordered = tuple(sorted(paths, key=lambda path: (any(path), len(path), path)))
    node_of = {path: node for node, path in enumerate(ordered, start=1)}
    return Topology(ordered, tuple(node_of.get(path[:-1], 0) for path in ordered))


@dataclass(frozen=True)
class _BudgetTables:
    """A topology cut to a budget: what its trees begin as, what each level does, its nodes with children.

    `frontiers` are int64 [max_num_reqs, F], the greedy node first; `fed` is what `frontier` returned, by (requests,
    level).
    """

    template: TreeTemplate
    levels: tuple[PlacedLevel, ...]
    frontiers: tuple[Tensor, ...]
    fed: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)


class StaticTree(TreePolicy):
    """A `TreePolicy` whose topology is fixed (SpecVLM, section 3; EAGLE-style), by default SpecVLM's 25 nodes.

    Parents, depths, masks and the number of nodes are constants of a budget, copied into the buffers as a step begins;
    then it writes tokens only, and never `tree.log_probs`. A step with a budget below the topology gets its first
    nodes, and the forwards that these need. `max_nodes` is K, the width of the buffers; a larger topology is cut.
    """

    needs_log_probs = False
    has_fixed_levels = True
    trims = False  # there is nothing to trim

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
        self._of_budget = functools.cache(self._make_tables)
        self.prepare(self.max_nodes)

    def prepare(self, max_nodes: int) -> None:
        self._tables(max_nodes)

    def warm_up(self, fill: bool) -> None:
        warm_static_trees(self.tree, self.tree.empty, self.num_candidates)

    def depth(self, max_nodes: int) -> int:
        return len(self._tables(max_nodes).levels)

    def num_levels(self, rows_np: np.ndarray, max_nodes: int) -> int:
        return self.depth(max_nodes)

    def begin(self, rows: Tensor, num_accepted: Tensor, max_nodes: int) -> None:
        tree_begin(self.tree, self._tables(max_nodes).template, len(rows))

    def extend(
        self, level: int, log_probs: Tensor, token_ids: Tensor, *, rows: Tensor, max_nodes: int
    ) -> tuple[Tensor, Tensor] | None:
        tables, num_reqs = self._tables(max_nodes), len(rows)
        tree_place(self.tree, tables.levels[level], num_reqs, token_ids)
        return None if level + 1 == len(tables.levels) else self.frontier(level + 1, num_reqs, max_nodes)

    def frontier(self, level: int, num_reqs: int, max_nodes: int) -> tuple[Tensor, Tensor]:
        tables = self._tables(max_nodes)
        if (num_reqs, level) not in tables.fed:
            tables.fed[num_reqs, level] = (
                tables.frontiers[level][:num_reqs], tables.levels[level - 1].fed_tokens[:num_reqs]
            )  # fmt: skip
        return tables.fed[num_reqs, level]

    def _tables(self, max_nodes: int) -> _BudgetTables:
        return self._of_budget(max(0, min(max_nodes, len(self.topology.paths))))

    def _make_tables(self, budget: int) -> _BudgetTables:
        topology = self.topology.cut(budget)
        tree, levels, fed, frontiers = self.tree, [], [], topology.frontiers()
        device, max_num_reqs = tree.device, tree.max_num_reqs
        for frontier, following in zip(frontiers, [*frontiers[1:], []], strict=True):
            # By node, which of the frontier's candidates it is.
            source = {
                node: frontier.index(parent) * self.num_candidates + path[-1]
                for node, (path, parent) in enumerate(zip(topology.paths, topology.parents, strict=True), start=1)
                if parent in frontier
            }
            places = (list(source.values()), list(source), [source[node] for node in following])
            taken, nodes, fed_on = (torch.tensor(it, dtype=torch.int64, device=device) for it in places)
            tokens = torch.zeros(max_num_reqs, len(following), dtype=torch.int64, device=device)
            levels.append(PlacedLevel(taken, nodes, fed_on, tokens))
            fed.append(torch.tensor(frontier, device=device).repeat(max_num_reqs, 1))
        num_nodes = len(topology.paths)
        parents = [*topology.parents, *[0] * (self.max_nodes - num_nodes)]  # leaves under the root past the nodes
        template = TreeTemplate(*topology_tables(parents, device), tree.empty.log_probs, num_nodes)
        return _BudgetTables(template, tuple(levels), tuple(fed))
