"""A server whose engine is killed exits and leaves nothing behind; a script runs the other cases."""

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("vllm")

from tests.serve import restarts

pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_an_engine_that_is_killed():
    """Catches: a client that waits forever, a server that goes on without its engine, files that nobody sweeps."""
    with tempfile.TemporaryDirectory(prefix="vs") as folder:  # short: sockets lie in it
        seen = restarts.CASES[0].run(Path(folder))
    assert "none after the next start" in seen
