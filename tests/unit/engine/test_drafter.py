"""The drafter's memory and its look at what a step needs, without models; tests/properties has who owns which block."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.engine.fakes import CPU, Counts, staged
from vllm_vidspec.engine.draft import drafter as drafter_module
from vllm_vidspec.engine.draft.drafter import UNBOUNDED, Drafter
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.messages import DraftMessage

K, BLOCK, ROWS, LONGEST = 5, 4, 6, 60


@pytest.fixture(autouse=True, scope="module")
def staged_writes():
    with pytest.MonkeyPatch.context() as patch:
        staged(patch)
        yield


def reserve(kv: DraftKV, **num_slots: int) -> list[bool]:
    rows = [int(name[1:]) for name in num_slots]
    return kv.reserve(np.array(rows), np.array(list(num_slots.values()))).tolist()


def test_a_row_that_does_not_fit_keeps_what_it_had():
    """Catches: blocks taken for a row that is then refused, a table that is longer than its width."""
    kv = DraftKV(6, BLOCK, 5, 12, CPU)
    assert reserve(kv, r0=5, r1=9) == [True, True] and kv.num_used_blocks == 5
    before = [list(blocks) for blocks in kv._blocks]
    assert reserve(kv, r0=9, r1=9) == [False, True] and [list(blocks) for blocks in kv._blocks] == before
    kv.remove(1)
    assert reserve(kv, r0=12) == [True] and reserve(kv, r0=13) == [False]  # the table is full


def test_blocks_are_taken_ahead_of_need_and_never_where_another_may_need_them():
    """Catches: a row that grows in every step; more ahead than an eighth of a pool, past a table, of a full pool."""
    kv, short = (DraftKV(161, BLOCK, 5, max_slots, CPU) for max_slots in (400, 2 * BLOCK))
    assert reserve(kv, r0=1) == [True] and len(kv._blocks[0]) == 1 + 161 // (8 * 5)
    assert reserve(kv, r0=5 * BLOCK) == [True] and len(kv._blocks[0]) == 5
    assert reserve(kv, r1=80 * BLOCK) == [True] and len(kv._blocks[1]) == 80  # half of the pool
    assert reserve(kv, r0=5 * BLOCK + 1) == [True] and len(kv._blocks[0]) == 6
    assert reserve(short, r0=1) == [True] and len(short._blocks[0]) == 2


def make_drafter(max_model_len: int = LONGEST, num_positions: int = LONGEST, kv=None) -> Drafter:
    made = object.__new__(Drafter)
    made.kv = kv or DraftKV(80, BLOCK, ROWS, LONGEST + K + 1, CPU)
    made.model = SimpleNamespace(max_model_len=max_model_len, num_positions=num_positions)
    made._max_model_len, made._num_speculative_tokens, made._max_run = LONGEST, K, 0
    made._capacity_limit = np.full(ROWS, UNBOUNDED, dtype=np.int64)
    return made


@example(60, 90, [(0, 0), (0, 0), (1, 0), (2, 0)])
@settings(max_examples=60, deadline=None)
@given(
    st.integers(20, 90), st.integers(20, 90), st.lists(st.tuples(st.integers(0, 12), st.integers(-9, 30)), max_size=4)
)
def test_a_step_is_looked_at_whenever_it_needs_something(max_model_len, num_positions, prompts):
    """Texts grow by every length: whoever `has_room` is held by the context and owns the blocks, at few looks."""
    drafter, rows = make_drafter(max_model_len, num_positions), np.arange(len(prompts))
    for row, (num_dropped, pos_delta) in enumerate(prompts):
        drafter.kv.add(row, num_dropped, pos_delta)
        drafter._capacity_limit[row] = -1
    steps_with_room = 0
    for bound in range(13, LONGEST + 1):
        bounds = np.full(len(rows), bound)
        needed = bounds - drafter.kv.num_dropped_np[rows] + K
        if drafter.has_room(np.arange(ROWS), np.full(ROWS, bound)):
            steps_with_room += 1
            assert drafter.holds(rows, bounds).all() and (drafter.kv.capacity_np[rows] >= needed).all()
        drafter.reserve(rows, bounds)
    if prompts and max_model_len >= LONGEST and num_positions >= LONGEST + 30:
        # Blocks are taken ahead while half of the pool is free, which two rows leave so.
        assert steps_with_room >= (LONGEST - 13) // (2 if len(prompts) <= 2 else 3)
    drafter._capacity_limit[rows] = UNBOUNDED
    assert drafter.has_room(np.arange(ROWS), np.full(ROWS, LONGEST))


@given(
    st.integers(12, LONGEST), st.integers(15, 80), st.integers(0, 5), st.integers(-5, 40), st.sampled_from([16, 1000]),
    st.integers(6, LONGEST + 2),
)  # fmt: skip
def test_a_request_is_held_while_all_that_may_be_committed_has_a_place(
    draft_len, num_positions, dropped, delta, num_slots, num_tokens
):
    """Compared with the place of the last token that may count; what passes the target's context does not. Catches: a
    request that waits for blocks that there are not, a row of the rope table that does not exist, a stop before it is
    due, a request near the end of the target's context that is given up although its draft has the same."""
    kv = SimpleNamespace(
        num_dropped_np=np.array([99, dropped]), pos_delta_np=np.array([99, delta]), num_slots=num_slots
    )
    drafter, last = make_drafter(draft_len, num_positions, kv), min(num_tokens + K, LONGEST) - 1
    expected = last - dropped < draft_len and last + delta < num_positions
    expected &= num_tokens + K - dropped <= num_slots  # what `reserve` would ask for
    assert drafter.holds(np.array([1]), np.array([num_tokens])).tolist() == [expected]


def test_a_run_has_room_as_long_as_it_goes_on(monkeypatch):
    """A row may own more blocks than its text reaches, since a stream was cut: a run goes on into them and ends."""
    drafter, rows, brought, ran = make_drafter(num_positions=90), np.arange(1), [], []
    drafter._max_run = 7
    drafter.kv.add(0, 0, 0)
    drafter.reserve(rows, np.array([30]))
    monkeypatch.setattr(drafter_module, "begin_step", lambda *_, max_drafts, **__: brought.append(max_drafts))
    drafter._sample, drafter._tables = SimpleNamespace(temperature=None, seeds=None), None
    drafter.buffers = SimpleNamespace(step=None)
    drafter._begin(DraftMessage(torch.zeros(1), None, rows, torch.zeros(1), None, 1), 1)
    assert brought == [K + 7]
    drafter.chains = SimpleNamespace(go_on=lambda *args: ran.append(args))
    drafter.counters, drafter._graphs = Counts(), SimpleNamespace(is_wanted=False)
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
