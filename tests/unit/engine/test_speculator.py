"""What the speculator's loop tells the drafter, and who is given up; rows, batches and knobs; see tests/properties."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import ALONE, CPU, NUM_ROWS, make_knobs, new_request
from tests.unit.engine.fakes import NUM_TOKENS as PROMPT_LEN
from vllm_vidspec.config import Plan, VidSpecConfig
from vllm_vidspec.engine.backend import Step
from vllm_vidspec.engine.draft.backend import LocalBackend
from vllm_vidspec.engine.draft.messages import Admission, Drafts, Prefilled
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.requests import Phase, RequestRows
from vllm_vidspec.engine.speculator import Speculator
from vllm_vidspec.errors import VidSpecError

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

    def propose(self, rows: list[int], num_drafts: list[int] | None = None) -> list[list]:
        """Run the loop after a step of these rows; `num_drafts` were verified, real ones or placeholders."""
        idx_mapping_np, drafts = np.array(rows), None if num_drafts is None else np.array(num_drafts)
        batch = SimpleNamespace(
            num_reqs=len(rows),
            req_ids=[f"request-{row}" for row in rows],
            idx_mapping=torch.from_numpy(idx_mapping_np),
            idx_mapping_np=idx_mapping_np,
            num_draft_tokens_per_req=drafts,
            num_computed_tokens_np=np.full(len(rows), PROMPT_LEN - 1),
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


def test_placeholders_are_no_drafts():
    """K placeholders verified on a row whose last request was drafted for: the flag does not outlive its request."""
    world = World()
    world.propose([2, 0, 1])
    world.propose([2, 0, 1], [K, 0, K])
    assert world.was_verified() == [True, False, True]
    world.propose([2, 0, 1])
    assert world.was_verified() == [False, False, False]
    world.requests.remove(2)
    world.requests.add(new_request(2, ""))
    world.propose([2, 0, 1], [K, K, K])
    assert world.was_verified() == [False, True, True]


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


def test_of_those_who_all_wait_the_largest_gives_up():
    """Catches: requests that wait for each other for good."""
    world = World()
    world.propose([0, 1, 3])
    world.drafter.reserve = lambda rows, bound: np.zeros(len(rows), dtype=bool)
    world.propose([0, 1, 3])
    assert world.requests.phase.tolist() == [Phase.PREFILL_STALLED, Phase.SKIPPED, Phase.UNSEEN, Phase.PREFILL_STALLED]
    assert world.requests.skip_reason[1] == "pool_full"
    assert [call.args[:2] for call in world.counters.skip.call_args_list] == [("pool_full", "request-1")]


def test_who_finds_no_room_for_its_prompt_tries_again():
    """Catches: a prompt that is planned in vain at every step, or lost; one that is tried for ever."""
    world = World()
    world.drafter.add.side_effect = lambda message, bound: Admission.FULL if message.req_state_idx else 1
    assert world.propose([0, 1, 3]) == [[1] * K, [0] * K, [0] * K]
    assert world.requests.phase.tolist() == [Phase.DRAFTING, waiting := Phase.WAITING_FOR_BLOCKS, Phase.UNSEEN, waiting]
    assert [call.args[0] for call in world.counters.skip.call_args_list] == ["pool_full"] * 2
    world.propose([0, 1, 3])
    assert world.drafter.add.call_count == 3, "no block has come free"
    world.drafter.kv.num_free_blocks = 4
    world.requests.remove(3)
    world.drafter.add.side_effect = None
    assert world.propose([0, 1]) == [[1] * K] * 2
    message, bound = world.drafter.add.call_args.args
    assert message.req_id == "request-1" and bound == PROMPT_LEN + 2
    assert world.counters.skip.call_count == 2
    patient = World()
    patient.drafter.add.return_value = Admission.FULL
    for blocks in range(40):
        patient.drafter.kv.num_free_blocks = blocks
        patient.propose([1])
    assert patient.requests.phase[1] == Phase.SKIPPED and 10 < patient.drafter.add.call_count < 20


def test_an_error_of_the_draft_stops_an_engine_that_is_to_raise():
    world = World(on_draft_error="raise")
    world.drafter.draft.side_effect = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        world.propose([1])


def test_running_requests_and_what_they_have_shown_are_given_up():
    """Before sleep. Catches: rows that have not begun and are given up too; embeddings that outlive their memory."""
    world = World()
    world.requests.enter(slice(None), [Phase.DRAFTING, Phase.UNSEEN, Phase.SKIPPED, Phase.PREFILLING])
    world.backend.give_up_all()
    assert world.requests.phase.tolist() == [Phase.SKIPPED, Phase.UNSEEN, Phase.SKIPPED, Phase.SKIPPED]
    assert [name for name, *_ in world.drafter.mock_calls] == ["remove", "remove", "forget_media"]


def test_rows_are_trees_before_a_draft_that_may_fail():
    """Catches: half a tree that a failed draft has left, verified as the shape of the row's next chain."""
    world = World(drafting="tree-static", num_speculative_tokens=25)
    world.backend._trees = trees = mock.Mock()
    world.requests.register(drafting=[trees])
    world.drafter.draft.side_effect = ValueError("no")
    world.propose([1])
    assert [name for name, *_ in trees.mock_calls] == ["expect", "remove"]


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


