"""RequestRows and Knobs: every table hears of both ends of a request, once; every part reads the same knobs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, arrival_of, make_knobs
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.requests import Arrival, Phase, RequestRows
from vllm_vidspec.errors import VidSpecError


def test_every_table_hears_of_both_ends_in_the_same_order():
    """Catches: a table that is cleaned at another time than the others, or not at all."""
    requests, log = RequestRows(3, CPU), []
    for i in range(2):
        admit, forget = lambda found, i=i: log.append((found.req_state_idx, i)), lambda row, i=i: log.append((-row, i))
        requests.register(SimpleNamespace(admit=admit, forget=forget))
    requests.admit(arrival_of(2))
    requests.forget(2)
    assert log == [(2, 0), (2, 1), (-2, 0), (-2, 1)]


def test_a_row_begins_anew():
    """Catches: a phase, a reason or a draft in flight that the row's next request inherits."""
    requests = RequestRows(3, CPU)
    rows = np.array([2, 0])
    requests.phase[rows] = Phase.DRAFTING
    requests.is_tree[2] = True
    requests.publish(torch.from_numpy(rows), rows, np.array([True, True]), torch.tensor([5, 3]))
    assert requests.num_drafts(8).tolist() == [3, 0, 5]
    requests.skip(0, "pool_full")
    assert requests.skip_reason[0] == "pool_full" and requests.has_draft.tolist() == [False, False, True]
    for row in (0, 2):
        requests.forget(row)
    assert (requests.phase == Phase.UNSEEN).all() and requests.skip_reason == [None] * 3
    assert not (requests.has_draft.any() or requests.has_draft_np.any() or requests.is_tree.any())


def test_a_step_without_news_uploads_nothing(monkeypatch):
    requests, uploads = RequestRows(2, CPU), []
    monkeypatch.setattr(
        "vllm_vidspec.engine.requests.async_tensor_h2d",
        lambda values, device: uploads.append(1) or torch.tensor(values),
    )
    rows = np.array([1, 0])
    for is_drafted in ([True, False], [True, False], [True, True]):
        requests.publish(torch.from_numpy(rows), rows, np.array(is_drafted), None)
    assert len(uploads) == 2 and requests.has_draft.tolist() == [True, True]


def test_which_rows_are_in_a_phase():
    requests = RequestRows(4, CPU)
    requests.phase[:] = [Phase.UNSEEN, Phase.PREFILLING, Phase.DRAFTING, Phase.SKIPPED]
    assert requests.are_in(np.array([3, 2, 1]), Phase.DRAFTING, Phase.PREFILLING).tolist() == [False, True, True]
    assert requests.are_in(np.array([], dtype=np.int64), Phase.DRAFTING).tolist() == []


def test_knobs_change_for_everybody_or_for_nobody():
    """Catches: a part that keeps the old value, and half a change where a part refuses the new one."""
    held, heard = make_knobs(prune_ratio=0.5), []

    def hear(config: VidSpecConfig) -> None:
        heard.append(config.prune.ratio_for("video"))
        if config.prune.ratio_for("video") > 0.9:
            raise VidSpecError("too much")

    held.on_change(hear)
    held.retune({"prune_ratio": 0.7})
    assert held.now.prune.ratio_for("video") == 0.7
    with pytest.raises(VidSpecError, match="too much"):
        held.retune({"prune_ratio": 0.95})
    assert held.now.prune.ratio_for("video") == 0.7 and heard == [0.7, 0.95, 0.7]


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
    assert Arrival("a", 0, [], [], sampling).is_structured and not arrival_of(0).is_structured
