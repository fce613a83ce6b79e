"""Requests come, run, go, come back and fail, in any order: what every table of the draft's side must agree on.

The machine drives the real rows, loop, memory, line of prefills, caches and hooks (`life.py`). Mutations at the
end are seen by it: each is a bug that a table could have.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.fuzz.running import drawing
from tests.properties import life
from tests.properties.life import NUM_BLOCKS, NUM_ROWS, VIDEO_TOKENS, World
from tests.unit.engine.fakes import staged
from tests.unit.engine.listening import make_guidance, make_states
from vllm_vidspec.engine.draft.drafter import UNBOUNDED
from vllm_vidspec.engine.draft.kv import NULL_BLOCK, DraftKV
from vllm_vidspec.engine.draft.local_backend import LocalBackend
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.vision_cache import VisionCache
from vllm_vidspec.engine.hooks import visual_states
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import Guidance
from vllm_vidspec.engine.hooks.state_store import StateStore
from vllm_vidspec.engine.hooks.visual_states import VisualStates
from vllm_vidspec.engine.requests import Phase, RequestRows

ROWS = st.integers(0, NUM_ROWS - 1)
KINDS = {"attention": AttentionGuidance, "hidden states": HiddenStateGuidance, "nothing": None}


class Life(RuleBasedStateMachine):
    """Every rule is something that an engine does; every invariant is checked after each of them."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)), first=st.lists(st.tuples(st.integers(2, 40), st.booleans()), max_size=4)
    )
    def begin(self, kind: str, first: list[tuple[int, bool]]) -> None:
        self.patch = pytest.MonkeyPatch()
        staged(self.patch)

        def hooks(knobs: Any, counters: Any) -> tuple[list, Any]:
            states = make_states(self.patch)
            self.patch.setattr(visual_states, "visual_indices", lambda feature: np.arange(1, 1 + VIDEO_TOKENS))
            if KINDS[kind] is None:
                return [states], None
            guidance = make_guidance(KINDS[kind], self.patch)
            guidance.reserve(1 << 14)
            return [guidance, states], guidance

        table = [[1, 3, "chain", life.K], [4, 4, "none", 0]]
        self.world = World(hooks, draft_shape="auto", draft_table=table, prune_ratio=0.5)
        self.states: VisualStates = self.world.hooks._guarded[-1][0]  # type: ignore[assignment]
        self.capacity: dict[int, tuple[int, int]] = {}
        for row, (text, has_video) in enumerate(first):
            self.add(row, text, has_video)
        self.step(None, [life.K], 5)

    def teardown(self) -> None:
        if not hasattr(self, "patch"):
            return
        try:
            for name in ("skipped_draft_error", "skipped_pool_full", "skipped_too_long", "undrafted_steps", "prompts"):
                event(f"{name}: {'some' if self.world.counters.get(name) else 'none'}")
            for row in list(self.world.known):
                self.world.end(row)
            self.agree()
            assert self.world.drafter.kv.num_used_blocks == 0
        finally:  # a planted fault fails here, and must not stay in the way of other tests
            self.patch.undo()

    @rule(place=ROWS, text=st.integers(2, 50), has_video=st.booleans())
    def add(self, place: int, text: int, has_video: bool) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.world.known]
        if free:
            length = text + (VIDEO_TOKENS + 1 if has_video else 0)
            self.world.add(free[place % len(free)], length, has_video)

    @rule(
        chosen=st.one_of(st.none(), st.lists(ROWS, min_size=1, max_size=NUM_ROWS, unique=True)),
        accepted=st.lists(st.integers(0, life.K), min_size=1, max_size=4),
        times=st.sampled_from([1, 2, 5, 12]),
    )
    def step(self, chosen: list[int] | None, accepted: list[int], times: int) -> None:
        for _ in range(times):
            for row, known in list(self.world.known.items()):
                if len(known.text) + life.K + 2 > life.MAX_LEN:
                    self.world.end(row)  # finished
            self.world.step(sorted(self.world.known) if chosen is None else chosen, accepted)
            self.agree()

    @rule(place=ROWS, into=st.one_of(st.none(), ROWS))
    def end(self, place: int, into: int | None) -> None:
        """Abort a request, or preempt it: it gets a row again at once."""
        rows = sorted(self.world.known)
        if not rows:
            return
        row = rows[place % len(rows)]
        if into is None:
            self.world.end(row)
            return
        free = [row, *(other for other in range(NUM_ROWS) if other not in self.world.known)]
        self.world.preempt(row, free[into % len(free)])

    @rule(what=st.sampled_from(["forward", "encode", "draft", "draft", "sleep", "new weights"]), then=st.booleans())
    def trouble(self, what: str, then: bool) -> None:
        world = self.world
        if what == "sleep":
            world.speculator.backend.give_up_all()
            world.hooks.forget_kv()
            for known in world.known.values():
                known.was_drafted &= bool(world.requests.has_draft_np[known.row])
        elif what == "new weights":
            world.speculator.backend.forget_media()
        else:
            world.network.fails = what
        if then:
            self.step(None, [life.K, 0], 3)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "world"):
            self.check_pool()
            self.check_rows()
            self.check_stores()

    def check_pool(self) -> None:
        kv = self.world.drafter.kv
        taken = [block for blocks in kv._blocks for block in blocks]
        assert sorted([*taken, *kv._free]) == list(range(NULL_BLOCK + 1, NUM_BLOCKS)), "a block is lost, or owned twice"
        assert kv.num_used_blocks == len(taken)
        for row, blocks in enumerate(kv._blocks):
            assert kv.capacity_np[row] == life.BLOCK * len(blocks)
            assert kv.block_tables[row, : len(blocks)].tolist() == blocks, "the device reads another's blocks"

    def check_rows(self) -> None:
        world, requests, prefills = self.world, self.world.requests, self.world.drafter.prefills
        assert requests.has_draft.tolist() == requests.has_draft_np.tolist()
        assert requests.is_drafting == requests.any_in(Phase.DRAFTING)
        for row in range(NUM_ROWS):
            phase, reason = Phase(int(requests.phase[row])), requests.skip_reason[row]
            found = {
                "unstarted": row in requests.unstarted,
                "in line": row in prefills._queue,
                "read": row in prefills._jobs and row not in prefills._queue,
                "blocks": bool(world.drafter.kv._blocks[row]),
                "expected": bool(world.drafter._capacity_limit[row] != UNBOUNDED),
            }
            told = {name for name, is_there in found.items() if is_there}
            if row not in world.known:
                assert not told and phase == Phase.UNSEEN and reason is None, f"a forgotten row is {told}, {phase}"
                assert not requests.has_draft_np[row] and not world.drafter.kv.fed[row]
                self.capacity.pop(row, None)
                continue
            expected = {
                Phase.UNSEEN: {"unstarted"},
                Phase.PREFILLING: {"in line", "blocks", "expected"},
                Phase.DRAFTING: {"read", "blocks", "expected"},
                Phase.WAITING_FOR_BLOCKS: {"unstarted"},
                Phase.PREFILL_STALLED: {"in line", "blocks", "expected"},
                Phase.SKIPPED: set(),
            }[phase]
            assert told == expected, f"{phase}: {told}"
            assert (reason is not None) == (phase == Phase.SKIPPED)
            assert not requests.has_draft_np[row] or phase == Phase.DRAFTING
            self.check_growth(row, phase)

    def check_growth(self, row: int, phase: Phase) -> None:
        """A request's room only grows while it is drafted for."""
        number, now = self.world.known[row].number, int(self.world.drafter.kv.capacity_np[row])
        before, was = self.capacity.get(row, (number, 0))
        assert before != number or now >= was or phase in (Phase.SKIPPED, Phase.UNSEEN)
        self.capacity[row] = (number, now)

    def check_stores(self) -> None:
        cache, store, known = self.world.drafter.prefills.vision.cache, self.states.store, set(self.world.known)
        pages = [int(page) for item in cache._items.values() for page in item.pages]
        assert sorted([*pages, *cache._free]) == list(range(3)), "a page is lost, or owned twice"
        jobs = self.world.drafter.prefills._queue.values()
        wanted = {job.plan.items[i].name for job in jobs for i in job.unseen()}
        assert cache.unfinished() <= wanted, "embeddings of a part that nobody waits for"
        assert set(self.states._holders) <= known, "states of a forgotten row"
        items = {id(item): item for holder in self.states._holders.values() for item in holder.items}
        items |= {id(item): item for item in store._items.values()}
        blocks = [block for item in items.values() for block in item.blocks]
        assert sorted([*blocks, *store._free]) == list(range(store._size)), "a block of states is lost, or owned twice"
        users = sum(len(holder.items) for holder in self.states._holders.values())
        assert sum(item.users for item in items.values()) == users
        assert set(np.flatnonzero(store.num_blocks_np).tolist()) <= known
        if self.world.guidance is not None:
            prompts = self.world.guidance._prompts
            assert set(prompts) <= known, "a prompt of a forgotten row is heard"
            held = [prompt.states for prompt in prompts.values() if getattr(prompt, "states", None) is not None]
            assert getattr(self.world.guidance, "_num_bytes", 0) == sum(states.nbytes for states in held)


