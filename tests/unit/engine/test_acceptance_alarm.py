"""What the worker counts, without an engine: a request's own figures, and the alarm for drafts that never stand."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_vidspec import metrics
from vllm_vidspec.engine.report import counters as counters_module
from vllm_vidspec.engine.report.acceptance_alarm import WINDOW, AcceptanceAlarm
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import Arrival, RequestRows

NUM_ROWS, K = 8, 5


@pytest.fixture
def counters(monkeypatch, tmp_path):
    """Return the counters of a worker with eight rows, all of them with real drafts."""
    monkeypatch.setattr(counters_module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(metrics, "path_for", lambda *engine: tmp_path / "m")
    metrics.MetricsFile.create(tmp_path / "m")
    config = SimpleNamespace(
        instance_id="x",
        parallel_config=SimpleNamespace(data_parallel_index=0),
        observability_config=SimpleNamespace(per_request_spec_decode_metrics="summary"),
    )
    requests = RequestRows(NUM_ROWS, torch.device("cpu"))
    requests.has_draft.fill_(True)
    return Counters(config, torch.device("cpu"), NUM_ROWS, K, requests)


@pytest.fixture
def lines(caplog, monkeypatch):
    """Return a function that counts the alarm's log lines so far."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: sum("next to no draft token stands" in record.getMessage() for record in caplog.records)


def verify(counters: Counters, rows: list[int], accepted: list[int], num_drafts: int = K) -> None:
    """Count one verify step, up to its publication."""
    rows_np = np.array(rows)
    bounds = torch.arange(len(rows) + 1, dtype=torch.int32) * (num_drafts + 1)
    num_sampled = torch.tensor(accepted, dtype=torch.int32) + 1
    counters.observe(torch.from_numpy(rows_np), rows_np, num_sampled, bounds)
    if publish := counters.publisher():
        publish()
    counters.flush()


def test_a_preempted_request_keeps_its_figures(counters):
    """It resumes on another row. Catches: figures that begin anew, a slot given away meanwhile or never given back."""
    file = counters._file
    counters.admit(Arrival("a", 3, [], [], None))
    verify(counters, [3], [4])
    counters.admit(Arrival("b", 3, [], [], None))  # on the row of the preempted one
    verify(counters, [3], [1])
    counters.admit(Arrival("a", 5, [], [], None))
    verify(counters, [3, 5], [1, 2])
    assert file.request("a")["exact"] == 6
    assert file.request("b")["exact"] == 2
    counters.end_requests(["a"])
    counters.admit(Arrival("a", 5, [], [], None))
    assert file.request("a")["exact"] == 0
    assert len(counters._held) == 2


def test_the_alarm_hears_what_the_device_has_counted(counters, lines):
    """Eight requests whose drafts never stand, then a chain and wide trees of which one token stands per step.

    Catches: an acceptance measured per drafted token, which trees and long chains would fail.
    """
    rows = list(range(NUM_ROWS))
    for _ in range(2 * WINDOW // NUM_ROWS):
        verify(counters, rows, [0] * NUM_ROWS)
    assert counters._file.values()["low_acceptance_windows"] == 2
    assert lines() == 1
    for num_drafts in (K, 64):
        for _ in range(2 * WINDOW // NUM_ROWS):
            verify(counters, rows, [1] * NUM_ROWS, num_drafts)
    assert counters._file.values()["low_acceptance_windows"] == 2
    counters._requests.has_draft.fill_(False)  # verified without a draft: nothing is said of acceptance
    for _ in range(2 * WINDOW // NUM_ROWS):
        verify(counters, rows, [0] * NUM_ROWS)
    assert counters._file.values()["low_acceptance_windows"] == 2


def test_the_alarm_speaks_once_and_is_armed_by_a_sound_window(lines):
    """Catches: a line per window, an alarm that a single good answer re-arms, one that never speaks again."""
    alarm = AcceptanceAlarm()
    assert not alarm.hear(WINDOW - 1, 0), "a window is not full"
    assert alarm.hear(1, 0) and lines() == 1
    assert alarm.hear(WINDOW, WINDOW // 4) and lines() == 1
    assert not alarm.hear(WINDOW, 3 * WINDOW // 4), "neither near zero nor sound"
    assert alarm.hear(3 * WINDOW, WINDOW) and lines() == 1
    assert not alarm.hear(WINDOW, 5 * WINDOW)
    assert not alarm.hear(WINDOW, WINDOW // 2), "half a token pays"
    assert alarm.hear(WINDOW, 0) and lines() == 2
