"""docs/reliability.md says what was recorded, and what was recorded is as it should be."""

import json
import re

import pytest

from benchmarks import soak, soak_judge
from tests.serve import restarts
from tools.common import load


@pytest.fixture(scope="module")
def script():
    return load("scripts/make_reliability.py")


def recorded(script, name):
    return json.loads(script.SECTIONS[name].record.read_text())


def test_page_is_what_was_recorded(script):
    """Catches: a page that was edited by hand, or not made again."""
    page = script.PAGE.read_text()
    assert script.filled(page) == page
    for name, section in script.SECTIONS.items():
        assert section.text(recorded(script, name)) in page


def test_the_soak_was_long_whole_and_clean(script):
    result = recorded(script, "soak")
    for name in ("wrong_answers", "errors_unexpected", "leaked_blocks", "leaked_states"):
        assert result[name] == 0, name
    assert soak_judge.is_bad(result, soak.MOST_MB_PER_MIN) == []
    assert all(row["preemptions"] > 0 for row in result["configs"])
    assert result["minutes"] >= 15 and result["requests"] > 1000
    assert [row["config"] for row in result["configs"]] == ["chain", "tree-static", "tree-adaptive", "parallel"]


def test_every_case_was_run_and_is_right(script):
    rows = recorded(script, "restarts")["rows"]
    assert [row["case"] for row in rows] == [case.name for case in restarts.CASES]
    for row in rows:
        assert row["is_right"] and re.search(r"\w{2}", row["seen"]), row["case"]
