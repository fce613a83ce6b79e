"""Scenarios and inputs that hypothesis draws, more than the tests do, and how they ended; for `measure`."""

import logging
import time
from collections.abc import Callable
from typing import Any
from unittest import mock


def fuzz() -> dict[str, Any]:
    """Try inputs on every target; return how many ended how."""
    from tests.fuzz.test_fuzz import TARGETS

    logging.getLogger("vllm.vidspec").setLevel(logging.CRITICAL)  # each garbage message is an error in the log
    rows = {}
    for name, target in TARGETS.items():
        start = time.monotonic()
        outcomes = target.run()
        rows[name] = {**outcomes, "inputs": sum(outcomes.values()), "seconds": round(time.monotonic() - start, 1)}
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def properties() -> dict[str, Any]:
    """Let requests live, without an engine; return how many scenarios and how many steps of the target."""
    from hypothesis.stateful import run_state_machine_as_test

    from tests.fuzz.running import drawing
    from tests.properties import life, test_life
    from tests.unit.parallel import test_pair

    logging.getLogger("vllm.vidspec").setLevel(logging.CRITICAL)
    rows = {}
    for name, machine, owner in (
        ("a request's life", test_life.Life, life.World),
        ("streams and windows", test_pair.Events, test_pair.Pair),
    ):
        counts, start, step = {"scenarios": 0, "steps": 0}, time.monotonic(), owner.step

        def begun(machine: Any = machine, counts: dict = counts) -> Any:
            counts["scenarios"] += 1
            return machine()

        def stepped(self: Any, *args: Any, _step: Callable = step, _counts: dict = counts, **kwargs: Any) -> Any:
            _counts["steps"] += 1
            return _step(self, *args, **kwargs)

        with mock.patch.object(owner, "step", stepped):
            run_state_machine_as_test(begun, settings=drawing(60, stateful_step_count=40))  # type: ignore[arg-type]
        rows[name] = {**counts, "seconds": round(time.monotonic() - start, 1)}
        print(f"{name}: {rows[name]}", flush=True)
    return rows
