"""Vanilla references are the engine tests'."""

from tests.engine.conftest import reference

__all__ = ["reference"]
