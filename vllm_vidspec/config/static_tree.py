"""Static draft trees as rank paths: SpecVLM's, and the check of a user's; plain Python.

A rank path names a node: 010 is the best child of the second-best child of the best child of the root.
"""

from collections.abc import Sequence
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
