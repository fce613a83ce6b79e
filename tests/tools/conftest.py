"""What the tests of the tools share: engines that are not there, and scripts as modules."""

import importlib.util
from pathlib import Path

import pytest

from vllm_vidspec.tools.engine_session import EngineSession

ROOT = Path(__file__).resolve().parents[2]


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
def load_script():
    """Return what loads a script of this repository as a module."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
