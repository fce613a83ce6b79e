"""DraftTree and the tables of a topology. Candidates: tests/kernels/test_candidates.py."""

import pytest
import torch

from tests.unit.drafting.fake_draft import BUFFERS, check_tree
from vllm_vidspec.drafting import DraftTree, topology_tables

# --- chains ---


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 63, 64])
def test_tables_of_a_chain(max_nodes):
    """Catches: a table without the root, a mask without the node itself, node 64's bit lost in the sign."""
    parents, depths, ancestors = topology_tables(list(range(max_nodes)), "cpu")
    assert (parents.dtype, depths.dtype, ancestors.dtype) == (torch.int32, torch.int32, torch.int64)
    assert parents.tolist() == list(range(-1, max_nodes)) and depths.tolist() == list(range(max_nodes + 1))
    assert [word % 2**64 for word in ancestors.tolist()] == [2**node - 1 for node in range(max_nodes + 1)]


# --- DraftTree ---


@pytest.mark.parametrize("max_nodes", [1, 7, 64])
def test_an_empty_tree_is_harmless(max_nodes):
    """Catches: an unused column that points past itself, sees others, or could be accepted."""
    tree = DraftTree(3, max_nodes, "cpu")
    for row in range(3):
        check_tree(tree, row)
    for buffer in (getattr(tree, name) for name in BUFFERS[:5]):
        assert buffer.shape == (3, max_nodes + 1) and buffer.is_contiguous()
    assert tree.tokens.dtype == tree.ancestors.dtype == torch.int64 and tree.log_probs.dtype == torch.float32
    assert tree.parents.dtype == tree.depths.dtype == tree.num_nodes.dtype == torch.int32


@pytest.mark.parametrize("max_nodes", [0, 65])
def test_a_tree_has_1_to_64_nodes(max_nodes):
    """Catches: more nodes than a mask has bits."""
    with pytest.raises(AssertionError, match=r"\[1, 64\]"):
        DraftTree(1, max_nodes, "cpu")
