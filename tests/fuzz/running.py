"""Fuzz targets and the number of inputs that hypothesis draws, for tests and for recorded counts."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from vllm_vidspec.errors import VidSpecError

# A factor of the tests' own numbers of examples, which are then drawn anew each time.
TIMES = "VIDSPEC_PROPERTY_TIMES"


def drawing(usual: int, **more: Any) -> settings:
    """Return how a test draws: `usual` examples, always the same; with `TIMES` in the environment more, and others."""
    asked = os.environ.get(TIMES)
    return settings(
        max_examples=usual * int(asked or 1),
        derandomize=not asked,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


@dataclass(frozen=True)
class Target:
    """A function under test and its inputs."""

    inputs: SearchStrategy
    check: Callable[[Any], str]  # takes an input and returns the outcome in a word; raises where an outcome is wrong
    usual: int = 300  # examples of a test

    def run(self) -> Counter[str]:
        outcomes: Counter[str] = Counter()

        @drawing(self.usual)
        @given(self.inputs)
        def tried(value: Any) -> None:
            outcomes[self.check(value)] += 1

        tried()
        return outcomes


def may_refuse(check: Callable[[Any], Iterator[None]], longest: int = 4000) -> Callable[[Any], str]:
    """Return the check of a target: up to its `yield` it may refuse an input, in one line; then all must hold."""

    def outcome(value: Any) -> str:
        steps = check(value)
        try:
            next(steps)
        except VidSpecError as error:
            text = str(error)
            assert text and len(text.splitlines()) == 1 and len(text) <= longest, text[:2000]
            return "refused"
        assert [*steps] == []
        return "accepted"

    return outcome