TestLife = Life.TestCase
TestLife.settings = drawing(60, stateful_step_count=30)


def _without(owner: type, name: str) -> Callable:
    """Return a method that does nothing at every second of an object's calls."""
    original = getattr(owner, name)

    def mutated(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return None if self.num_calls % 2 == 0 else original(self, *args, **kwargs)

    return mutated


def _taken_twice(self: DraftKV, req_state_idx: int, num_slots: int) -> bool:
    """Hand the first block of a growth out, and leave it in the pool."""
    before = len(self._blocks[req_state_idx])
    fits = _extend(self, req_state_idx, num_slots)
    self._free += self._blocks[req_state_idx][before : before + 1]
    return fits


def _keeps_phase(self: RequestRows, req_state_idx: int) -> None:
    """Let the row's next request find its predecessor's phase."""
    phase = int(self.phase[req_state_idx])
    _forget(self, req_state_idx)
    self.enter(req_state_idx, Phase(phase))


def _leaks_on_failure(self: RequestRows, req_state_idx: int, reason: str) -> None:
    """Skip a request whose draft has failed, and keep its blocks."""
    if reason != "draft_error":
        _skip(self, req_state_idx, reason)
    else:
        tables, self._drafting_tables = self._drafting_tables, []
        tables[0]._drafter.prefills.remove(req_state_idx)
        _skip(self, req_state_idx, reason)
        self._drafting_tables = tables


def _keeps_reason(self: RequestRows, req_state_idx: int) -> None:
    reason = self.skip_reason[req_state_idx]
    _forget(self, req_state_idx)
    self.skip_reason[req_state_idx] = reason


def _read_too_far(self: DraftPrefill, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """Let who rested go on without the text that was committed meanwhile."""
    _rest(self, rows, num_tokens + life.MAX_LEN)


_extend, _forget, _skip, _rest = DraftKV._extend, RequestRows.remove, RequestRows.skip, DraftPrefill.requeue

MUTATIONS = {
    "a lost abort: the line": (DraftPrefill, "remove", _without(DraftPrefill, "remove")),
    "a lost abort: the memory": (DraftKV, "remove", _without(DraftKV, "remove")),
    "a lost abort: the loop": (LocalBackend, "remove", _without(LocalBackend, "remove")),
    "a lost abort: the states": (VisualStates, "remove", _without(VisualStates, "remove")),
    "a lost abort: the guidance": (Guidance, "remove", lambda self, row: None),
    "a block handed out twice": (DraftKV, "_extend", _taken_twice),
    "a row with its predecessor's phase": (RequestRows, "remove", _keeps_phase),
    "a row with its predecessor's reason": (RequestRows, "remove", _keeps_reason),
    "a row with its predecessor's drafts": (RequestRows, "_forget_draft", lambda self, row: None),
    "blocks leaked on failure": (RequestRows, "skip", _leaks_on_failure),
    "a table that the device is not told": (DraftKV, "apply", _without(DraftKV, "apply")),
    "text that was never read": (DraftPrefill, "requeue", _read_too_far),
    "a video that nobody waits for, encoded in part": (DraftPrefill, "_drop_unfinished", lambda self: None),
    "a page of the cache that is lost": (VisionCache, "drop", lambda self, name: self._items.pop(name, None)),
    "states that a user keeps": (StateStore, "drop", _without(StateStore, "drop")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_seen(name: str) -> None:
    owner, attribute, mutated = MUTATIONS[name]
    quick = {"phases": [hypothesis.Phase.generate], "report_multiple_bugs": False, "print_blob": False}
    with mock.patch.object(owner, attribute, mutated), pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(Life, settings=drawing(120, stateful_step_count=30, **quick))