def test_a_step_without_news_uploads_nothing(monkeypatch):
    requests, uploads = RequestRows(2, CPU), []
    monkeypatch.setattr(
        "vllm_vidspec.engine.requests.async_tensor_h2d",
        lambda values, device: uploads.append(1) or torch.tensor(values),
    )
    rows = np.array([1, 0])
    requests.enter(1, Phase.DRAFTING)
    for newcomers in ([], [], [0]):
        requests.enter(newcomers, Phase.DRAFTING)
        requests.publish(torch.from_numpy(rows), REQ_IDS, requests.draft_batch(rows, np.ones(2, dtype=bool)), None)
    assert len(uploads) == 2 and requests.has_draft.tolist() == [True, True]


ALL_DONE = np.array([True, True])
REQ_IDS = ["a", "b", "c", "d"]
ROWS = np.array([2, 0])


def drafting() -> RequestRows:
    """Return rows of which three are drafted for."""
    requests = RequestRows(5, CPU)
    requests.enter([0, 1, 2], Phase.DRAFTING)
    return requests


CHANGES = {
    "a request comes": lambda requests: requests.add(new_request(4)),
    "a request goes": lambda requests: requests.remove(1),
    "a request is skipped": lambda requests: requests.skip(1, "pool_full"),
    "a request is drafted for": lambda requests: requests.enter(3, Phase.DRAFTING),
    "the batch has another order": lambda requests: requests.draft_batch(ROWS[::-1], ALL_DONE),
    "the batch has more requests": lambda requests: requests.draft_batch(np.array([2, 0, 1]), np.ones(3, dtype=bool)),
    "a prefill goes on": lambda requests: requests.draft_batch(ROWS, np.array([True, False])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cohort_lasts_until_something_changes(change):
    """Catches: what is kept of a batch's rows, and used for others, or for the row's next request."""
    requests = drafting()
    before = requests.draft_batch(ROWS, ALL_DONE)
    assert requests.draft_batch(ROWS.copy(), ALL_DONE) is before
    CHANGES[change](requests)
    after = requests.draft_batch(ROWS, ALL_DONE)
    assert after is not before and requests.draft_batch(ROWS, ALL_DONE) is after
    assert after.is_whole and after.drafted_np.tolist() == [2, 0] and after.is_drafted.tolist() == [True, True]


def test_a_cohort_is_of_those_that_are_drafted_for():
    requests = drafting()
    requests.enter(2, Phase.PREFILLING)
    found = requests.draft_batch(np.array([1, 2, 0]), np.array([True, True, False]))
    assert found.places_np.tolist() == [0] and found.drafted_np.tolist() == [1] and not found.is_whole
    assert requests.draft_batch(np.array([1, 2, 0]), np.ones(3, dtype=bool)).drafted_np.tolist() == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        requests.phase[2] = Phase.DRAFTING


def test_knobs_change_for_everybody_or_for_nobody():
    """Catches: a part that keeps the old value, and half a change where a part refuses the new one."""
    held, observed = make_knobs(prune_ratio=0.5), []

    def hear(config: VidSpecConfig) -> None:
        observed.append(config.prune.ratio_for("video"))
        if config.prune.ratio_for("video") > 0.9:
            raise VidSpecError("too much")

    held.on_change(hear)
    held.retune({"prune_ratio": 0.7, "frames_as_video": "never"})
    assert held.current.prune.min_run is None and held.pruning["frames_as_video"] == "never"
    held.retune({"prune": {"frames_as_video": "always"}})
    assert held.current.prune.min_run == 2
    assert held.current.prune.ratio_for("video") == 0.7
    with pytest.raises(VidSpecError, match="too much"):
        held.retune({"prune_ratio": 0.95})
    assert held.current.prune.ratio_for("video") == 0.7 and observed == [0.7, 0.7, 0.95, 0.7]


@pytest.mark.parametrize(
    ("start", "change", "line"),
    [
        ({}, {"num_speculative_tokens": 3}, "num_speculative_tokens cannot change while the engine runs"),
        ({}, {"lambda_loose": 0.1}, "lambda_loose cannot change"),  # nothing is loose here
        ({"scorer": "fly"}, {"scorer": "loose"}, "keeps no hidden states"),
        ({}, {"prune_ratio": 2.0}, "prune_ratio"),
    ],
)
def test_what_cannot_change(start, change, line):
    with pytest.raises(VidSpecError, match=line):
        make_knobs(**start).retune(change)


def test_whether_any_row_drafts_follows_every_change():
    """Catches: an answer that is kept past what changes a row, so that a step rests, or does not, by an older one."""
    rows = RequestRows(4, CPU)
    for change, expected in (
        (lambda: rows.enter(1, Phase.DRAFTING), True),
        (lambda: rows.remove(1), False),
        (lambda: rows.start(0, Phase.DRAFTING), True),
        (lambda: rows.skip(0, "error"), False),
        (lambda: rows.enter(np.array([2, 3]), Phase.DRAFTING), True),
        (lambda: rows.defer(2, None), True),
        (lambda: rows.enter(3, Phase.PREFILL_STALLED), False),
    ):
        change()
        assert rows.is_drafting == rows.any_in(Phase.DRAFTING) == expected
