"""Static trees: SpecVLM's published topology, users' paths and their errors, truncated budgets."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import FakeDraft, check_greedy_first, check_tree, grow, paths_of, quick
from vllm_vidspec.config.static_tree import SPECVLM_PATHS, parse_paths
from vllm_vidspec.drafting import DraftTree, StaticTree, topology_tables
from vllm_vidspec.errors import VidSpecError

# SpecVLM's published tree, by depth.
PUBLISHED = [
    ["0", "1", "2", "3"],
    ["00", "01", "02", "10", "11", "20", "21", "30"],
    ["000", "001", "002", "010", "011", "020", "021", "100"],
    ["0000", "0001", "0002"],
    ["00000", "00001"],
]


@st.composite
def trees(draw, max_nodes=64):
    """Draw a tree as rank paths, in any order."""
    paths = [(0,)]
    num_children = {(): 1, (0,): 0}
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent = draw(st.sampled_from(list(num_children)))
        path = (*parent, num_children[parent])
        num_children[parent] += 1
        num_children[path] = 0
        paths.append(path)
    return draw(st.permutations(paths))


def check_static(policy, paths, row, draft, fed):
    """Assert that a row holds exactly the nodes of these rank paths, fed as far as they have children."""
    tree = policy.tree
    check_tree(tree, row)
    check_greedy_first(tree, row, draft, max(len(path) for path in paths if not any(path)))
    assert int(tree.num_nodes[row]) == len(paths)
    tokens = {(): ()}  # by rank path
    for path in sorted(paths, key=len):
        above = tokens[path[:-1]]
        tokens[path] = (*above, int(draft(above)[1][path[-1]]))
    expected, order = set(tokens.values()) - {()}, paths_of(tree, row, len(paths))
    assert set(order[1:]) == expected
    # Nothing without children is fed, and all that has any.
    with_children = {path[:-1] for path in expected}
    assert [path for level in fed for path in level[row]] == sorted(
        with_children, key=lambda path: (len(path), order.index(path))
    )


def test_specvlm_is_the_published_tree():
    """Catches: a path lost, a forward more or less; an order other than the greedy path, then depth, then path."""
    policy, draft = StaticTree(2, "cpu"), FakeDraft(0, 4)
    assert (policy.max_nodes, policy.max_depth, policy.num_candidates, policy.max_frontier) == (25, 5, 4, 4)
    assert [["".join(map(str, path)) for path in SPECVLM_PATHS if len(path) == depth] for depth in range(1, 6)] == (
        PUBLISHED
    )
    fed = grow(policy, [draft], [1])
    assert [len(level[0]) for level in fed] == [1, 4, 4, 1, 1]
    assert policy.tree.depths[0, 1:].bincount().tolist() == [0, 4, 8, 8, 3, 2]
    check_static(policy, SPECVLM_PATHS, 0, draft, fed)
    order = ["".join(map(str, path)) for path in policy.topology.paths]
    greedy = ["0", "00", "000", "0000", "00000"]
    assert order == greedy + [path for level in PUBLISHED for path in level if path not in greedy]


@quick
@given(paths=trees(), seed=st.integers(0, 1000), num_reqs=st.integers(1, 8))
def test_a_users_tree_is_drafted(paths, seed, num_reqs):
    """Catches: a valid tree refused, a wrong parent or rank, a node fed without children, another request's tokens."""
    assert parse_paths([list(path) for path in paths]) == tuple(paths)
    policy = StaticTree(8, "cpu", [list(path) for path in paths])
    drafts = [FakeDraft(seed + row, policy.num_candidates) for row in range(num_reqs)]
    fed = grow(policy, drafts, list(range(num_reqs)))
    assert len(fed) == policy.max_depth == max(map(len, paths))
    assert max(len(rows[0]) for rows in fed) == policy.max_frontier
    for row, draft in enumerate(drafts):
        check_static(policy, paths, row, draft, fed)


@quick
@given(paths=trees(max_nodes=30), budgets=st.lists(st.integers(0, 40), min_size=1, max_size=4), seed=st.integers(0, 99))
@example(paths=SPECVLM_PATHS, budgets=[5, 4, 3, 2, 1], seed=7)  # to the greedy path: the chain
def test_a_smaller_budget_gives_the_first_nodes(paths, budgets, seed):
    """Catches: a budget exceeded, a forward that no node needs, remains of the budget of the step before."""
    policy = StaticTree(3, "cpu", paths)
    drafts = [FakeDraft(seed + row, policy.num_candidates) for row in range(2)]
    for budget in budgets:
        fed = grow(policy, drafts, [2, 0], budget)
        prefix = policy.topology.paths[:budget]
        assert len(fed) == max((len(path) for path in prefix), default=1)
        for row, draft in enumerate(drafts):
            if prefix:
                check_static(policy, prefix, row, draft, fed)
            else:
                check_tree(policy.tree, row)
                assert policy.tree.num_nodes[row] == 0


@pytest.mark.parametrize("max_nodes", [1, 4, 25, 40])
def test_buffers_wider_or_narrower_than_the_topology(max_nodes):
    """Catches: a topology that does not fit its buffers; `fill` that invents nodes."""
    policy, draft = StaticTree(2, "cpu", max_nodes=max_nodes), FakeDraft(3, 4)
    draft.num_candidates = policy.num_candidates
    fed = grow(policy, [draft], [0], fill=True)
    assert policy.tree.tokens.shape == (2, max_nodes + 1)
    check_static(policy, policy.topology.paths, 0, draft, fed)
    assert len(policy.topology.paths) == min(max_nodes, 25)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "empty"),
        ([[0], [1], [0]], "0 is given twice"),
        ([[0], [0, 1, 0]], "010 is given without its parent 01"),
        ([[1]], "1 is given without its better sibling 0"),
        ([[0], [12]], r"\[12\] is given without its better sibling \[11\]"),
        ([[0], []], r"\[\] is no rank path"),
        ([[0], [0.0]], "is no rank path"),
        ("012", "'0' is no rank path"),
        ([[0], [-1]], r"rank -1 of \[-1\] is not in \[0, 63\]"),
        ([[0] * depth for depth in range(1, 66)], "65 nodes, at most 64"),
    ],
)
def test_wrong_paths_are_one_clear_line(paths, message):
    """Catches: a tree with holes accepted, an error that does not name the path, a traceback of ours."""
    with pytest.raises(VidSpecError, match=f"^tree paths: .*{message}") as error:
        parse_paths(paths)
    assert "\n" not in str(error.value) and isinstance(error.value, ValueError)
    with pytest.raises(ValueError, match=message):
        StaticTree(1, "cpu", paths)


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 63, 64])
def test_tables_of_a_chain(max_nodes):
    """Catches: a table without the root, a mask without the node itself, node 64's bit lost in the sign."""
    parents, depths, ancestors = topology_tables(list(range(max_nodes)), "cpu")
    assert (parents.dtype, depths.dtype, ancestors.dtype) == (torch.int32, torch.int32, torch.int64)
    assert parents.tolist() == list(range(-1, max_nodes)) and depths.tolist() == list(range(max_nodes + 1))
    assert [word % 2**64 for word in ancestors.tolist()] == [2**node - 1 for node in range(max_nodes + 1)]


@pytest.mark.parametrize("max_nodes", [0, 65])
def test_a_tree_has_1_to_64_nodes(max_nodes):
    """Catches: more nodes than a mask has bits."""
    with pytest.raises(AssertionError, match=r"\[1, 64\]"):
        DraftTree(1, max_nodes, "cpu")
