"""The code that only CUDA tensors reach computes what the CPU's computes, and its host-device transfers are known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from null_gpu import device, judge
from null_gpu.cases import CROSSINGS, PLANNED_DEPTHS
from null_gpu.emulate import emulating, to_device, to_host
from null_gpu.networks import MAX_REQS, VOCAB
from null_gpu.world import World, world
from vidspec_kernels import random_scores
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.verify.verifier import TargetTrees
from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner, pruner_names
from vllm_vidspec.scoring import top_entropy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# Beside those of engines: a request's own figures for its response; which requests were verified or are drafted for.
STEP = (*CROSSINGS, "counters.py _count_requests", "speculator.py _propose", "speculator.py _places_of")
# Once requests have come or gone: who has drafts, whose rule applies.
CHANGES = ("requests.py publish", "rules.py _on_device")
PLANNED = "adaptive.py send"
SCENARIOS = {
    "chain, fly": dict(num_speculative_tokens=8, scorer="fly", fly_top_k=8),
    "chain, loose": dict(num_speculative_tokens=5, scorer="loose", position_shift=True),
    "tree-static, random": dict(num_speculative_tokens=25, draft="tree-static", scorer="random"),
    "tree-adaptive, loose": dict(num_speculative_tokens=8, draft="tree-adaptive", scorer="loose"),
    "tree-adaptive, no lookahead": dict(
        num_speculative_tokens=12, draft="tree-adaptive", tree_lookahead=False, tree_history=0, tree_width_max=4
    ),
    "auto": dict(
        num_speculative_tokens=16,
        draft="auto",
        draft_table=[(1, 2, "tree-adaptive", 16), (3, MAX_REQS, "chain", 16)],
    ),
}


def counted(step, times: int) -> dict:
    """Run steps; return what they counted, as `judge` reads it."""
    steps = []
    with device.trace("sync", "copy") as seen:
        for _ in range(times):
            before = device.counters()
            step()
            steps.append(device.gained(before))
    return {"steps": steps, "lines": {f"{event}|{line}": row for (event, line), row in seen.lines.items()}}


def complaints(row: dict, name: str) -> list[str]:
    """Return one line for each wait, and for each transfer that is not known."""
    is_planned = "adaptive" in name or name == "auto"
    allowed, known = ((PLANNED_DEPTHS,), (*STEP, *CHANGES, PLANNED)) if is_planned else ((), (*STEP, *CHANGES))
    waits = judge.waits_of_ours(row, {"steps": [{}], "lines": {}}, allowed)
    # PyTorch allocates at the first use of each size; steps of engines are counted after that.
    return [wait for wait in waits if not wait.startswith("alloc")] + judge.crossings_of_ours(row, known)


def run(folder: Path, name: str, on: torch.device, **options) -> tuple[World, list[str]]:
    """Decode for requests that come and go; return what is left, and what was wrong about the steps' transfers."""
    config = VidSpecConfig(model="self", on_draft_error="raise", **SCENARIOS[name])
    rng, wrong = np.random.default_rng(len(name)), []
    with world(on, folder, config, temperature=1.0, fills_trees="loose" in name, **options) as here:

        def admit(row: int) -> None:
            here.admit(row, rng.integers(0, VOCAB, rng.integers(8, 20)), int(rng.integers(0, 6)))

        def some() -> None:
            here.step([int(row) for row in rng.permutation(MAX_REQS)[: rng.integers(1, MAX_REQS)]])

        for row in range(MAX_REQS):
            admit(row)
        for change in (lambda: None, lambda: (here.end(1), admit(1)), lambda: here.speculator._give_up(2, "too_long")):
            change()
            for step in (lambda: here.step(list(range(MAX_REQS))), some):
                wrong += complaints(counted(step, 2), name)
        return here, wrong


@pytest.mark.parametrize("name", SCENARIOS)
def test_decode_steps_equal_the_cpus(tmp_path, name):
    """Tokens, trees, the draft's KV cache and totals, bit for bit; what `flush` publishes may be a step late.

    Where chains are loose, the target's and the draft's own attention splits no keys on the GPU, and tree attention
    takes their place: the tokens are the same.
    Catches: a CUDA branch that computes something else, a host tensor among the device's, a wait, a transfer more.
    """
    takes_trees = name == "chain, loose"
    expected, _ = run(tmp_path, name, CPU)
    got, wrong = run(tmp_path, name, GPU, splits_keys=not takes_trees)
    assert not wrong, "\n".join(wrong)
    assert got.log == expected.log
    assert got.target_trees is not None or "chain" in name
    # All but the null block, whose last writer is anyone.
    assert torch.equal(to_host(got.draft.cache)[1:], expected.draft.cache[1:])
    totals = expected.counters._totals
    assert torch.equal(to_host(got.counters._totals), totals)
    assert totals[0] > 20 and totals[2] > 10, "nothing was accepted: the comparison is of little worth"
    late = got.counters._published
    assert (late <= totals.numpy()).all() and late.any()


def test_a_planted_error_is_seen(tmp_path, monkeypatch):
    """Catches: a comparison that would pass whatever the GPU computed."""
    name, remember = "tree-static, random", TargetTrees.remember

    def forget_a_path(self, tally):
        kept = remember(self, tally)
        return kept._replace(path=kept.path.clone()) if tally.rows.is_cuda else kept

    expected, _ = run(tmp_path, name, CPU)
    monkeypatch.setattr(TargetTrees, "remember", forget_a_path)
    assert run(tmp_path, name, GPU)[0].log != expected.log


def test_a_new_budget_waits_once(tmp_path):
    """A static tree's tables for a budget are uploaded when the budget is first asked for, and never again."""
    config = VidSpecConfig(model="self", on_draft_error="raise", **SCENARIOS["tree-static, random"])
    with world(GPU, tmp_path, config) as here:
        here.admit(0, np.arange(9), 2)
        here.step([0])
        waits = [
            judge.total(counted(lambda budget=budget: here.step([0], max_drafts=budget), 1), "sync")
            for budget in (6, 6, 25, 6)
        ]
    assert waits[0] > 0 and not any(waits[1:])


def same_on_the_gpu(function, *tensors) -> None:
    """Assert that a function gives the same on both devices, bit for bit, and transfers nothing."""
    expected = function(*tensors)
    with emulating():
        on_gpu = to_device(tensors)
        before = device.counters()
        got = function(*on_gpu)
        gained = device.gained(before)
    assert got.is_cuda and not gained["sync"] + gained["copy.blocking"], gained
    assert torch.equal(to_host(got).nan_to_num(), expected.nan_to_num())


def test_scores():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 50, generator=generator)
    logits[0, 5:] = -torch.inf
    for top_k in (0, 1, 8):
        same_on_the_gpu(lambda logits, top_k=top_k: top_entropy(logits, top_k), logits)
    same_on_the_gpu(random_scores, torch.randint(0, 2**62, (20,), generator=generator), torch.arange(20))


@settings(max_examples=15, deadline=None)
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
        prune = get_pruner(name)
        expected = prune(PruneInputs(grid, num_keep, scores=scores, features=features))
        with emulating():
            on_gpu = dict(zip(("scores", "features"), to_device((scores, features)), strict=True))
            got = prune(PruneInputs(grid, num_keep, **on_gpu))
        assert torch.equal(to_host(got), expected), name
