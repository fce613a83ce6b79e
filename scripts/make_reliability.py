"""Try inputs and scenarios, more than the tests do, and write how many to docs/results/reliability-*.json.

    python scripts/make_reliability.py --only fuzz                # 20 times the tests' inputs; ten minutes
    python scripts/make_reliability.py --only properties          # 5 times their lives of requests, no engine
    python scripts/make_reliability.py --only fuzz --times 5

What fails is shown as hypothesis shows it, and the command fails.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


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
            run_state_machine_as_test(begun, settings=drawing(60, stateful_step_count=40))
        rows[name] = {**counts, "seconds": round(time.monotonic() - start, 1)}
        print(f"{name}: {rows[name]}", flush=True)
    return rows


PARTS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {"fuzz": (fuzz, 20), "properties": (properties, 5)}


def main() -> int:
    """Run the parts that are asked for, and record each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--times", type=int, help="the tests' own number of examples")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import conftest  # noqa: F401  # the environment of engines

    from tests.fuzz.running import TIMES
    from vllm_vidspec.tools.provenance import provenance

    for part in options.only.split(","):
        run, usual = PARTS[part]
        os.environ[TIMES] = str(options.times or usual)
        record = {"rows": run(), "times": options.times or usual, "provenance": provenance()}
        (RESULTS / f"reliability-{part}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
