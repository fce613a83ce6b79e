"""Every fuzz target; `VIDSPEC_PROPERTY_TIMES=20 pytest tests/fuzz` tries more inputs."""

import pytest

from tests.fuzz import files, requests

TARGETS = {**files.TARGETS, **requests.TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_in(name):
    """Some inputs are accepted and some refused, or a target would test nothing."""
    outcomes = TARGETS[name].run()
    assert outcomes["accepted"] and outcomes["refused"], outcomes
