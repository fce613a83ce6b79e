"""RequestRows and Knobs: every table hears of both ends of a request, once; every part reads the same knobs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, make_knobs, new_request
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.requests import NewRequest, Phase, RequestRows
from vllm_vidspec.errors import VidSpecError


def test_every_table_hears_of_both_ends_in_the_same_order():
    """Catches: a table that is cleaned at another time than the others, or not at all."""
    requests, log = RequestRows(3, CPU), []
    for i in range(2):
        admit, forget = lambda found, i=i: log.append((found.req_state_idx, i)), lambda row, i=i: log.append((-row, i))
        requests.register(SimpleNamespace(add=admit, remove=forget))
    requests.add(new_request(2))
    requests.remove(2)
    assert log == [(2, 0), (2, 1), (-2, 0), (-2, 1)]


def test_a_row_that_any_table_holds_is_held():
    """Catches: a leak in one table that the others hide, a row counted once for each table."""
    requests, tables = RequestRows(3, CPU), [{1: "prompt", 2: "scores"}, {2: "states"}, {}]
    requests.register(
        *(SimpleNamespace(active_rows=table.keys, remove=lambda row, t=table: t.pop(row, None)) for table in tables)
    )
    assert requests.num_active() == 2
    requests.remove(2)
    assert requests.num_active() == 1
    requests.remove(1)
    assert requests.num_active() == 0


def test_a_row_begins_anew():
    """Catches: a phase, a reason or a draft in flight that the row's next request inherits."""
    requests = RequestRows(3, CPU)
    rows = np.array([2, 0])
    requests.enter(rows, Phase.DRAFTING)
    requests.is_tree[2] = True
    draft_batch = requests.draft_batch(rows, np.array([True, True]))
    requests.publish(torch.from_numpy(rows), REQ_IDS[: len(rows)], draft_batch, torch.tensor([5, 3]))
    assert requests.num_drafts(8).tolist() == [3, 0, 5]
    requests.skip(0, "pool_full")
    assert requests.skip_reason[0] == "pool_full" and requests.has_draft.tolist() == [False, False, True]
    for row in (0, 2):
        requests.remove(row)
    assert (requests.phase == Phase.UNSEEN).all() and requests.skip_reason == [None] * 3
    assert not (requests.has_draft.any() or requests.has_draft_np.any() or requests.is_tree.any())


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


def test_drafts_in_flight_are_those_of_the_rows_own_requests():
    """Catches: the next request of a row taken for the one whose drafts were verified, one batch for another."""
    requests, device_rows = drafting(), torch.from_numpy(ROWS)
    assert requests.was_drafted(requests.draft_batch(ROWS, ALL_DONE)).tolist() == [False, False]
    requests.publish(device_rows, REQ_IDS, requests.draft_batch(ROWS, ALL_DONE), None)
    assert requests.was_drafted(requests.draft_batch(ROWS, ALL_DONE)) is True
    requests.remove(2)
    requests.add(new_request(2))
    requests.enter(2, Phase.DRAFTING)
    assert requests.was_drafted(requests.draft_batch(ROWS, ALL_DONE)).tolist() == [False, True]
    requests.publish(device_rows, REQ_IDS, requests.draft_batch(ROWS, ALL_DONE), None)
    other = np.array([1, 0])
    assert requests.was_drafted(requests.draft_batch(other, ALL_DONE)).tolist() == [False, True]
    requests.publish(torch.from_numpy(other), REQ_IDS, requests.draft_batch(other, ALL_DONE), None)
    assert requests.has_draft.tolist() == [True, True, True, False, False]


def test_which_rows_are_in_a_phase():
    requests = RequestRows(4, CPU)
    requests.enter(slice(None), [Phase.UNSEEN, Phase.PREFILLING, Phase.DRAFTING, Phase.SKIPPED])
    assert requests.are_in(np.array([3, 2, 1]), Phase.DRAFTING, Phase.PREFILLING).tolist() == [False, True, True]
    assert requests.are_in(np.array([], dtype=np.int64), Phase.DRAFTING).tolist() == []


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


def test_structured_requests_are_known_by_their_parameters():
    sampling = SimpleNamespace(structured_outputs=object())
    assert NewRequest("a", 0, [], [], sampling).is_structured and not new_request(0).is_structured
