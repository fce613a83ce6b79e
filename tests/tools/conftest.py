"""Engines that are not there, for every test of the tools."""

import pytest

from tools.common import FakeEngines, FakeSession
from vllm_vidspec.tools.bench import acceptance, quality


@pytest.fixture
def engines(monkeypatch):
    """The engines of `bench acceptance`."""
    fake = FakeEngines()
    monkeypatch.setattr(acceptance, "run_job", fake)
    return fake


@pytest.fixture
def sessions(monkeypatch):
    """The engines of `bench quality`: those that were started."""
    monkeypatch.setattr(quality, "EngineSession", FakeSession)
    monkeypatch.setattr(FakeSession, "sessions", [])
    monkeypatch.setattr(FakeSession, "counters", {})
    return FakeSession.sessions
