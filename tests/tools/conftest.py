"""Engines that are not there, for every test of the tools."""

import pytest

from tools.clocks import Clocks
from tools.common import FakeEngines, answer_captions
from vidspec_tools.bench import acceptance, trials
from vllm_vidspec.tools.engine_session import EngineSession


@pytest.fixture
def fake_engines(monkeypatch):
    """Return what replaces engines by `answer(session, command)` and returns the sessions, with what each `asked`."""

    def replace(answer, **ready):
        sessions = []

        def enter(session):
            session.asked, session.ready = [], ready
            sessions.append(session)
            return session

        def ask(session, command, report=None):
            session.asked.append(command)
            return answer(session, command)

        for name, fake in (("__enter__", enter), ("__exit__", lambda *_: None), ("ask", ask)):
            monkeypatch.setattr(EngineSession, name, fake)
        return sessions

    return replace


@pytest.fixture
def sessions(fake_engines):
    """The engines of `bench quality`."""
    return fake_engines(answer_captions)


@pytest.fixture
def engines(monkeypatch):
    """The engines of `bench acceptance`."""
    fake = FakeEngines()
    monkeypatch.setattr(acceptance, "run_job", fake)
    return fake


@pytest.fixture
def clocks(fake_engines, monkeypatch, tmp_path):
    """The engines of `bench parallel` and its like, on two cores, with nothing measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trials, "cores", lambda: [0, 1])
    found = Clocks()
    found.sessions = fake_engines(found)
    return found
