"""Decode steps on a device that is not the host: the text is the CPU's, and every crossing is known and justified."""

import contextlib

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.simulated_device import device as sim
from tests.simulated_device.fakes import MAX_REQS, VOCAB
from tests.simulated_device.world import World, world
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.drafting.static import StaticTree
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.forwards import Forwards
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.verify import verifier as scorer

NUM_STEPS = 14

# What a decode step of requests that run may cross: (function, kind) -> at most so often, and why.
STEP = {
    ("LocalBackend._places_of", sim.UPLOAD): (1, "which requests are drafted for, where it is another batch"),
    ("LocalBackend._draft", sim.UPLOAD): (1, "which requests were verified: a host fact"),
    ("Counters._count_requests", sim.DOWNLOAD): (1, "what a response says of itself; read with the step's tokens"),
    ("Counters.flush", sim.DOWNLOAD): (1, "the totals; read a step later, once an event says that they are there"),
}
ADAPTIVE = STEP | {
    ("_HostCopy.send", sim.DOWNLOAD): (1, "the planned depths, of which the host makes the next step's forwards"),
    ("_HostCopy.read", sim.EVENT_WAIT): (1, "they were sent a step ago: the wait is for work that is done"),
}
# What comes with requests that come or go, and with the first step of a new budget.
CHANGES = {
    ("RequestRows.publish", sim.UPLOAD): (1, "who has drafts changed"),
    ("LooseRules._on_device", sim.UPLOAD): (1, "whose rule applies changed"),
}

SCENARIOS = {
    "chain": (dict(num_speculative_tokens=5), STEP),
    "tree-static": (dict(num_speculative_tokens=25, draft="tree-static"), STEP),
    "tree-adaptive": (dict(num_speculative_tokens=16, draft="tree-adaptive"), ADAPTIVE),
    "tree-adaptive, no lookahead": (
        dict(num_speculative_tokens=12, draft="tree-adaptive", tree_lookahead=False, tree_history=0, tree_width_max=4),
        STEP,
    ),
    "auto": (
        dict(
            num_speculative_tokens=16,
            draft="auto",
            draft_table=[(1, 2, "tree-adaptive", 16), (3, MAX_REQS, "chain", 16)],
        ),
        ADAPTIVE,
    ),
    "chain, loose": (dict(num_speculative_tokens=5, scorer="loose", position_shift=True), STEP),
    "tree-adaptive, loose": (dict(num_speculative_tokens=16, draft="tree-adaptive", scorer="loose"), ADAPTIVE),
    "chain, fly": (dict(num_speculative_tokens=8, scorer="fly", fly_top_k=8), STEP),
    "tree-static, random": (dict(num_speculative_tokens=25, draft="tree-static", scorer="random"), STEP),
}


def drive(here: World, device: sim.SimulatedDevice | None, seed: int, expected: dict) -> list[str]:
    """Run requests that come and go; return what crossed and is not expected, and what is expected and never does."""
    rng = np.random.default_rng(seed)
    for row in range(MAX_REQS):
        here.add(row, rng.integers(0, VOCAB, rng.integers(8, 20)), int(rng.integers(0, 6)))
    wrong, seen, changed = [], set(), True
    for step in range(NUM_STEPS):
        is_whole = step % 4 < 2
        rows = range(MAX_REQS) if is_whole else rng.permutation(MAX_REQS)[: rng.integers(1, MAX_REQS)]
        with contextlib.nullcontext({}) if device is None else device.counting() as counts:
            here.step([int(row) for row in rows])
        seen |= counts.keys()
        wrong += unexpected(counts, expected | CHANGES if changed else expected)
        changed = changed and not is_whole  # once everyone has run, all is known
        if step == NUM_STEPS // 2:
            here.end(1)
            here.add(1, rng.integers(0, VOCAB, 9), 3)
            changed = True
        if step == NUM_STEPS - 5:  # it goes on without speculation
            here.requests.skip(2, "draft_error")
            changed = True
    if device is not None:
        wrong += [f"{kind} in {function} no more: take it off the list" for function, kind in expected.keys() - seen]
    return wrong


def unexpected(counts: dict, allowed: dict) -> list[str]:
    """Return one line for each crossing of a step that is not in the table, or is there less often."""
    return [
        f"{kind} in {function}, {times} times, {allowed.get((function, kind), (0,))[0]} expected"
        for (function, kind), times in counts.items()
        if times > allowed.get((function, kind), (0,))[0]
    ]


def run(tmp_path, name: str, seed: int, on_device: bool, **more) -> tuple[World, list[str]]:
    knobs, expected = SCENARIOS[name]
    config = VidSpecConfig(model="self", on_draft_error="raise", **knobs)
    device = sim.SimulatedDevice() if on_device else None
    with device or contextlib.nullcontext(), world(device, tmp_path, config, **more) as here:
        return here, drive(here, device, seed, expected)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_decode_step_equals_the_cpus_and_crosses_what_it_must(tmp_path, name, temperature):
    """Catches: torch text that differs from numpy's, a host tensor among the device's, a wait on the decode path."""
    seed = 7 * len(name) + int(temperature)
    options = dict(temperature=temperature, fills_trees=temperature == 0)
    expected, _ = run(tmp_path, name, seed, on_device=False, **options)
    got, wrong = run(tmp_path, name, seed, on_device=True, **options)
    assert got.log == expected.log
    # All but the null block, whose last writer is anyone.
    assert torch.equal(
        sim.to_host(got.speculator.backend.draft_model.cache)[1:], expected.speculator.backend.draft_model.cache[1:]
    )
    assert torch.equal(sim.to_host(got.counters._totals), expected.counters._totals)
    drafts, _, accepted = expected.counters._totals[:3].tolist()
    assert drafts > 20 and accepted > 10, "nothing was accepted: the comparison is of little worth"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["chain", "chain, loose"])
