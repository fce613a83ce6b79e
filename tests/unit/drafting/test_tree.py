"""DraftTree, chains and candidates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import BUFFERS, check_tree, quick
from vllm_vidspec.drafting import DraftTree, candidates, topology_tables

# --- chains ---


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 63, 64])
def test_tables_of_a_chain(max_nodes):
    """Catches: a table without the root, a mask without the node itself, node 64's bit lost in the sign."""
    parents, depths, ancestors = topology_tables(list(range(max_nodes)), "cpu")
    assert (parents.dtype, depths.dtype, ancestors.dtype) == (torch.int32, torch.int32, torch.int64)
    assert parents.tolist() == list(range(-1, max_nodes)) and depths.tolist() == list(range(max_nodes + 1))
    assert [word % 2**64 for word in ancestors.tolist()] == [2**node - 1 for node in range(max_nodes + 1)]


# --- candidates ---


def check_candidates(choose, logits, num_candidates):
    log_probs, ids = choose(logits, num_candidates)
    assert log_probs.dtype == torch.float32 and ids.dtype == torch.int64
    assert log_probs.shape == ids.shape == (len(logits), num_candidates)
    assert torch.equal(ids[:, 0], logits.argmax(-1)), "rank 0 is not the argmax"
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), exact.gather(1, ids), rtol=0, atol=1e-5)
    assert torch.equal(logits.gather(1, ids), logits.sort(dim=1, descending=True).values[:, :num_candidates])
    for row in ids.tolist():
        assert len(set(row)) == num_candidates, "a token is there twice"


@quick
@given(
    seed=st.integers(0, 2**32),
    num_levels=st.sampled_from([1, 2, 3, 50]),
    num_tokens=st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    data=st.data(),
)
def test_candidates_are_the_best_tokens(seed, num_levels, num_tokens, dtype, data):
    """Catches: a tie whose lowest id is not first, a duplicate after putting it there, softmax over the candidates
    only, half precision sums."""
    logits = torch.randint(0, num_levels, (4, num_tokens), generator=torch.Generator().manual_seed(seed)).to(dtype)
    check_candidates(candidates, logits, data.draw(st.integers(1, num_tokens)))


def test_candidates_of_a_large_tied_vocabulary():
    """Catches: the best id dropped when top-k, which takes any of a tie, misses it."""
    logits = torch.zeros(2, 20_000)
    logits[1, 7] = -1.0
    check_candidates(candidates, logits, 10)
    logits[:, [3, 9_000, 19_999]] = 2.0
    check_candidates(candidates, logits, 2)
    check_candidates(candidates, logits, 10)


def test_candidates_beside_forbidden_tokens():
    """Catches: NaN where a grammar forbids all but some tokens."""
    logits = torch.full((1, 30), -float("inf"))
    logits[0, [4, 20]] = torch.tensor([1.0, 2.0])
    log_probs, ids = candidates(logits, 4)
    assert ids[0, :2].tolist() == [20, 4] and log_probs[0, 2:].tolist() == [-float("inf")] * 2
    assert math.isclose(log_probs[0, :2].exp().sum().item(), 1.0, abs_tol=1e-6)


def test_mutation_ties_to_any_id():
    """Mutation: plain top-k, here one that takes the highest id of a tie. Seen to fail `check_candidates`."""
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 2.0]])

    def highest_id(logits, num_candidates):
        values, ids = logits.flip(1).sort(dim=1, descending=True, stable=True)
        return (values - logits.logsumexp(1, keepdim=True))[:, :num_candidates], 4 - ids[:, :num_candidates]

    check_candidates(candidates, logits, 3)
    with pytest.raises(AssertionError, match="rank 0"):
        check_candidates(highest_id, logits, 3)


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
