"""The speculator's loop by itself: what it tells the drafter of a step, and what it forgets with a request."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import ALONE, CPU, NUM_ROWS, Calls, make_knobs, new_request
from tests.unit.engine.fakes import NUM_TOKENS as PROMPT_LEN
from vllm_vidspec.config import Plan
from vllm_vidspec.engine.backend import Step
from vllm_vidspec.engine.draft.backend import LocalBackend
from vllm_vidspec.engine.draft.messages import Admission, Drafts, Prefilled
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.requests import Phase, RequestRows
from vllm_vidspec.engine.speculator import Speculator

K = 3


def recording_drafter() -> mock.Mock:
    """Return a drafter that has room for everything and answers with chains of ones."""
    drafter = mock.Mock(**{"add.return_value": Admission.ADMITTED})
    drafter.kv = SimpleNamespace(num_free_blocks=0, capacity_np=np.array([8, 16, 8, 8]))
    drafter.has_room = lambda rows, bound: False
    drafter.holds = drafter.reserve = lambda rows, bound: np.ones(len(rows), dtype=bool)
    drafter.prefill = lambda step: Prefilled(ready=step.idx_mapping_np.tolist(), failed=[])
    drafter.draft.side_effect = lambda message: Drafts(
        torch.from_numpy(message.idx_mapping_np), torch.ones(len(message.idx_mapping_np), K, dtype=torch.int64)
    )
    return drafter


class World:
    """A speculator without models and the rows of four requests, all of which have just arrived."""

    def __init__(self, **config) -> None:
        self.requests = RequestRows(NUM_ROWS, CPU)
        self.drafter, self.counters = recording_drafter(), mock.Mock()
        req_states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=torch.full((NUM_ROWS,), PROMPT_LEN + 1, dtype=torch.int32)),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(NUM_ROWS, 16, dtype=torch.int32)),
            max_seq_len=np.full(NUM_ROWS, 16),
        )
        knobs, model = make_knobs(**config), SimpleNamespace(device=CPU)
        failures = DraftFailures(knobs, ALONE, self.requests, self.counters)
        self.backend = LocalBackend(
            None, knobs, model, self.requests, req_states, None, None, self.counters, ALONE, failures
        )  # fmt: skip
        self.backend._drafter = self.drafter
        self.speculator = Speculator(knobs, self.requests, None, self.counters, failures, self.backend)
        failures.on_failure(self.backend.forget_media)
        self.requests.register(self.backend, drafting=[self.backend])
        for row in range(NUM_ROWS):
            self.requests.add(new_request(row, ""))

    def propose(self, rows: list[int], num_drafts: list[int] | None = None, computed: int = PROMPT_LEN) -> list[list]:
        """Run the loop after a step of these rows; `num_drafts` were verified, real ones or placeholders."""
        idx_mapping_np, drafts = np.array(rows), None if num_drafts is None else np.array(num_drafts)
        batch = SimpleNamespace(
            num_reqs=len(rows),
            req_ids=[f"request-{row}" for row in rows],
            idx_mapping=torch.from_numpy(idx_mapping_np),
            idx_mapping_np=idx_mapping_np,
            num_draft_tokens_per_req=drafts,
            num_computed_tokens_np=np.full(len(rows), computed - 1),
            num_scheduled_tokens=1 + (0 if drafts is None else drafts),
            prefill_len_np=np.full(len(rows), PROMPT_LEN),
            seq_lens_cpu_upper_bound=torch.full((len(rows),), PROMPT_LEN + 1),
        )
        ones = torch.ones(len(rows), dtype=torch.int32)
        last_sampled = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)
        return self.speculator.propose(
            batch, None, None, None, None, ones, None, last_sampled, None, None, None
        ).tolist()  # fmt: skip

    def was_verified(self) -> list[bool]:
        (message,) = self.drafter.draft.call_args.args
        told = message.was_verified
        return [True] * len(message.idx_mapping_np) if told is None else told.tolist()

    def forgotten(self) -> list[int]:
        return [call.args[0] for call in self.drafter.remove.call_args_list]


def test_a_request_is_drafted_for_from_the_step_that_ends_its_prefill():
    """Catches: drafts for a prompt that the target has not read, a row that is not told what is in flight."""
    world = World()
    assert world.propose([2, 0], computed=PROMPT_LEN - 1) == [[0] * K] * 2
    assert (world.requests.phase == Phase.UNSEEN).all() and not world.requests.has_draft.any()
    assert world.propose([2, 0]) == [[1] * K] * 2
    assert world.requests.phase.tolist() == [Phase.DRAFTING, Phase.UNSEEN, Phase.DRAFTING, Phase.UNSEEN]
    assert world.requests.has_draft.tolist() == world.requests.has_draft_np.tolist() == [True, False, True, False]
    assert world.requests.num_drafts(K).tolist() == [K, 0, K, 0]


def test_placeholders_are_no_drafts():
    """A request that begins on a row whose last one was drafted for, with K placeholders verified in its first step.

    Catches: a flag that outlives its request, so that placeholders count as drafts that failed, and the policy learns a
    false acceptance of 0.
    """
    world = World()
    world.propose([2, 0, 1])
    world.propose([2, 0, 1], [K, 0, K])
    assert world.was_verified() == [True, False, True]
    world.propose([2, 0, 1])
    assert world.was_verified() == [False, False, False]
    world.requests.remove(2)
    assert world.requests.has_draft.tolist() == [True, True, False, False] and world.forgotten() == [2]
    world.requests.add(new_request(2, ""))
    world.propose([2, 0, 1], [K, K, K])
    assert world.was_verified() == [False, True, True]


def test_a_batch_too_large_for_drafts_rests():
    """Three requests draft nothing, two draft: the draft is not called at all in between, and told where to go on.

    Catches: a draft forward in a step whose drafts nobody wants; a request that drafts on text which it has not read; a
    draft's length that is known for sure only where the scheduler does not run ahead.
    """
    table = [[1, 1, "tree-static", K], [2, 2, "chain", 1], [3, 4, "none", 0]]
    world = World(draft="auto", draft_table=table, tree_paths=[[0], [1], [2]])
    world.propose([2, 0])
    world.propose([2])
    shapes = [(message.shape, message.max_drafts) for (message,), _ in world.drafter.draft.call_args_list]
    assert shapes == [("chain", 1), ("tree-static", K)]
    world.drafter.prefill = world.drafter.draft = mock.Mock(side_effect=AssertionError("nothing is to be run"))
    for _ in range(2):
        assert not np.any(world.propose([2, 0, 1], [1, 1, 0]))
    assert world.requests.phase.tolist() == [Phase.PREFILLING] * 3 + [Phase.UNSEEN]
    assert not world.requests.has_draft.any() and not world.requests.num_drafts(K).any()
    rests = [[argument.tolist() for argument in call.args] for call in world.drafter.requeue.call_args_list]
    assert rests == [[[2, 0], [PROMPT_LEN - 1 - K] * 2]]
    world.drafter.prefill, world.drafter.draft = recording_drafter().prefill, recording_drafter().draft
    assert world.propose([2, 0], [0, 0]) == [[1] * K] * 2 and world.was_verified() == [False, False]
    assert world.requests.phase.tolist() == [Phase.DRAFTING, Phase.PREFILLING, Phase.DRAFTING, Phase.UNSEEN]


@pytest.mark.parametrize(
    ("change", "reason", "is_counted"),
    [
        ({"has_embeds": True}, "unsupported", True),
        ({"token_ids": list(range(15))}, "finished", False),  # the token just sampled is its last
    ],
)
def test_what_is_not_drafted_for(change, reason, is_counted):
    world = World()
    world.requests.remove(1)
    world.requests.add(dataclasses.replace(new_request(1, ""), **change))
    assert world.propose([1, 3]) == [[0] * K, [1] * K]
    assert world.requests.phase[1] == Phase.SKIPPED and world.requests.skip_reason[1] == reason
    assert [call.args[:2] for call in world.counters.skip.call_args_list] == [(reason, "request-1")] * is_counted


@pytest.mark.parametrize("what", ["refused", "draft_error"])
def test_a_request_that_is_given_up_goes_on_without_drafts(what):
    """Catches: blocks of a request that is given up and stays, a flag of drafts that are no more."""
    world = World()
    world.drafter.add.return_value = Admission.REFUSED if what == "refused" else Admission.ADMITTED
    world.propose([1, 3])
    if what == "draft_error":
        world.drafter.draft.side_effect = ValueError("no")
    world.propose([1, 3])
    assert world.requests.phase.tolist() == [Phase.UNSEEN, Phase.SKIPPED, Phase.UNSEEN, Phase.SKIPPED]
    assert world.requests.skip_reason == [None, what, None, what] and not world.requests.has_draft.any()
    assert world.forgotten() == [1, 3]
    assert world.propose([1, 3]) == [[0] * K] * 2
    if what == "draft_error":  # or it stops the engine
        strict = World(on_draft_error="raise")
        strict.drafter.draft.side_effect = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            strict.propose([1])


def counted(world: World, name: str) -> int:
    return sum((call.args[1:] or (1,))[0] for call in world.counters.add.call_args_list if call.args[0] == name)


def test_who_outgrows_the_pool_waits_with_its_blocks():
    """Room for one of three: two wait, holding what they have, and go on where they were when there is room.

    Catches: a decision that is final; blocks given back by who only waits; a request that drafts on text that its draft
    has not read.
    """
    world = World()
    world.propose([0, 1, 3])
    world.drafter.reserve = lambda rows, bound: rows == 1
    drafts = world.propose([0, 1, 3])
    assert world.requests.phase.tolist() == [Phase.PREFILL_STALLED, Phase.DRAFTING, Phase.UNSEEN, Phase.PREFILL_STALLED]
    assert drafts == [[0] * K, [1] * K, [0] * K]
    assert world.requests.has_draft.tolist() == [False, True, False, False]
    assert [call.args[0].tolist() for call in world.drafter.requeue.call_args_list] == [[0], [3]]
    world.propose([0, 1, 3])
    assert counted(world, "waiting_drafts") == 2 and world.forgotten() == []
    world.drafter.reserve = lambda rows, bound: rows != 0
    assert world.propose([0, 1, 3]) == [[0] * K, [1] * K, [1] * K]
    assert counted(world, "resumed_drafts") == 1
    world.drafter.reserve = lambda rows, bound: np.ones(len(rows), dtype=bool)
    assert world.propose([0, 1, 3]) == [[1] * K] * 3
    assert world.drafter.requeue.call_count == 2 and world.counters.skip.call_count == 0


def test_of_those_who_all_wait_the_largest_gives_up():
    """Catches: requests that wait for each other for good."""
    world = World()
    world.propose([0, 1, 3])
    world.drafter.reserve = lambda rows, bound: np.zeros(len(rows), dtype=bool)
    world.propose([0, 1, 3])
    assert world.requests.phase.tolist() == [Phase.PREFILL_STALLED, Phase.SKIPPED, Phase.UNSEEN, Phase.PREFILL_STALLED]
    assert world.forgotten() == [1] and world.requests.skip_reason[1] == "pool_full"
    assert [call.args[:2] for call in world.counters.skip.call_args_list] == [("pool_full", "request-1")]


def test_who_finds_no_room_for_its_prompt_tries_again():
    """Its prompt is kept, and tried when blocks have come free, not at every step; aborted, it is forgotten.

    Catches: a prompt that is planned in vain at every step, or lost; one that is shown to the draft after its end.
    """
    world = World()
    world.drafter.add.side_effect = lambda message, bound: Admission.FULL if message.req_state_idx else 1
    assert world.propose([0, 1, 3]) == [[1] * K, [0] * K, [0] * K]
    assert world.requests.phase.tolist() == [
        Phase.DRAFTING,
        Phase.WAITING_FOR_BLOCKS,
        Phase.UNSEEN,
        Phase.WAITING_FOR_BLOCKS,
    ]
    assert [call.args[0] for call in world.counters.skip.call_args_list] == ["pool_full"] * 2
    world.propose([0, 1, 3])
    assert world.drafter.add.call_count == 3, "no block has come free"
    world.drafter.kv.num_free_blocks = 4
    world.requests.remove(3)
    world.drafter.add.side_effect = None
    assert world.propose([0, 1]) == [[1] * K] * 2
    message, bound = world.drafter.add.call_args.args
    assert message.req_id == "request-1" and bound == PROMPT_LEN + 2
    assert counted(world, "resumed_drafts") == 1 and world.counters.skip.call_count == 2


def test_nobody_tries_for_ever():
    world = World()
    world.drafter.add.return_value = Admission.FULL
    for blocks in range(40):
        world.drafter.kv.num_free_blocks = blocks
        world.propose([1])
    assert world.requests.phase[1] == Phase.SKIPPED and 10 < world.drafter.add.call_count < 20


def test_rows_are_trees_before_a_draft_that_may_fail():
    """Catches: half a tree that a failed draft has left, verified as the shape of the row's next chain."""
    world = World(drafting="tree-static", num_speculative_tokens=25)
    world.backend._trees = trees = mock.Mock()
    world.requests.register(drafting=[trees])
    world.drafter.draft.side_effect = ValueError("no")
    world.propose([1])
    assert [name for name, *_ in trees.mock_calls] == ["expect", "remove"]


