"""Faults on the draft's side: every answer is vanilla's, each fault is counted, and drafting goes on after it."""

import pytest

from tests.engine import faults, harness
from tests.engine.harness import QWEN

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.draft_errors]


def test_every_fault_costs_drafts_alone():
    """No fault changes an answer or keeps a block; each is counted; three failures rest the draft for a while."""
    expected, requests = faults.expected_answers(), faults.requests_of(QWEN)
    with harness.engine(QWEN, "draft", overrides=harness.NO_CACHE, **faults.KNOBS) as engine:
        rows = faults.ask_all(engine, expected, requests)
        breaker = engine.breaker
        engine.look()
        breaker._failures.clear()
        breaker._most, breaker._rest_s = 3, 3600.0
        before = engine.counters()
        for _ in range(3):
            with faults.FAULTS[0].inject(engine):
                assert harness.token_ids(engine.generate(requests)) == expected
        engine.look()
        off, counted = engine.measured(requests)
        assert counted["draft_steps"] == counted["drafts"] == counted["speculation_on"] == 0
        breaker._until = 0.0
        engine.look()
        on, counted = engine.measured(requests)
        assert harness.token_ids(off) == harness.token_ids(on) == expected
        assert counted["accepted_tokens"] > 0 and counted["speculation_on"] == 1
        assert engine.counters()["cooldowns"] == before["cooldowns"] + 1
    assert [row["what"] for row in rows if not faults.is_fine(row)] == [], rows
