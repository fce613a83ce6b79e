"""Faults on the draft's side, one by one in a running engine; as a program, rows of docs/notebook/reliability.md."""

import contextlib
import json
import operator
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.engine import harness
from tests.engine.harness import QWEN, Engine

KNOBS = {"on_draft_error": "skip", "max_draft_failures": 1000, "state_bytes": 0}


class Fault(NamedTuple):
    """One thing that goes wrong, a context in which it does, and the counters that must grow: the page shows them."""

    what: str
    inject: Callable[[Engine], contextlib.AbstractContextManager]
    seen: tuple[str, ...]


_draft, _chains = map(operator.attrgetter, ("draft", "speculator.backend.drafter.chains"))
NO, OUT_OF_MEMORY = RuntimeError("no"), torch.OutOfMemoryError("CUDA out of memory")


def _guide(engine: Engine) -> Any:
    return engine.guides[0]


def _raises(
    owner_of: Callable[[Engine], Any], name: str, error: Exception, times: int = 1
) -> Callable[[Engine], contextlib.AbstractContextManager]:
    """Return what lets a method of one of an engine's parts raise, so many times, and then do its work."""

    @contextlib.contextmanager
    def inject(engine: Engine) -> Iterator[None]:
        owner = owner_of(engine)
        original, left = getattr(owner, name), [times]

        def method(*args: Any, **kwargs: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise error
            return original(*args, **kwargs)

        with mock.patch.object(owner, name, method):
            yield
        assert not left[0], "it never came to pass"

    return inject


def _logits(value: float) -> Callable[[Engine], contextlib.AbstractContextManager]:
    """Return what makes all of the draft's logits one value."""

    def inject(engine: Engine) -> contextlib.AbstractContextManager:
        model = engine.draft.model
        original = model.compute_logits
        return mock.patch.object(
            model, "compute_logits", lambda *args, **kwargs: torch.full_like(original(*args, **kwargs), value)
        )

    return inject


@contextlib.contextmanager
def _full_pool(engine: Engine) -> Iterator[None]:
    """Take all blocks but those of one request out of the pool."""
    taken = engine.kv._free[4:]
    del engine.kv._free[4:]
    try:
        yield
    finally:
        engine.kv._free.extend(taken)


@contextlib.contextmanager
def _slow(engine: Engine) -> Iterator[None]:
    """Let each step of the draft take a twentieth of a second more."""
    drafter = engine.speculator.backend.drafter
    draft = drafter.draft
    with mock.patch.object(drafter, "draft", lambda message: (time.sleep(0.05), draft(message))[1]):
        yield


@contextlib.contextmanager
def _deaf(engine: Engine) -> Iterator[None]:
    """Let guidance raise in the first step of a prefill; what it remembers of earlier prompts does not help."""
    engine.guides[0].forget_scores()
    with _raises(_guide, "before_forward", NO)(engine):
        yield


DRAFT_ERROR, USELESS = ("skipped_draft_error",), ("low_acceptance_windows",)
FAULTS = (
    Fault("a forward of the draft raises", _raises(_chains, "draft", NO), DRAFT_ERROR),
    Fault("a forward of the draft is out of memory", _raises(_chains, "draft", OUT_OF_MEMORY), DRAFT_ERROR),
    Fault("the draft's vision tower raises, for one video", _raises(_draft, "encode", NO, times=2), DRAFT_ERROR),
    Fault("a prompt's prefill raises", _raises(_draft, "forward", NO), DRAFT_ERROR),
    Fault("the draft's logits are NaN", _logits(float("nan")), USELESS),
    Fault("the draft's logits are infinite", _logits(float("inf")), USELESS),
    Fault("the draft's logits are minus infinity", _logits(float("-inf")), USELESS),
    Fault("the KV pool has room for one request", _full_pool, ("skipped_pool_full", "resumed_drafts")),
    Fault("guidance raises while the target reads", _deaf, ("unguided_error",)),
    Fault("a prompt's scores cannot be had", _raises(_guide, "take", NO), DRAFT_ERROR),
    Fault("the draft is slow", _slow, ("accepted_tokens",)),
)


def ask_all(engine: Engine, expected: list[list[list[int]]], requests: list[tuple[dict, dict]]) -> list[dict[str, Any]]:
    """Return of each fault how many answers were vanilla's, with it and after it, and what it counted."""
    engine.generate(requests[:1])
    rows = []
    for fault in FAULTS:
        with fault.inject(engine):
            outputs, counted = engine.measured(requests)
        after, counted_after = engine.measured(requests[:2])
        rows.append(
            {
                "what": fault.what,
                "requests": len(requests),
                "right": sum(a == b for a, b in zip(harness.token_ids(outputs), expected, strict=True)),
                "right_after": sum(a == b for a, b in zip(harness.token_ids(after), expected, strict=False)),
                "drafted_after": counted_after["accepted_tokens"] > 0,
                "counted": {name: counted[name] for name in fault.seen},
                "failures": counted["draft_failures"],
                "used_blocks": engine.used_blocks(),
            }
        )
    return rows


def is_fine(row: dict[str, Any]) -> bool:
    """Return whether every answer was right, the fault was counted, and drafting goes on after it."""
    is_right = row["right"] == row["requests"] and row["right_after"] == 2
    return is_right and row["drafted_after"] and row["used_blocks"] == 0 and all(row["counted"].values())


def requests_of(family: str) -> list[tuple[dict, dict]]:
    """Return requests that do not end early, half of them sampled."""
    return harness.greedy_and_sampled(family, max_tokens=60, ignore_eos=True)


def expected_answers() -> list[list[list[int]]]:
    with harness.engine(QWEN, overrides=harness.NO_CACHE) as vanilla:
        return harness.token_ids(vanilla.generate(requests_of(QWEN)))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = expected_answers()
    with harness.engine(QWEN, "draft", overrides=harness.NO_CACHE, **KNOBS) as running:
        found = ask_all(running, answers, requests_of(QWEN))
    print("RESULT " + json.dumps([row | {"fine": is_fine(row)} for row in found]))
