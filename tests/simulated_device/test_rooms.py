"""The pure rooms on a device that is not the host: what the torch text computes there is what the CPU gets."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import (
    accept_requests,
    test_guidance_scores,
    test_kv_compact,
    test_loosen,
    test_uv_scores,
    test_visual_relevance,
)
from tests.kernels.step_case import BLOCK_SIZE, MAX_POSITION, StepCase
from tests.kernels.test_draft_step import LevelCase
from tests.simulated_device import device as sim
from tests.unit.drafting.fake_draft import FakeDraft
from vidspec_kernels import (
    CacheList,
    LevelBuffers,
    StepBuffers,
    StepTables,
    accept,
    begin_step,
    dispatch,
    guidance_scores,
    kv_compact,
    loosen,
    next_level,
    random_scores,
    uv_text_sum,
    uv_video_scores,
    visual_relevance,
)
from vidspec_kernels.draft_tree.plan import confidence
from vllm_vidspec.drafting import StaticTree, candidates, topology_tables
from vllm_vidspec.drafting.tree import DraftTree
from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner, pruner_names
from vllm_vidspec.scoring import top_entropy

CPU = torch.device("cpu")
quick = settings(max_examples=15, deadline=None)


def same_on_both(function, *args, **kwargs):
    """Run a function on the CPU and on the device, on copies; what it returns or writes must be equal, bit for bit."""
    on_cpu, on_device = copy.deepcopy((args, kwargs)), sim.to_device(copy.deepcopy((args, kwargs)))
    expected = function(*on_cpu[0], **on_cpu[1])
    with sim.SimulatedDevice() as device:
        got = function(*on_device[0], **on_device[1])
    for ours, theirs in zip(sim.tree_iter((got, on_device)), sim.tree_iter((expected, on_cpu)), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert sim.is_device(ours), "a result on the host"
            assert torch.equal(sim.to_host(ours).nan_to_num(), theirs.nan_to_num())
            assert ours.dtype == theirs.dtype
    return device


# ---- kernels' references ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def references_on_the_host(monkeypatch):
    """The loops of a CPU are another text, which tests/kernels compare with this one."""
    monkeypatch.setattr(dispatch, "load_loops", dict)


def tensors_of(buffers) -> dict[str, torch.Tensor | None]:
    return {field.name: getattr(buffers, field.name) for field in dataclasses.fields(buffers)}


@pytest.mark.parametrize("seed", range(3))
def test_steps(seed):
    def begin(tables, out, *step, **sizes):
        begin_step(*step, StepTables(**tables), StepBuffers(**out), **sizes)

    for picked in (None, 4):
        case = StepCase(CPU, 7, picked, in_trees=seed > 0, seed=seed)
        sizes = case.sizes | {"size": case.size}
        same_on_both(begin, tensors_of(case.tables), tensors_of(case.buffers()), *case.step.values(), **sizes)

    def level(step, out, **arguments):
        next_level(StepBuffers(**step), LevelBuffers(**out), **arguments)

    for frontier in (0, 4):
        case = LevelCase(7, frontier, CPU, seed=seed)
        sizes = {"size": 7, "level": 1 + seed, "block_size": BLOCK_SIZE, "max_position": MAX_POSITION}
        same_on_both(level, tensors_of(case.step), tensors_of(case.out()), fed=case.fed, **case.trees, **sizes)


@pytest.mark.parametrize("seed", range(3))
def test_acceptance(seed):
    for mode in itertools.product((False, True), repeat=2):
        requests = accept_requests.random_requests(9, 8, *mode, seed=seed)
        same_on_both(accept, **accept_requests.pack(requests, 8, CPU, *mode))


@pytest.mark.parametrize("seed", range(3))
def test_looseness(seed):
    for in_trees, is_measured in itertools.product((False, True), repeat=2):
        same_on_both(loosen, **test_loosen.make_inputs(CPU, in_trees, is_measured, seed), impl="torch")


@pytest.mark.parametrize("seed", range(3))
def test_compaction(seed):
    inputs = test_kv_compact.make_inputs(6, 8, CPU, seed=seed)
    bases = test_kv_compact.make_bases(CPU, 2, (test_kv_compact.num_blocks_of(inputs), 4, 2, 8), dtype=torch.int32)

    def compact(bases, **inputs):
        kv_compact(CacheList([(base[..., :8], base[..., 8:]) for base in bases]), **inputs)

    same_on_both(compact, bases, **inputs)


def test_guidance():
    inputs = test_guidance_scores.make_inputs(CPU)
    same_on_both(guidance_scores, **inputs, out=test_guidance_scores.make_out(inputs), impl="torch")
    states, is_video, is_text = test_uv_scores.make_states(1, 40, 12, 16, dtype=torch.float32)
    same_on_both(uv_text_sum, states[1][is_text])
    same_on_both(uv_video_scores, states[1][is_video], uv_text_sum(states[1][is_text]))


def test_relevance():
    same_on_both(visual_relevance, **test_visual_relevance.make_inputs(), top_n=4, impl="torch")


# ---- drafting, scoring -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_log_probs", [True, False])
def test_candidates_and_confidence(with_log_probs):
    logits = torch.randint(0, 9, (40, 33), generator=torch.Generator().manual_seed(0)) / 4
    device = same_on_both(candidates, logits, 6, with_log_probs)
    assert not device.crossings
    log_probs, _ = candidates(logits, 6)
    log_probs[3] = float("nan")
    # numpy's exponential is not torch's, nor CUDA's: the last bits differ, far below what moves a depth.
    with sim.SimulatedDevice() as device:
        got = confidence(sim.to_device(log_probs), 5)
    assert not device.crossings
    assert torch.allclose(sim.to_host(got), confidence(log_probs, 5), rtol=0, atol=1e-6)


@quick
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6), st.integers(2, 7))
def test_leaves(seed, num_reqs, num_parents, num_candidates):
    """Catches: a key, a shift or a scatter that torch computes otherwise than numpy."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_reqs, num_parents, num_candidates)
    log_probs = -torch.randint(0, 5, shape, generator=generator) / 4
    log_probs[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
    tokens = torch.randint(0, 99, shape, generator=generator)
    num_nodes = torch.randint(0, 5, (num_reqs,), generator=generator, dtype=torch.int32)

    def fill(log_probs, tokens, parents, num_nodes):
        tree = DraftTree(num_reqs, 12, log_probs.device)
        tree.num_nodes[:] = num_nodes
        tree.append_leaves(num_reqs, 12, log_probs, tokens, parents)
        return tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.log_probs, tree.num_nodes

    same_on_both(fill, log_probs, tokens, torch.zeros(shape[:2], dtype=torch.int64), num_nodes)


def test_static_trees_and_chains():
    draft = FakeDraft(1, StaticTree(1, CPU).num_candidates)

    def grow(log_probs, tokens):
        policy = StaticTree(3, log_probs.device)
        rows, told = torch.arange(2, device=log_probs.device), torch.zeros(2, dtype=torch.int32, device=tokens.device)
        policy.begin(rows, told, 25)
        for level in range(policy.depth(25)):
            num = 2 * policy.width(level, 25)
            policy.extend(level, log_probs[:num], tokens[:num], rows=rows, max_nodes=25)
        policy.finish(True, rows=rows, max_nodes=25)
        chain = topology_tables(list(range(5)), log_probs.device)
        return policy.tree.tokens, policy.tree.parents, policy.tree.num_nodes, *chain

    pairs = [draft((i,)) for i in range(40)]
    same_on_both(grow, *(torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True)))


def test_scores():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 50, generator=generator)
    logits[0, 5:] = -torch.inf
    for top_k in (0, 1, 8):
        assert not same_on_both(top_entropy, logits, top_k).crossings
    seeds, positions = torch.randint(0, 2**62, (20,), generator=generator), torch.arange(20)
    assert not same_on_both(random_scores, seeds, positions).crossings


# ---- pruning ---------------------------------------------------------------------------------------------------------


@quick
@given(
    st.builds(TokenGrid, st.integers(0, 9), st.integers(0, 4), st.integers(1, 4), st.integers(0, 2)),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_pruners(grid, share, seed):
    """Catches: a pruner that mixes what it measured on the device with indices of the host, or chooses otherwise."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (grid.num_tokens,), generator=generator).float()
    features = torch.randint(0, 3, (grid.num_tokens, 3), generator=generator).float()
    num_keep = int(share * grid.num_tokens)
    for name in pruner_names():
        if name != "none":
            same_on_both(
                lambda scores, features, name=name: get_pruner(name)(
                    PruneInputs(grid, num_keep, scores=scores, features=features)
                ),
                scores,
                features,
            )
