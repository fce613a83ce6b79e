"""RequestRows and Knobs: every table hears of both ends of a request, once; every part reads the same knobs."""

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, make_knobs, new_request
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.requests import Phase, RequestRows
from vllm_vidspec.errors import VidSpecError


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
