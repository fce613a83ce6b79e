"""What the engine's unit tests hear, and the platform that they put in the place of vLLM's."""

import logging
from types import SimpleNamespace

import pytest


@pytest.fixture
def warned():
    """The warnings and errors that are logged from here on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.vidspec")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def on_gpu(monkeypatch):
    """`on_gpu(**facts)`: vLLM's platform is CUDA, of which a test knows this."""
    return lambda **facts: monkeypatch.setattr(
        "vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, **facts)
    )
