"""DraftTree, chains and candidates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import BUFFERS, check_tree, quick, work_in_torch
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


def test_clear_empties_its_rows_in_place():
    """Catches: a buffer replaced instead of filled (a CUDA graph keeps the old one), other rows or the root touched."""
    tree = DraftTree(3, 5, "cpu")
    buffers = [getattr(tree, name) for name in BUFFERS]
    places = [buffer.data_ptr() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(3)
    tree.clear(2)
    assert places == [getattr(tree, name).data_ptr() for name in BUFFERS]
    for row in range(2):
        check_tree(tree, row)
        assert tree.tokens[row, 0] == 3 and tree.log_probs[row, 0] == 0
    assert all((buffer[2] == 3).all() for buffer in buffers)


@pytest.mark.parametrize("max_nodes", [0, 65])
def test_a_tree_has_1_to_64_nodes(max_nodes):
    """Catches: more nodes than a mask has bits."""
    with pytest.raises(AssertionError, match=r"\[1, 64\]"):
        DraftTree(1, max_nodes, "cpu")


def nodes_of(tree, row):
    """Return (token, parent, depth, mask, log-probability) of a row's nodes."""
    buffers = [getattr(tree, name)[row, : int(tree.num_nodes[row]) + 1].tolist() for name in BUFFERS[:5]]
    return [list(node) for node in zip(*buffers, strict=True)]


def leaves_by_sorting(tree, row, max_nodes, log_probs, token_ids, parents):
    """Return the nodes that `append_leaves` must leave in a row."""
    nodes = nodes_of(tree, row)
    flat = [
        (-score, index, token)
        for index, (score, token) in enumerate(zip(log_probs[row].flatten(), token_ids[row].flatten(), strict=True))
        if score > -float("inf")
    ]
    for negated, index, token in sorted(flat):
        if len(nodes) > max_nodes:
            break
        parent = int(parents[row].flatten()[index // log_probs.shape[2]])
        _, _, depth, word, _ = nodes[parent]
        bit = 1 << (len(nodes) - 1)
        nodes.append([int(token), parent, depth + 1, word | (bit - (bit >> 63 << 64)), -float(negated)])
    return nodes


@quick
@given(
    seed=st.integers(0, 2**32),
    num_reqs=st.integers(1, 4),
    num_parents=st.integers(1, 6),
    num_candidates=st.integers(1, 12),
    data=st.data(),
)
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_leaves_are_the_best_candidates(arrays, seed, num_reqs, num_parents, num_candidates, data):
    """Catches: an order other than by probability then index, a budget exceeded or not met, a candidate of -inf or NaN
    taken, node 64's bit, another request's candidate."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        if arrays == "torch":
            work_in_torch(patch)
        tree = DraftTree(num_reqs + 1, 64, "cpu")
        num_nodes = rng.integers(num_parents, 65, num_reqs)
        parents, depths, ancestors = topology_tables(list(range(64)), "cpu")
        for row, num in enumerate(num_nodes):
            tree.parents[row, : num + 1], tree.depths[row, : num + 1] = parents[: num + 1], depths[: num + 1]
            tree.ancestors[row, : num + 1] = ancestors[: num + 1]
            tree.tokens[row, 1 : num + 1] = 9_000 + torch.arange(num)
            tree.num_nodes[row] = int(num)
        shape = (num_reqs, num_parents, num_candidates)
        scores = torch.from_numpy(-rng.integers(0, 9, shape).astype(np.float32) / 4)
        scores[torch.from_numpy(rng.random(shape) < 0.2)] = -float("inf")
        scores[torch.from_numpy(rng.random(shape) < 0.1)] = float("nan")
        tokens = torch.from_numpy(
            rng.permuted(np.tile(np.arange(99), (*shape[:2], 1)), axis=2)[:, :, :num_candidates].copy()
        )
        leaf_parents = torch.from_numpy(rng.permuted(np.tile(np.arange(num_parents), (num_reqs, 1)), axis=1))
        max_nodes = data.draw(st.integers(max(num_nodes), 64))
        expected = [leaves_by_sorting(tree, row, max_nodes, scores, tokens, leaf_parents) for row in range(num_reqs)]
        tree.append_leaves(num_reqs, max_nodes, scores, tokens, leaf_parents)
        for row, nodes in enumerate(expected):
            assert nodes_of(tree, row) == nodes
            check_tree(tree, row)
        check_tree(tree, num_reqs)
        assert tree.num_nodes[num_reqs] == 0
