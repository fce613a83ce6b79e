"""Two ranks over gloo: what fails on one of them is left by both, or ends the process with a line that names it."""

import logging
import multiprocessing
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from vllm_vidspec.engine.agreement import Agreement, OthersFailed

PATIENCE_S = 0.5


def rank_process(rank: int, scenario, store: str, log: str) -> None:
    """Be one rank: run the scenario, write what it returns to the log after what was logged."""
    sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("vllm.vidspec")
    logger.handlers, logger.propagate = [handler], False
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = SimpleNamespace(rank_in_group=rank, world_size=2, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
    result = scenario(Agreement(group, PATIENCE_S, PATIENCE_S), rank)
    print("RESULT", result, file=sys.stderr)
    os._exit(0)


@pytest.fixture
def pair(tmp_path):
    """`pair(scenario)` -> per rank its exit code and what it wrote; a scenario takes an agreement and its rank."""

    def run(scenario):
        context = multiprocessing.get_context("fork")  # the imports are there already
        logs = [str(tmp_path / f"rank{rank}") for rank in range(2)]
        store = str(tmp_path / "store")
        ranks = [context.Process(target=rank_process, args=(i, scenario, store, logs[i])) for i in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(20)
            assert process.exitcode is not None, "a rank hangs"
        with open(logs[0]) as first, open(logs[1]) as second:
            return [process.exitcode for process in ranks], [first.read(), second.read()]

    return run


def all_reduce(rank: int) -> int:
    value = torch.tensor([rank + 1])
    torch.distributed.all_reduce(value)
    return int(value)


def survivable(agreement: Agreement, rank: int) -> list:
    """Steps that fail on one rank, on both, before a collective, after it, and not at all."""
    seen: list = []

    def step(fails_on: tuple[int, ...], after: bool = False):
        if rank in fails_on and not after:
            raise ValueError("before")
        with agreement.collective():
            seen.append(all_reduce(rank))
        if rank in fails_on and after:
            raise ValueError("after")

    for fails_on in ((), (0,), (1,), (0, 1)):
        for after in (False, True):
            error = agreement.run("prefill", step, fails_on, after)
            assert (error is None) == (not fails_on)
            assert error is None or isinstance(error, ValueError if rank in fails_on else OthersFailed)
    for fails_on in ((), (0, 1)):  # a decode step is left by both at the same place, or by none
        assert (agreement.run("drafting", step, fails_on, is_careful=False) is None) == (not fails_on)
    # A step in a step: what fails inside costs what is inside, what fails outside costs both.
    for inner, outer in (((), ()), ((0,), ()), ((1,), ()), ((), (0,)), ((0,), (1,)), ((0, 1), ()), ((1,), (1,))):
        found: list = []

        def both(inner=inner, outer=outer, found=found):
            if rank in outer and rank not in inner:
                raise ValueError("outside")
            found.append(agreement.run("inside", step, inner))
            if rank in outer:
                raise ValueError("outside")
            with agreement.collective():
                seen.append(all_reduce(rank))

        error = agreement.run("outside", both)
        assert (error is None) == (not outer)
        assert outer or (found[0] is None) == (not inner)
    assert agreement.all_ranks_and("flags", [True, rank == 0, False]) == [True, False, False]
    assert agreement.all_ranks_and("flags", [True] * 200 + [rank == 1]) == [True] * 200 + [False]
    assert agreement.all_ranks_and("flags", []) == []
    return seen


def test_what_fails_on_one_rank_is_left_by_both(pair):
    """Catches: a rank that goes on alone, into a collective or past one; flags that are one rank's own."""
    codes, texts = pair(survivable)
    assert codes == [0, 0], texts
    # Two runs without a failure, one failure after the collective by rank and by both, one decode step; then one step
    # in a step that both survive and three of which the outer one does.
    assert [text.splitlines()[-1] for text in texts] == [f"RESULT {[3] * 11}"] * 2
    assert "rank 1 of 2 failed in prefill: before" in texts[1]


def lost(agreement: Agreement, rank: int) -> None:
    """Rank 1 leaves out a collective and never comes to the next agreement."""
    if rank == 1:
        time.sleep(4 * PATIENCE_S)
        return

    def step():
        with agreement.collective():
            all_reduce(rank)

    agreement.run("guidance", step)


def failing(phase: str, fails_on: tuple[int, ...], error: Exception, num_reduces=(0, 0), is_careful=False):
    """Return a scenario of so many collectives by rank, after which some fail and the others settle something."""

    def scenario(agreement: Agreement, rank: int) -> None:
        def step():
            with agreement.collective():
                for _ in range(num_reduces[rank]):
                    all_reduce(rank)
                if rank in fails_on:
                    raise error

        agreement.run(phase, step, is_careful=is_careful)
        agreement.all_ranks_and("guidance", [True])

    return scenario


NO_ROOM = torch.OutOfMemoryError("no room")
TORN = failing("prefill", (1,), ValueError("in the middle"), (2, 1), is_careful=True)


@pytest.mark.parametrize(
    ("scenario", "lines"),
    [
        (lost, {0: "in guidance rank 1 did not answer within 0.5 s"}),
        (TORN, {1: "in prefill rank 0 did not answer within 0.5 s"}),
        (failing("drafting", (1,), NO_ROOM), dict.fromkeys((0, 1), "rank 1 failed in the middle of a step")),
        (failing("drafting", (0, 1), NO_ROOM), dict.fromkeys((0, 1), "ends the engine")),
    ],
    ids=["lost", "torn", "alone", "memory"],
)
def test_what_cannot_be_left_ends_with_a_line_that_names_the_rank(pair, scenario, lines):
    """Catches: a skipped collective that hangs; a rank that skips what the others wait in."""
    codes, texts = pair(scenario)
    for rank, line in lines.items():
        assert codes[rank] == 1
        assert line in texts[rank], texts
