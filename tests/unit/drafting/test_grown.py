"""Grown trees: of all trees of their size and depth the one with the most accepted tokens."""

import itertools
import math

import pytest

from vllm_vidspec.config import VidSpecConfig, parse_config
from vllm_vidspec.config.static_tree import GROWN_DEPTHS, SPECVLM_PATHS, grow_paths, parse_paths, typical_chance


def parsed(**changes) -> VidSpecConfig:
    return parse_config({"method": "vidspec", "model": "draft", **changes})[0]


def length(paths, chance):
    """Return the accepted tokens of a step: every node's chance."""
    return sum(math.prod(chance(depth, rank) for depth, rank in enumerate(path, 1)) for path in paths)


def uneven(depth, rank):
    """A draft that is sure at first, and whose next best is nearly as good deeper down."""
    return (0.8, 0.15, 0.04)[rank] if depth == 1 else (0.5, 0.4, 0.05)[rank]


@pytest.mark.parametrize("chance", [typical_chance, uneven])
@pytest.mark.parametrize(("num_nodes", "depth"), [(1, 1), (2, 2), (4, 2), (5, 3), (6, 2)])
def test_no_tree_of_the_size_gives_more(num_nodes, depth, chance):
    """Every tree of three ranks is tried. Catches: a node whose parent is missing, a greedy order that is none."""
    every = [path for d in range(1, depth + 1) for path in itertools.product(range(3), repeat=d)]
    best = 0.0
    for paths in itertools.combinations(every, num_nodes):
        chosen = set(paths)
        if all(not path[:-1] or path[:-1] in chosen for path in paths):
            best = max(best, length(paths, chance))
    grown = grow_paths(num_nodes, depth, chance) if chance is typical_chance else grow_paths(num_nodes, depth, by_three)
    assert parse_paths(grown) == grown and len(grown) == num_nodes and max(map(len, grown)) <= depth
    assert length(grown, chance) == pytest.approx(best)


def by_three(depth, rank):
    """`uneven`, and next to nothing behind its three ranks."""
    return uneven(depth, rank) if rank < 3 else 1e-9 / rank


def test_the_first_nodes_are_the_best_smaller_tree():
    """Catches: ties broken by the order in which factors were multiplied."""
    for depth in GROWN_DEPTHS.values():
        whole = grow_paths(24, depth)
        assert all(grow_paths(num, depth) == whole[:num] for num in range(1, 24))


def test_the_tree_of_24_in_three_forwards():
    """By hand, ties by path: of the same chance come 010 before 100, 02 before 20."""
    words = "0 00 000 1 01 10 2 001 010 100 02 20 3 002 020 200 03 30 4 003 030 300 04 40"
    assert grow_paths(24, 3) == tuple(tuple(map(int, word)) for word in words.split())


@pytest.mark.parametrize(("rate", "depths"), [(0.5, (2,)), (0.6, (2, 3, 4)), (0.7, (2, 3, 4)), (0.8, (2, 3, 4))])
def test_one_tree_serves_pairs_that_agree_more_or_less(rate, depths):
    """Catches: trees that lose more than 1 % to those grown for the pair itself."""
    of_pair = lambda depth, rank: rate if rank == 0 else (1 - rate) * 0.4 * 0.6 ** (rank - 1)  # noqa: E731
    for depth in depths:
        typical, own = grow_paths(24, depth), grow_paths(24, depth, of_pair)
        assert 1 + length(typical, of_pair) >= 0.99 * (1 + length(own, of_pair))


def test_what_auto_chooses_from():
    """Catches: SpecVLM's tree or an adaptive one taken by `auto`, a tree of single nodes a level, graphs for more."""
    shape = {"draft_shape": "auto"}
    found = {K: parsed(num_speculative_tokens=K, **shape).choices(has_graphs=True) for K in (1, 5, 6, 24)}
    assert found[24] == (("tree-4", 24), ("tree-3", 24), ("tree-2", 24), ("chain", 3), ("chain", 1))
    assert [plan.shape for plan in found[6]] == ["tree-3", "tree-2", "chain", "chain"]
    assert [plan.shape for plan in found[5]] == ["tree-2", "chain", "chain"] and found[1][1:] == (("chain", 1),)
    on_cpu = parsed(num_speculative_tokens=24, **shape).choices(has_graphs=False)
    assert [plan.num_tokens for plan in on_cpu if plan.shape == "chain"] == [5, 3, 2, 1]
    own = parsed(num_speculative_tokens=2, tree_paths=[[0], [1]], **shape)
    assert own.choices(has_graphs=True)[0] == ("tree-static", 2)
    config = parsed(num_speculative_tokens=24, **shape)
    assert config.max_path == 5 and config.choosable_shapes == ("auto", "chain", "tree-2", "tree-3", "tree-4")
    assert config.paths_of("tree-static") == SPECVLM_PATHS and config.paths_of("tree-2") == grow_paths(24, 2)
    capped = parsed(num_speculative_tokens=24, num_speculative_tokens_per_batch_size=[[1, 4, 24], [5, 9, 0]], **shape)
    assert capped.plan_for(4).num_tokens == 24 and capped.plan_for(5) == ("none", 0)