def test_what_follows_from_a_batch_is_told_by_its_cohort():
    """A request goes and another takes its row, or the batch changes: the drafter must not keep what it knew.

    Catches: a draft_batch of rows whose requests are others; the drafts of the one before told to be the next one's.
    """
    world = World()
    draft_batches = []

    def propose(rows: list[int]) -> None:
        world.drafter.draft.reset_mock()
        world.propose(rows, num_drafts=[K] * len(rows))
        draft_batches.append(world.drafter.draft.call_args.args[0].draft_batch)

    for rows in ([2, 0], [2, 0], [2, 0]):
        propose(rows)
    assert draft_batches[1] is draft_batches[2] and world.was_verified() == [True, True]
    world.requests.remove(0)
    world.requests.add(new_request(0, ""))
    propose([2, 0])
    assert draft_batches[3] is not draft_batches[2] and world.was_verified() == [True, False]
    propose([0, 2])
    assert draft_batches[4] is not draft_batches[3] and world.was_verified() == [True, True]


def test_a_step_that_verifies_drafts_is_done_with_its_prefill():
    """Catches: drafts counted as prompt, so that a request in its last chunk counts as prefilled."""
    batch = SimpleNamespace(
        num_reqs=2,
        num_computed_tokens_np=np.array([7, 5]),
        num_scheduled_tokens=np.array([3, 3]),
        num_draft_tokens_per_req=np.array([2, 2]),
        prefill_len_np=np.array([8, 8]),
        seq_lens_cpu_upper_bound=torch.tensor([10, 8]),
    )
    step = Step.of(batch, None, Plan("chain", K))
    assert step.is_done.tolist() == [True, False] and step.bound.tolist() == [11, 9]


def test_running_requests_are_given_up():
    """Catches: rows that keep blocks, or draft on; rows that have not begun and are given up too."""
    world = World()
    world.requests.enter(slice(None), [Phase.DRAFTING, Phase.UNSEEN, Phase.SKIPPED, Phase.PREFILLING])
    drafter, guidance, trees = observed = [Calls(), Calls(), Calls()]
    world.backend._drafter = drafter
    world.requests.register(drafting=[guidance, trees])
    world.backend.give_up_all()
    assert world.requests.phase.tolist() == [Phase.SKIPPED, Phase.UNSEEN, Phase.SKIPPED, Phase.SKIPPED]
    released = [("remove", 0), ("remove", 3)]
    assert observed == [[("remove", 0), ("remove", 3), ("forget_media",)], released, released]
