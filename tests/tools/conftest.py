"""Engines that are not there, for every test of the tools."""

import pytest

from tools.common import FakeEngines
from vllm_vidspec.tools.bench import acceptance


@pytest.fixture
def engines(monkeypatch):
    """The engines of `bench acceptance`."""
    fake = FakeEngines()
    monkeypatch.setattr(acceptance, "run_job", fake)
    return fake
