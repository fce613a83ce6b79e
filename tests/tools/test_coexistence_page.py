"""docs/coexistence.md is what its rows were last seen to be, every row of it, with no empty cell."""

import json
import re

import pytest

from tests.engine import coexistence
from tools.common import load


@pytest.fixture(scope="module")
def script():
    return load("scripts/make_coexistence.py")


@pytest.fixture(scope="module")
def recorded(script):
    return json.loads(script.RECORD.read_text())["rows"]


def test_page_is_what_was_seen(script, recorded):
    """Catches: a page that was edited by hand, or not made again."""
    assert script.filled(script.PAGE.read_text(), recorded) == script.PAGE.read_text()


def test_every_row_was_run_and_is_as_expected(recorded):
    """Catches: a row without a run, a run without a row, a verdict that changed."""
    found = {(row["feature"], row["setting"]): row for row in recorded}
    assert list(found) == [(row.feature, row.setting) for row in coexistence.ROWS]
    for row in coexistence.ROWS:
        seen = found[row.feature, row.setting]
        assert seen["verdict"] == row.expected, row.name
        assert re.search(row.says, seen["detail"]), row.name


def test_no_cell_is_empty(script, recorded):
    """On the page as well. Catches: a blank, a dash, a question mark."""
    lines = script.table(recorded).splitlines()
    assert len(lines) == 2 + len(coexistence.ROWS)
    for line in lines[2:]:
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        assert len(cells) == 4
        assert all(re.search(r"\w{2}", cell) for cell in cells), line


def test_nothing_is_claimed_that_was_not_run(recorded):
    """A row that did not run says why, and what was looked at."""
    for row in recorded:
        assert row["verdict"] in coexistence.VERDICTS
        if row["verdict"] == coexistence.NOT_RUN:
            assert re.fullmatch(r".+; checked: .+", row["detail"])
