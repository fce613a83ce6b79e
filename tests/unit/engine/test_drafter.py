"""The drafter's look at what a step needs, without models."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fakes import Counts, StagedWrites
from vllm_vidspec.engine.draft import drafter as drafter_module
from vllm_vidspec.engine.draft import kv as kv_module
from vllm_vidspec.engine.draft.drafter import UNBOUNDED, Drafter
from vllm_vidspec.engine.draft.kv import DraftKV

CPU, K, BLOCK, ROWS, LONGEST = torch.device("cpu"), 5, 4, 6, 60


@pytest.fixture(autouse=True, scope="module")
def staged_writes():
    """vLLM's go through memory that the device maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_module, "StagedWriteTensor", StagedWrites)
        yield


def make_drafter(max_model_len: int, num_positions: int) -> Drafter:
    """Return a drafter's tables."""
    made = object.__new__(Drafter)
    made.kv = DraftKV(80, BLOCK, ROWS, LONGEST + K + 1, CPU)
    made.model = SimpleNamespace(max_model_len=max_model_len, num_positions=num_positions)
    made._max_model_len, made._num_speculative_tokens, made._max_run = LONGEST, K, 0
    made._capacity_limit = np.full(ROWS, UNBOUNDED, dtype=np.int64)
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.integers(20, 90), st.integers(20, 90), st.lists(st.tuples(st.integers(0, 12), st.integers(-9, 30)), max_size=4)
)
def test_a_step_is_looked_at_whenever_it_needs_something(max_model_len, num_positions, prompts):
    """Texts grow by every length: whoever `has_room` is held by the context and owns the blocks.

    Catches: a block or an end of the context that a steady step passes by; a row that nobody drafts for that makes
    every step look.
    """
    drafter, rows = make_drafter(max_model_len, num_positions), np.arange(len(prompts))
    for row, (num_dropped, pos_delta) in enumerate(prompts):
        drafter.kv.add(row, num_dropped, pos_delta)
        drafter._capacity_limit[row] = -1
    steps_with_room = 0
    for bound in range(13, LONGEST + 1):
        bounds = np.full(len(rows), bound)
        needed = bounds - drafter.kv.num_dropped_np[rows] + K
        has_room = drafter.has_room(np.arange(ROWS), np.full(ROWS, bound))
        if has_room:
            steps_with_room += 1
            assert drafter.holds(rows, bounds).all() and (drafter.kv.capacity_np[rows] >= needed).all()
        drafter.reserve(rows, bounds)
    if prompts and max_model_len >= LONGEST and num_positions >= LONGEST + 30:
        assert steps_with_room >= (LONGEST - 13) // 2
    for row in rows:
        drafter._capacity_limit[row] = UNBOUNDED
    assert drafter.has_room(np.arange(ROWS), np.full(ROWS, LONGEST))


def test_a_run_has_room_as_long_as_it_goes_on(monkeypatch):
    """A row may own more blocks than its text reaches, since a stream was cut: a run goes on into them.

    Catches: blocks that no step brings, as the run begins before them; a run without an end; one past the row's blocks.
    """
    drafter, rows = make_drafter(LONGEST, LONGEST), np.arange(1)
    drafter._max_run = 7
    drafter.kv.add(0, 0, 0)
    drafter.reserve(rows, np.array([30]))
    brought = []
    monkeypatch.setattr(drafter_module, "begin_step", lambda *_, max_drafts, **__: brought.append(max_drafts))
    drafter._sample, drafter._tables, drafter.buffers = (
        SimpleNamespace(temperature=None, seeds=None),
        None,
        SimpleNamespace(step=None),
    )
    drafter.model.num_positions = 90
    drafter._begin(torch.zeros(1), None, torch.zeros(1), None, 1)
    assert brought == [K + 7]
    ran = []
    drafter.chains = SimpleNamespace(go_on=lambda *args: ran.append(args))
    drafter.counters, drafter._graphs = SimpleNamespace(add=lambda *_: None), SimpleNamespace(is_wanted=False)
    drafter._step, drafter._num_more = (1, None, "drafts"), 7
    for length in range(10, 30):
        if not drafter.can_go_on(rows, np.array([length])):
            break
        assert drafter.go_on() == "drafts"
    assert len(ran) == 7
    drafter._num_more = 7
    last = int(drafter.kv.capacity_np[0]) - K
    assert drafter.can_go_on(rows, np.array([last])) and not drafter.can_go_on(rows, np.array([last + 1]))


@pytest.mark.parametrize(("is_wanted", "is_graph", "expected"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_step_without_a_graph_is_counted_where_graphs_were_asked_for(is_wanted, is_graph, expected):
    """Catches: a draft whose backend captures nothing, or a batch above every size, that is slow and says nothing."""
    drafter, counters = object.__new__(Drafter), Counts()
    drafter.counters, drafter._graphs = counters, SimpleNamespace(is_wanted=is_wanted, is_on=False)
    drafter._count(5, is_graph, 0.0)
    assert counters.get("draft_eager_steps", 0) == expected and counters["draft_steps"] == 1
