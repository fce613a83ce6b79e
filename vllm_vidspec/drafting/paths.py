"""Static tree topologies as rank paths: SpecVLM's, a user's, their checks and their node order; plain Python.

A rank path names a node by what it is at each level: 010 is the best child of the second-best child of the best child
of the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_vidspec.drafting.tree import MAX_NODES
from vllm_vidspec.errors import VidSpecError

Path = tuple[int, ...]

# SpecVLM's tree, in its published order: 25 nodes, 4 / 8 / 8 / 3 / 2 on levels 1 to 5, 5 draft forwards.
SPECVLM_PATHS: tuple[Path, ...] = tuple(
    tuple(int(rank) for rank in path)
    for path in (
        *("0", "1", "2", "3"),
        *("00", "01", "02", "10", "11", "20", "21", "30"),
        *("000", "001", "002", "010", "011", "020", "021", "100"),
        *("0000", "0001", "0002"),
        *("00000", "00001"),
    )
)


def parse_paths(paths: Sequence[Sequence[int]] | Sequence[str]) -> tuple[Path, ...]:
    """Check a user's tree.

    Args:
        paths: One rank path a node: a list of ranks, or a string with one digit a level. In any order.

    Returns:
        The paths as tuples, in the order given: 1 to 64 of them, each once, with every prefix of each; siblings have
        the ranks 0 to c - 1, c <= 64.

    Raises:
        VidSpecError: (a ValueError) The paths are no such tree; one line that says which path is wrong.
    """
    if isinstance(paths, str):
        raise VidSpecError(f"tree paths: expected a list of rank paths, got the string {paths!r}")
    parsed = tuple(_parse_path(path) for path in paths)
    if not parsed:
        raise VidSpecError("tree paths: empty, at least the path 0 is needed")
    if len(parsed) > MAX_NODES:
        raise VidSpecError(f"tree paths: {len(parsed)} nodes, at most {MAX_NODES} are possible")
    known: set[Path] = set()
    for path in parsed:
        if path in known:
            raise VidSpecError(f"tree paths: {_show(path)} is given twice")
        known.add(path)
    for path in parsed:
        parent, rank = path[:-1], path[-1]
        if parent and parent not in known:
            raise VidSpecError(f"tree paths: {_show(path)} is given without its parent {_show(parent)}")
        if rank > 0 and (*parent, rank - 1) not in known:
            sibling = _show((*parent, rank - 1))
            raise VidSpecError(f"tree paths: {_show(path)} is given without its better sibling {sibling}")
    return parsed


def _parse_path(path: Any) -> Path:
    if isinstance(path, str):
        if not (path.isascii() and path.isdigit()):
            raise VidSpecError(f"tree paths: {path!r} is no rank path; write one digit a level, such as '010'")
        return tuple(int(digit) for digit in path)
    ranks = tuple(path) if isinstance(path, Sequence) else ()
    # bool is an int, and a JSON `true` is a slip.
    if not ranks or any(type(rank) is not int for rank in ranks):
        raise VidSpecError(f"tree paths: {path!r} is no rank path; write a list of ranks, such as [0, 1, 0]")
    for rank in ranks:
        if not 0 <= rank < MAX_NODES:
            raise VidSpecError(f"tree paths: rank {rank} of {_show(ranks)} is not in [0, {MAX_NODES - 1}]")
    return ranks


def _show(path: Path) -> str:
    digits = all(0 <= rank <= 9 for rank in path)
    return "".join(map(str, path)) if digits else str(list(path))


@dataclass(frozen=True)
class Topology:
    """A static tree in our node order; `paths[i]`, `parents[i]` belong to node i + 1.

    Attributes:
        paths: Rank paths: the greedy path first, then by depth, then by path.
        parents: Node index of each parent, 0 = the root; smaller than the node's own.
    """

    paths: tuple[Path, ...]
    parents: tuple[int, ...]

    @property
    def num_candidates(self) -> int:
        """The largest rank + 1."""
        return max(path[-1] for path in self.paths) + 1

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
