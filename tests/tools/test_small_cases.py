"""The engine benchmarks: which step a time is counted to, the command's rows."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import harness
from benchmarks import small_cases as overheads


def test_a_prompts_steps_are_one_and_each_verify_step_is_its_own(monkeypatch):
    """Every call takes a second of the engine's clock; an answer is two steps of its prompt and three verify steps.

    Catches: a prompt's pruning that counts to a verify step, a request's last step with the wait for the next.
    """
    now = iter(range(1000))
    monkeypatch.setattr(overheads.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(overheads.Watched, "_wrap", lambda self, runner: self._watch.wrap(runner, "prune", "pruning"))
    runner = SimpleNamespace(prune=lambda: None, execute_model=lambda output: runner.prune())

    def answer(prompts, **sampling):
        for drafts in ({}, {}, {"0": [1]}, {"0": [1]}, {"0": [1]}):
            runner.execute_model(SimpleNamespace(scheduled_spec_decode_tokens=drafts))

    watched = overheads.Watched(SimpleNamespace(runner=runner, answer=answer))
    for _ in range(2):
        watched.answer({})
    assert [len(found) for found in (watched.prompts, watched.verifies)] == [2, 4]
    assert all(parts == {"pruning": 2.0} for _, parts in watched.prompts)
    assert all(parts == {"pruning": 1.0} for _, parts in watched.verifies)
    assert {seconds for seconds, _ in watched.prompts} == {5.0}
    assert {seconds for seconds, _ in watched.verifies} == {3.0}


def test_host_time_is_what_is_not_inside_other_calls(monkeypatch):
    """Ours calls a part of ours, which calls what is not ours; each spends a millisecond before and after."""
    clock = [0.0]
    monkeypatch.setattr(overheads, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    calls = SimpleNamespace()

    def spend(inner=None):
        clock[0] += 1e-3
        if inner is not None:
            inner()
        clock[0] += 1e-3

    calls.foreign = spend
    calls.part = lambda: spend(lambda: calls.foreign())
    calls.entry = lambda: spend(lambda: calls.part())
    watch = overheads.Stopwatch()
    for name, label in (("entry", "entry"), ("part", "part"), ("foreign", overheads.FOREIGN)):
        watch.wrap(calls, name, label)
    calls.entry()
    assert watch.take() == pytest.approx({"entry": 2e-3, "part": 2e-3}) and watch.take() == {}
    watch.unwrap()
    assert calls.foreign is spend


def test_the_command_writes_rows_and_where_they_come_from(monkeypatch, tmp_path, capsys):
    """Catches: a list that is read as one word, rows that are lost because a later one fails."""
    out = tmp_path / "out.json"
    arguments = ["bench", "--tokens", "1,2", "--json", str(out)]

    def measure(options):
        assert (options.rounds, options.pruner, options.again) == (3, ["uv"], True)
        yield from ({"size": size} for size in options.tokens)

    monkeypatch.setattr(sys, "argv", ["bench", "sizes", *arguments[1:], "--again"])
    harness.cases("doc", {"sizes": (measure, {"tokens": [8], "pruner": ["uv"], "rounds": 3, "again": False})})
    found = json.loads(out.read_text())
    assert found["rows"] == [{"size": 1}, {"size": 2}] and "git_sha" in found["provenance"]
    assert capsys.readouterr().out.splitlines() == ['{"size": 1}', '{"size": 2}']
    monkeypatch.setattr(sys, "argv", ["bench", "another"])
    with pytest.raises(SystemExit, match="Cases: sizes; each has --help"):
        harness.cases("doc", {"sizes": (measure, {})})
