"""The alarm for drafts that never stand, on numbers alone; what it hears of the device is in test_counters."""

import logging

import pytest

from vllm_vidspec.engine.report.acceptance_alarm import WINDOW, AcceptanceAlarm


@pytest.fixture
def lines(caplog, monkeypatch):
    """Return a function that counts the alarm's log lines so far."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: sum("next to no draft token stands" in record.getMessage() for record in caplog.records)


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
