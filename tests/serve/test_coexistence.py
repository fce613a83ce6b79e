"""vidspec beside other features of vLLM: the rows of docs/coexistence.md that need servers, run again."""

import re

import pytest

from tests.engine import coexistence

pytestmark = [pytest.mark.serve, pytest.mark.slow]


@pytest.mark.parametrize("row", [row for row in coexistence.ROWS if row.kind == "serve"], ids=lambda row: row.name)
def test_row(row, tmp_path):
    """Catches: what the page says and is no longer so."""
    seen = row.run(tmp_path)
    assert seen.verdict == row.expected, seen
    assert re.search(row.says, seen.detail), seen
