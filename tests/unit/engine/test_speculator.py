"""Who the speculator's loop gives up, and when; rows and knobs. What its tables agree on: tests/properties."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.properties import life
from tests.properties.life import MAX_LEN, K, World
from tests.unit.engine.fakes import CPU, make_knobs, staged
from vllm_vidspec.config import Plan, VidSpecConfig
from vllm_vidspec.engine.draft.messages import Admission
from vllm_vidspec.engine.draft_backend import Step
from vllm_vidspec.engine.policy import NONE, Decision
from vllm_vidspec.engine.requests import Phase, RequestRows
from vllm_vidspec.engine.speculator import Speculator
from vllm_vidspec.errors import VidSpecError


@pytest.fixture
def world(monkeypatch):
    """Return what makes a world of rows with prompts of so many tokens; the target and the draft have read them."""
    staged(monkeypatch)

    def make(lengths: dict[int, int], **knobs) -> World:
        made = World(**knobs)
        for row, length in lengths.items():
            made.add(row, length)
        step(made, 3)
        return made

    return make


def step(world: World, times: int = 1) -> None:
    for _ in range(times):
        world.step(sorted(world.known), [0])


@pytest.mark.parametrize(
    ("length", "change", "reason", "is_counted"),
    [
        (8, {"has_embeds": True}, "unsupported", True),
        (MAX_LEN - 1, {}, "finished", False),  # the token just sampled is its last
    ],
)
def test_what_is_not_drafted_for(world, length, change, reason, is_counted):
    it = world({3: 8})
    it.add(1, length, **change)
    step(it, 5)
    assert it.requests.phase[[1, 3]].tolist() == [Phase.SKIPPED, Phase.DRAFTING]
    assert it.requests.skip_reason[1] == reason and it.counters.get("who", []) == ["request-2"] * is_counted


def test_of_those_who_all_wait_the_largest_gives_up(world, monkeypatch):
    """Catches: requests that wait for each other for good."""
    it = world({0: 4, 1: 16, 3: 4})
    monkeypatch.setattr(it.drafter, "has_room", lambda *_: False)
    monkeypatch.setattr(it.drafter, "reserve", lambda rows, bound: np.zeros(len(rows), dtype=bool))
    step(it)
    assert it.requests.phase.tolist() == [Phase.PREFILL_STALLED, Phase.SKIPPED, Phase.UNSEEN, Phase.PREFILL_STALLED]
    assert it.requests.skip_reason[1] == "pool_full" and it.counters["who"] == ["request-2"]


def test_who_finds_no_room_for_its_prompt_tries_again(world):
    """Catches: a prompt that is planned in vain at every step, or lost; one that is tried for ever."""
    it = world({0: 60})
    for row in (1, 3):
        it.add(row, 60)
    with mock.patch.object(it.drafter, "add", wraps=it.drafter.add) as add:
        step(it, 5)
        assert it.requests.phase[[1, 3]].tolist() == [Phase.WAITING_FOR_BLOCKS] * 2
        assert add.call_count == 2 == it.counters["skipped_pool_full"], "no block has come free"
        it.end(0)
        step(it)
        message, bound = add.call_args_list[2].args
        assert message.req_id == "request-2" and bound == len(it.known[1].text)
        assert it.requests.phase[[1, 3]].tolist() == [Phase.PREFILLING, Phase.WAITING_FOR_BLOCKS]
        add.return_value, add.side_effect, add.call_count = Admission.FULL, None, 0
        for blocks in range(20):
            it.backend._room._num_free = -blocks
            step(it)
    assert it.requests.phase[3] == Phase.SKIPPED and 10 < add.call_count < 20


def test_an_error_of_the_draft_stops_an_engine_that_is_to_raise(world):
    it = world({1: 8}, on_draft_error="raise")
    it.network.fails = "draft"
    with pytest.raises(RuntimeError, match="planted in draft"):
        step(it)


def test_running_requests_and_what_they_have_shown_are_given_up(world):
    """Before sleep. Catches: rows that have not begun and are given up too; embeddings that outlive their memory."""
    it = world({0: 8, 1: 60})
    it.add(2, 8)
    assert it.requests.phase.tolist() == [Phase.DRAFTING, Phase.PREFILLING, Phase.UNSEEN, Phase.UNSEEN]
    cache = it.drafter.prefills.vision.cache
    assert cache.extend("video", 4, 0, torch.zeros(4, life.HIDDEN)) and cache.num_used_bytes
    it.backend.give_up_all()
    assert it.requests.phase.tolist() == [Phase.SKIPPED, Phase.SKIPPED, Phase.UNSEEN, Phase.UNSEEN]
    assert not cache.num_used_bytes


def test_rows_are_trees_before_a_draft_that_may_fail(world):
    """Catches: half a tree that a failed draft has left, verified as the shape of the row's next chain."""
    it = world({}, draft_shape="tree-static", tree_paths=[[0], [1], [0, 0]])
    it.backend._trees = trees = mock.Mock()
    it.requests.register(drafting=[trees])
    it.add(1, 8)
    it.network.fails = "draft"
    step(it)
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
        requests.publish(torch.from_numpy(rows), ["a", "b"], requests.draft_batch(rows, np.ones(2, dtype=bool)), None)
    assert len(uploads) == 2 and requests.has_draft.tolist() == [True, True]
    for is_done, drafted in (([True, False], [1]), ([True, True], [1, 0])):  # a prefill goes on, and has ended
        assert requests.draft_batch(rows, np.array(is_done)).drafted_np.tolist() == drafted
    with pytest.raises(ValueError, match="read-only"):
        requests.phase[1] = Phase.SKIPPED


