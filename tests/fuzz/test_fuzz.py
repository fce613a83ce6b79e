"""Every target is tried with its own number of inputs; `vidspec_tools.pages.measure --only fuzz` tries more."""

import pytest

pytest.importorskip("vllm")
from tests.fuzz import files, requests

TARGETS = {**files.TARGETS, **requests.TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_in(name):
    """Some of it is accepted and some refused: a target that knows one answer alone tries nothing."""
    outcomes = TARGETS[name].run()
    assert outcomes["accepted"] and outcomes["refused"], outcomes
