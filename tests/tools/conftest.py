"""Engines that are not there, for every test of the tools."""

from types import SimpleNamespace

import pytest

from tools.common import Clocks, answer_captions, counters
from vllm_vidspec.tools.bench import speed
from vllm_vidspec.tools.engine_session import EngineSession


@pytest.fixture
def fake_engines(monkeypatch):
    """Return what replaces engines by `answer(session, command)`, and returns the sessions and what each `asked`."""

    def replace(answer, **ready):
        sessions = []

        def enter(session):
            session.asked, session.ready, session.is_open = [], ready, True
            sessions.append(session)
            session.num_open = sum(one.is_open for one in sessions)
            return session

        def leave(session, *error):
            session.is_open = False

        def ask(session, command):
            session.asked.append(command)
            return answer(session, command)

        for name, fake in (("__enter__", enter), ("__exit__", leave), ("ask", ask)):
            monkeypatch.setattr(EngineSession, name, fake)
        return sessions

    return replace


@pytest.fixture
def sessions(fake_engines):
    """The engines of `bench quality`."""
    return fake_engines(answer_captions)


@pytest.fixture
def engines(fake_engines):
    """The engines of `bench acceptance`: `sessions`, `ours` (the last drafted answer), `fails` (job -> why or None)."""
    held = SimpleNamespace(ours=[1, 2], fails=lambda job: None)

    def answer(session, command):
        if reason := held.fails(session.job):
            raise reason
        spec, gained = session.job["llm"].get("speculative_config"), None
        token_ids = [[1, 2]] * len(session.job["prompts"]["held_out"])
        if spec:
            gained = counters(1.0 if spec["pruner"] == "none" else 1 - spec["prune_ratio"])
            token_ids[-1] = held.ours
        return {"seconds": 1.0, "metrics": gained, "token_ids": token_ids}

    held.sessions = fake_engines(answer, scheduling="sync")
    return held


@pytest.fixture
def clocks(fake_engines, monkeypatch, tmp_path):
    """The engines of `bench paper` and `bench speed`, on two cores, with nothing measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "cores", lambda: [0, 1])
    found = Clocks()
    found.sessions = fake_engines(found)
    return found