def test_knobs_change_for_everybody_or_for_nobody():
    """Catches: a part that keeps the old value, and half a change where a part refuses the new one."""
    held, observed = make_knobs(prune_ratio=0.5), []

    def hear(config: VidSpecConfig) -> None:
        observed.append(config.ratio_for("video"))
        if config.ratio_for("video") > 0.9:
            raise VidSpecError("too much")

    held.on_change(hear)
    held.retune({"prune_ratio": 0.7, "frames_as_video": "never"})
    assert held.current.min_run is None and held.pruning["frames_as_video"] == "never"
    held.retune({"frames_as_video": "always"})
    assert held.current.min_run == 2
    assert held.current.ratio_for("video") == 0.7
    with pytest.raises(VidSpecError, match="too much"):
        held.retune({"prune_ratio": 0.95})
    assert held.current.ratio_for("video") == 0.7 and observed == [0.7, 0.7, 0.95, 0.7]
    for start, change, line in (
        ({}, {"num_speculative_tokens": 3}, "num_speculative_tokens cannot change while the engine runs"),
        ({}, {"lambda_loose": 0.1}, "lambda_loose cannot change"),  # nothing is loose here
        ({"scorer": "fly"}, {"scorer": "loose"}, "keeps no hidden states"),
    ):
        with pytest.raises(VidSpecError, match=line):
            make_knobs(**start).retune(change)


@pytest.mark.parametrize("busy", ["", "in_flight", "is_drafting", "reads_while_paused", "num_tokens"])
def test_a_paused_step_asks_nothing_of_the_draft(busy):
    """Catches: drafts in flight that are not rolled back, a drafter of its own that is not told, no drafts made."""
    speculator, backend = Speculator.__new__(Speculator), mock.Mock(reads_while_paused=busy == "reads_while_paused")
    speculator.backend, speculator._counters = backend, mock.Mock()
    speculator._requests = SimpleNamespace(
        in_flight={"a"} if busy == "in_flight" else (), is_drafting=busy == "is_drafting"
    )
    speculator._knobs = SimpleNamespace(current=SimpleNamespace(plan_for=mock.Mock(side_effect=LookupError)))
    option = NONE._replace(num_tokens=2) if busy == "num_tokens" else NONE
    speculator.decision = Decision(option)
    batch = SimpleNamespace(num_reqs=3)
    if busy:
        with pytest.raises(LookupError):  # the step goes its usual course
            speculator.propose(batch, *[None] * 10)
        return
    assert speculator.propose(batch, *[None] * 10) is backend.dummy_run.return_value
    assert speculator._counters.add.mock_calls == [mock.call("undrafted_steps")] and speculator.was_paused("a")