def test_chains_in_tree_attention_are_the_same_chains(tmp_path, name):
    """Where neither model's own attention splits keys: requests with and without drafts in one batch, padding, roots.

    Catches: a prefix or a mask that is not the chain's, the draft's first two tokens among them; a crossing more.
    """
    own, _ = run(tmp_path, name, 5, on_device=False, temperature=1.0)
    assert own.target_trees is own.speculator.backend.drafter.attention is None
    for on_device in (False, True):
        ours, wrong = run(tmp_path, name, 5, on_device=on_device, temperature=1.0, splits_keys=False)
        assert ours.log == own.log and not wrong
        assert (
            ours.trees is None
            and ours.target_trees is not None
            and ours.speculator.backend.drafter.attention is not None
        )
        assert torch.equal(sim.to_host(ours.draft.cache)[1:], own.draft.cache[1:])


PLANTED = {
    "item": (sim.ITEM, lambda rows, rows_np, kv: kv.num_dropped.max().item()),
    "host index": (sim.HOST_INDEX, lambda rows, rows_np, kv: kv.num_dropped[torch.from_numpy(rows_np)]),
    "scalar index assignment": (sim.SCALAR_UPLOAD, lambda rows, rows_np, kv: kv.fed.__setitem__(rows, 3)),
    "mask": (sim.MASK, lambda rows, rows_np, kv: kv.num_dropped[kv.num_dropped > 0]),
    "tensor of a list": (sim.BLOCKING_UPLOAD, lambda rows, rows_np, kv: torch.tensor([1], device=rows.device)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_crossing_is_caught_by_name(tmp_path, monkeypatch, name):
    kind, cross = PLANTED[name]
    draft = Drafter.draft

    def draft_and_cross(self, message):
        drafts = draft(self, message)
        cross(drafts.rows, message.idx_mapping_np, self.kv)
        return drafts

    monkeypatch.setattr(Drafter, "draft", draft_and_cross)
    _, wrong = run(tmp_path, "chain", 1, on_device=True)
    assert wrong and all(line.startswith(f"{kind} in ") for line in wrong)
    assert cross.__code__.co_qualname in wrong[0] or "draft_and_cross" in wrong[0]


def test_planted_host_tensors_raise(tmp_path, monkeypatch):
    """A tensor that was made on the host by mistake stops the step on this device, as on CUDA."""
    fed = Forwards.fed

    def fed_on_the_host(self, level):
        logical_pos, input_ids = fed(self, level)
        return logical_pos + torch.zeros(len(logical_pos), dtype=torch.int64), input_ids

    monkeypatch.setattr(Forwards, "fed", fed_on_the_host)
    with pytest.raises(RuntimeError, match="same device"):
        run(tmp_path, "chain", 1, on_device=True)


def test_planted_errors_of_the_torch_text_are_seen(tmp_path, monkeypatch):
    """Catches: a comparison that would pass whatever the device computed."""
    remember = scorer.TargetTrees.remember

    def forget_a_path(self, tally):
        kept = remember(self, tally)
        return kept._replace(path=kept.path.clone()) if sim.is_device(tally.rows) else kept

    expected, _ = run(tmp_path, "tree-static", 1, on_device=False)
    monkeypatch.setattr(scorer.TargetTrees, "remember", forget_a_path)
    got, _ = run(tmp_path, "tree-static", 1, on_device=True)
    assert got.log != expected.log


def test_a_new_budget_waits_once(tmp_path):
    """A static tree's tables for a budget are uploaded when the budget is first asked for, and never again."""
    config = VidSpecConfig(model="self", on_draft_error="raise", **SCENARIOS["tree-static"][0])
    device = sim.SimulatedDevice()
    rng = np.random.default_rng(0)
    with device, world(device, tmp_path, config) as here:
        here.add(0, rng.integers(0, VOCAB, 9), 2)
        here.step([0])
        waits = []
        for budget in (6, 6, 25, 6):
            with device.counting() as counts:
                here.step([0], max_drafts=budget)
            waits.append({function for function, kind in counts if kind in sim.WAITING})
    assert waits[1:] == [set()] * 3
    assert waits[0] == {StaticTree._make_plan.__qualname__, "topology_tables"}


def test_counters_are_read_back_without_waiting(tmp_path):
    """The totals that `flush` publishes are those of the CPU, a step late."""
    published = {}
    for on_device in (False, True):
        here, _ = run(tmp_path, "chain", 3, on_device)
        published[on_device] = here.counters._published.copy()
        totals = sim.to_host(here.counters._totals).numpy()
        assert np.array_equal(published[on_device], totals) != on_device
    assert (published[True] <= published[False]).all() and published[True].any()
    assert Counters.flush.__qualname__ in {function for function, _ in STEP}
