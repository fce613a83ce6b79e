"""Code that only CUDA tensors reach gives the CPU's values, captured or not; its host-device transfers are known."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from null_gpu import device, emulate, judge
from null_gpu.cases import PLANNED_DEPTHS, TRANSFERS
from null_gpu.emulate import emulating, to_device, to_host
from null_gpu.networks import MAX_LEN, MAX_REQS, VOCAB, FakeDraft
from null_gpu.world import World, world
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.names import PRUNERS
from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner
from vllm_vidspec.scoring import top_entropy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# Beside those of engines: a request's own figures for its response; which requests were verified or are drafted for.
STEP = (*TRANSFERS, "request_records.py _to_host", "local_backend.py _draft", "local_backend.py _places_of")
# Once requests have come or gone: who has drafts, whose rule applies.
CHANGES = ("requests.py publish", "loose_tables.py _on_device")
PLANNED = "adaptive.py send"
SCENARIOS = {
    "chain, fly": dict(num_speculative_tokens=8, scorer="fly"),
    "chain, loose": dict(num_speculative_tokens=5, scorer="loose", position_shift=True),
    "tree-static, random": dict(num_speculative_tokens=25, draft_shape="tree-static", scorer="random"),
    "tree-adaptive, loose": dict(num_speculative_tokens=8, draft_shape="tree-adaptive", scorer="loose"),
    "auto": dict(
        num_speculative_tokens=8,
        draft_shape="auto",
        draft_table=[(1, 2, "tree-adaptive", 8), (3, MAX_REQS, "chain", 8)],
    ),
}


def counted(step, times: int) -> dict:
    steps = []
    with device.trace("sync", "copy") as seen:
        for _ in range(times):
            before = device.counters()
            step()
            steps.append(device.gained(before))
    return {"steps": steps, "lines": seen}


def complaints(row: dict, name: str) -> list[str]:
    is_planned = "adaptive" in name or name == "auto"
    allowed, known = ((PLANNED_DEPTHS,), (*STEP, *CHANGES, PLANNED)) if is_planned else ((), (*STEP, *CHANGES))
    waits = judge.extra_waits(row, {"steps": [{}], "lines": {}}, allowed)
    # PyTorch allocates at the first use of each size; steps of engines are counted after that.
    return [wait for wait in waits if not wait.startswith("alloc")] + judge.unknown_transfers(row, known)


def run(
    folder: Path, name: str, on: torch.device, num_changes: int = 2, goes_on: bool = False, **options
) -> tuple[World, list[str]]:
    """Decode for requests that come and go `num_changes` times; return the end, and complaints of the steps."""
    config = VidSpecConfig(model="draft", on_draft_error="raise", **SCENARIOS[name])
    rng, wrong = np.random.default_rng(len(name)), []
    with world(on, folder, config, temperature=1.0, fills_trees="loose" in name, **options) as here:
        if goes_on:
            here.drafter._max_run, here.drafter.chains._goes_on = config.num_speculative_tokens - 1, True
        here.capture(mostly_processed="static" in name)

        def add(row: int, length: int) -> None:
            here.add(row, rng.integers(0, VOCAB, length), int(rng.integers(0, 6)))

        def step(rows: list[int]) -> None:
            here.step([row for row in rows if here.lengths[row] < MAX_LEN])

        for row in range(MAX_REQS):
            add(row, rng.integers(8, 20))
        # A request whose context ends soon, and one that goes on without drafts.
        changes = (lambda: (here.end(1), add(1, MAX_LEN - 12)), lambda: here.requests.skip(2, "too_long"))
        for change in (lambda: None, *changes[:num_changes]):
            change()
            # The logits of the first request are processed; three requests are padded.
            for rows in [0, 1, 2, 3], [3, 1, 2], [1, 3], [3], [2, 0, 3]:
                wrong += complaints(counted(lambda rows=rows: step(rows), 1), name)
        return here, wrong


@functools.cache
def on_the_cpu(name: str) -> World:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), name, CPU)[0]


@pytest.mark.parametrize("name", SCENARIOS)
def test_decode_steps_equal_the_cpus(tmp_path, name):
    """Tokens, trees, the draft's KV cache and totals, bit for bit; what `flush` publishes may be a step late.
    Where chains are loose, tree attention takes the place of both models' own.

    Catches: a CUDA branch that computes something else, a host tensor among the device's, a wait or transfer more, a
    graph that is missing or reads what is not the step's.
    """
    expected = on_the_cpu(name)
    got, wrong = run(tmp_path, name, GPU, splits_keys=name != "chain, loose")
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
    used = {key.num_tokens for key, graph in got.graphs.graphs.items() if graph.num_replays}
    assert used == set(got.graphs.sizes) and not got.graphs.num_eager and not emulate.failed


def test_a_chain_that_goes_on(tmp_path, monkeypatch):
    """A token a call, the device knowing where each goes, as the parallel drafter does: a chain like any other."""
    draft = Drafter.draft

    def token_by_token(self, message):
        drafts, lengths = draft(self, message._replace(max_drafts=1)), np.zeros_like(message.idx_mapping_np)
        columns = [drafts.tokens[:, :1].clone()]
        while self.can_go_on(message.idx_mapping_np, lengths):
            columns.append(self.go_on().tokens[:, :1].clone())
        self.buffers.drafts[: len(drafts.rows)] = torch.cat(columns, dim=1)
        return drafts

    expected = on_the_cpu("chain, loose").log
    monkeypatch.setattr(Drafter, "draft", token_by_token)
    got, _ = run(tmp_path, "chain, loose", GPU, num_changes=0, goes_on=True)
    assert got.log == expected[: len(got.log)]
    assert any(graph.num_replays for key, graph in got.graphs.graphs.items() if key.name == "more")


def bound_of_host(patch) -> None:
    """The draft attends to no more than the longest request of the step, as the host knows it, has."""
    begin, forward, noted = Drafter._begin, FakeDraft.forward, {}

    def begin_and_look(self, *args):
        begin(self, *args)
        noted.update(longest=int(to_host(self.buffers.step.seq_lens[: args[-1]]).max()))

    def bounded(self, *args, seq_lens, **kwargs):
        bound = noted["longest"] + 8
        whole, step = self.attention, self.attention and self.attention.step
        if step is not None:
            limited = dataclasses.replace(step, prefix_lens=step.prefix_lens.clamp(max=bound))
            self.attention = SimpleNamespace(step=limited)
        try:
            return forward(self, *args, seq_lens=seq_lens.clamp(max=bound), **kwargs)
        finally:
            self.attention = whole

    patch.setattr(Drafter, "_begin", begin_and_look)
    patch.setattr(FakeDraft, "forward", bounded)


def padding_writes(patch) -> None:
    """Padding has the slot of the first request's root."""
    begin = Drafter._begin

    def begin_and_write(self, message, size):
        begin(self, message, size)
        rows = message.batch_rows if message.picked is None else message.picked
        if (slots := self.buffers.step.slot_mapping).is_cuda:
            slots[2 * len(rows) : 2 * size] = slots[1].clone()

    patch.setattr(Drafter, "_begin", begin_and_write)


