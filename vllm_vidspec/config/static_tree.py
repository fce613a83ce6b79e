"""Static draft trees as rank paths: SpecVLM's, grown ones, and the check of a user's; plain Python.

A rank path names a node: 010 is the best child of the second-best child of the best child of the root.
"""

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_vidspec.errors import VidSpecError

Path = tuple[int, ...]

MAX_NODES = 64  # of a draft tree: one bit of an int64 word each

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

TILE_ROWS = 128  # of a KV head that an attention kernel holds at a time: a tree that fits reads the keys once
# Shapes whose trees are grown to K nodes of so many levels, which is as many draft forwards.
GROWN_DEPTHS = {"tree-2": 2, "tree-3": 3, "tree-4": 4}
# Where the draft's best candidate is right, and its next best where that is wrong, and so on: a pair of the papers, on
# whose side the second is (SpecVLM's chains and trees). Trees grown by these are within 1 % of the best of their size
# and depth for pairs that agree on 0.6 to 0.8 of the tokens; at 0.5 the one of two levels is, which is fastest there.
_BEST, _NEXT_BEST = 0.7, 0.4

Chance = Callable[[int, int], float]


def typical_chance(depth: int, rank: int) -> float:
    """Return how likely the candidate of a rank is the target's token, where its parent is; at every depth the same."""
    return _BEST if rank == 0 else (1 - _BEST) * _NEXT_BEST * (1 - _NEXT_BEST) ** (rank - 1)


@functools.cache
def grow_paths(num_nodes: int, depth: int, chance: Chance = typical_chance) -> tuple[Path, ...]:
    """Return the tree with the most accepted tokens of all with so many nodes (1 to 64) and at most `depth` levels.

    `chance(d, rank)` is how likely a candidate at depth d, 1 below the root, is right where its parent is: above 0,
    below 1, and falling with the rank. The paths come likeliest first: the first n are the best tree of n nodes.
    """
    paths: list[Path] = []
    heap: list[tuple[float, Path, float]] = [(-chance(1, 0), (0,), 1.0)]  # of each: its own chance and its parent's
    while heap and len(paths) < num_nodes:
        found, path, of_parent = heapq.heappop(heap)
        paths.append(path)
        level, rank = len(path), path[-1] + 1
        if rank < MAX_NODES:
            heapq.heappush(heap, (_rounded(of_parent * chance(level, rank)), (*path[:-1], rank), of_parent))
        if level < depth:
            heapq.heappush(heap, (_rounded(-found * chance(level + 1, 0)), (*path, 0), -found))
    return tuple(paths)


def most_nodes(group: int) -> int:
    """Return the nodes of the largest tree whose rows, the root's included, are one tile: `group` heads a KV head."""
    return min(MAX_NODES, TILE_ROWS // group - 1)


def level_widths(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return the nodes that have children, by level: what each draft forward of a tree computes; the root first."""
    parents = Counter(map(len, {path[:-1] for path in paths}))
    return tuple(parents[depth] for depth in range(len(parents)))


def _rounded(chance: float) -> float:
    """Return the place of a node in the heap; the same factors in another order are the same chance."""
    return -round(chance, 12)


def parse_paths(paths: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """Return a user's tree, one rank path a node, as tuples in the order given; a VidSpecError names what is wrong.

    There are 1 to 64 of them, each once, with every prefix of each; siblings have the ranks 0 to c - 1, c <= 64.
    """
    parsed = tuple(_parse_path(path) for path in paths)
    if not parsed:
        raise VidSpecError("tree paths: empty, at least the path 0 is needed")
    if len(parsed) > MAX_NODES:
        raise VidSpecError(f"tree paths: {len(parsed)} nodes, at most {MAX_NODES} are possible")
    for path in parsed:
        parent, better = path[:-1], (*path[:-1], path[-1] - 1)
        if parsed.count(path) > 1:
            raise VidSpecError(f"tree paths: {_show(path)} is given twice")
        if parent and parent not in parsed:
            raise VidSpecError(f"tree paths: {_show(path)} is given without its parent {_show(parent)}")
        if path[-1] > 0 and better not in parsed:
            raise VidSpecError(f"tree paths: {_show(path)} is given without its better sibling {_show(better)}")
    return parsed


def _parse_path(path: Any) -> Path:
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
