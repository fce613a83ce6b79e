"""R10's and R18's benchmarks: what a time is counted to."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import bench_overheads as overheads
from tools.common import load


@pytest.fixture
def watched(monkeypatch):
    """An engine whose every call takes a second of its clock; an answer is two steps of its prompt and three verify
    steps."""
    now = iter(range(1000))
    monkeypatch.setattr(overheads.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(overheads.Watched, "_wrap", lambda self, runner: self._watch.wrap(runner, "prune", "pruning"))
    runner = SimpleNamespace(prune=lambda: None, execute_model=lambda output: runner.prune())

    def generate(prompts, sampling, use_tqdm):
        for drafts in ({}, {}, {"0": [1]}, {"0": [1]}, {"0": [1]}):
            runner.execute_model(SimpleNamespace(scheduled_spec_decode_tokens=drafts))

    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    return overheads.Watched(SimpleNamespace(llm_engine=engine, generate=generate))


def test_a_prompts_steps_are_one_and_each_verify_step_is_its_own(watched):
    """Catches: a prompt's pruning that counts to a verify step, a request's last step with the wait for the next."""
    for _ in range(2):
        watched.answer({})
    assert [len(found) for found in (watched.prompts, watched.verifies)] == [2, 4]
    assert all(parts == {"pruning": 2.0} for _, parts in watched.prompts)
    assert all(parts == {"pruning": 1.0} for _, parts in watched.verifies)
    assert {seconds for seconds, _ in watched.prompts} == {5.0}
    assert {seconds for seconds, _ in watched.verifies} == {3.0}


@pytest.mark.parametrize("is_fine", [False, True])
def test_host_time_is_what_is_not_inside_other_calls(monkeypatch, is_fine):
    """Ours calls a part of ours, which calls what is not ours; each spends a millisecond before and after."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else the script sets it for good
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench = load("benchmarks/bench_host_time.py")
    clock = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    calls = SimpleNamespace()

    def spend(inner=None):
        clock[0] += 1e-3
        if inner is not None:
            inner()
        clock[0] += 1e-3

    calls.foreign = spend
    calls.part = lambda: spend(lambda: calls.foreign())
    calls.entry = lambda: spend(lambda: calls.part())
    watch = bench.Stopwatch()
    watch.is_fine = is_fine
    watch.wrap(calls, "entry", "entry")
    watch.wrap(calls, "part", "part", fine=True)
    watch.wrap(calls, "foreign", bench.FOREIGN)
    calls.entry()
    parts = watch.take()
    assert sum(parts.values()) == pytest.approx(4e-3)
    assert set(parts) == ({"entry", "part"} if is_fine else {"entry"})
    assert watch.take() == {}
    watch.unwrap()
    assert calls.foreign is spend