@pytest.mark.parametrize("name,plant", [("chain, loose", padding_writes), ("tree-static, random", bound_of_host)])
def test_a_planted_error_is_seen(tmp_path, monkeypatch, name, plant):
    """Each changes nothing where steps run as functions on the CPU."""
    expected = on_the_cpu(name).log
    plant(monkeypatch)
    got = run(tmp_path, name, CPU, num_changes=0)[0].log
    assert got == expected[: len(got)]
    try:
        assert run(tmp_path, name, GPU, num_changes=0)[0].log != got
    except IndexError:  # drafts that are no tokens
        return


def test_a_new_budget_waits_once(tmp_path):
    """A static tree's tables for a budget are uploaded when the budget is first asked for, and never again."""
    config = VidSpecConfig(model="draft", on_draft_error="raise", **SCENARIOS["tree-static, random"])
    with world(GPU, tmp_path, config) as here:
        here.add(0, np.arange(9), 2)
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
    for name in PRUNERS:
        prune = get_pruner(name)
        expected = prune(PruneInputs(grid, num_keep, scores=scores, features=features))
        with emulating():
            on_gpu = dict(zip(("scores", "features"), to_device((scores, features)), strict=True))
            got = prune(PruneInputs(grid, num_keep, **on_gpu))
        assert torch.equal(to_host(got), expected), name
