"""`make gpu-smoke` and `make bench-gpu` without a GPU: isolated steps, honest verdicts, every planned row."""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import pytest

from tools.common import ROOT, cut_off, is_gone, load

steps, suite = load("scripts/gpu_steps.py"), load("scripts/gpu_suite.py")

# A stand-in for gpu_steps.py: each step misbehaves in its own way.
WORKER = """
import faulthandler, json, os, signal, subprocess, sys, time
names, lines, options = sys.argv[1:]
options, file = json.loads(options), open(lines, "a")
def end(outcome, reason="", **facts):
    write(end=outcome, reason=reason, facts=facts, seconds=0.1)
for name in names.split(","):
    def write(**row):
        file.write(json.dumps({"step": name} | row) + chr(10)); file.flush()
    print("this is", name, flush=True)
    match name:
        case "environment" | "machine": end("passed", gpu="G")
        case "doctor": end("passed", number=3)
        case "compile": end("failed", "2 of 8 texts differ")
        case "kernels": end("skipped", "pytest is not installed")
        case "identity-qwen2.5-vl": end("unchecked" if options["skip_numbers"] else "passed", around=options["around"])
        case "real-chain": os.kill(os.getpid(), signal.SIGSEGV)
        case "real-vanilla":
            end("passed")
            os.kill(os.getpid(), signal.SIGABRT)
        case "real-tree-static": end("fine")
        case "self-draft-bf16":
            file.write('{"step": "self-draft-bf16", "end": "pas'); file.flush()
        case "sync-debug":
            faulthandler.register(signal.SIGUSR1)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            print(child.pid, flush=True)
            time.sleep(60)
        case _ if name.startswith("kernel-"):
            write(kernel=name[7:], outcome="measured", reason="", median=2.0)
            end("passed")
        case _ if name.startswith("engine-"):
            engine = name[7:]
            for batch in (1, 4):
                write(engine=engine, method=engine.split("-")[0], graphs=True, models="m", batch=batch,
                      outcome="measured", reason="", tokens_per_s=10.0 * batch)
            if engine == "chain-graphs":
                file.write('{"step": "engi'); file.flush()
                print(os.getpid(), flush=True)
                time.sleep(60)
            if engine == "blind-graphs":
                sys.exit(7)
            bad = {"parallel-graphs": "skipped", "vanilla-eager": "failed"}
            end(bad.get(engine, "passed"), "its reason" if engine in bad else "")
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """`play(parts, only, *arguments)` runs steps of the stand-in; returns the exit status and the JSON."""
    worker, out = tmp_path / "worker.py", tmp_path / "out.json"
    worker.write_text(WORKER)
    monkeypatch.setattr(suite, "WORKER", worker)
    limits = {
        "sync-debug": 1.0,
        "engine-chain-graphs": 2.0,
    }  # only a step that hangs reaches its limit, on a busy machine too
    slow = {
        part: tuple(dataclasses.replace(step, timeout_s=limits.get(step.name, 100)) for step in parts)
        for part, parts in suite.PLAN.items()
    }
    monkeypatch.setattr(suite, "PLAN", slow)
    monkeypatch.setattr(suite, "SECONDS", {name: sum(step.timeout_s for step in parts) for name, parts in slow.items()})

    def run(parts, only, *more):
        arguments = ["--out", str(out), "--only", only, "--work-dir", str(tmp_path / "work"), *more]
        return suite.main(arguments, parts), json.loads(out.read_text())

    return run


SMOKE, HALVES = ("smoke",), ("kernels", "engines")


def test_every_failure_is_recorded_and_the_other_steps_run(play):
    """Catches: a crash that ends the run or counts as passed, a reason without the cause, a step without a log."""
    failing = ("compile", "real-chain", "real-vanilla", "real-tree-static", "self-draft-bf16")
    status, found = play(SMOKE, ",".join(("environment", "doctor", "kernels", *failing)))
    assert status == 1 and set(found["failed"]) == set(failing) and found["to_come"] == []
    assert (found["passed"], found["skipped"]) == (["environment", "doctor"], ["kernels"])
    records = {record["name"]: record for record in found["steps"]}
    assert records["compile"]["reason"] == "2 of 8 texts differ"
    assert records["real-chain"]["reason"] == "crashed (signal SIGSEGV); its last line: this is real-chain"
    assert re.match(r"crashed \(signal SIGABRT\).*, after it had passed", records["real-vanilla"]["reason"])
    assert records["real-tree-static"]["reason"] == records["self-draft-bf16"]["reason"] == "ended without a verdict"
    assert records["doctor"]["facts"] == {"number": 3} and records["doctor"]["reason"] == ""
    for name, record in records.items():
        assert "\n" not in record["reason"] and 0 < record["seconds"] < 20
        assert Path(record["log"]).read_text().startswith(f"this is {name}")
    assert found["environment"] == {"gpu": "G"}
    assert found.keys() >= {"command", "seconds", "device", "numbers_checked"}


def test_a_step_that_hangs_is_killed_with_its_children(play):
    start = time.monotonic()
    status, found = play(SMOKE, "doctor,sync-debug")
    assert status == 1 and time.monotonic() - start < 20 and found["passed"] == ["doctor"]
    (hung,) = [record for record in found["steps"] if record["name"] == "sync-debug"]
    _, child, *where = Path(hung["log"]).read_text().splitlines()
    assert re.fullmatch(rf"timed out after \d s; its last line: {child}", hung["reason"])
    assert any("worker.py" in line for line in where), "the log lacks the stacks"
    assert is_gone(child)


def test_without_cuda_a_step_that_needs_it_is_skipped_and_never_passed(play):
    """Catches: an emulated device that steps never see, unchecked numbers that are a success."""
    only = "real-chain,identity-qwen2.5-vl"
    status, found = play(SMOKE, only, "--device", "cpu", "--skip-numbers", "--around", "a.b:c")
    assert status == 0 and (found["skipped"], found["unchecked"]) == (["real-chain"], ["identity-qwen2.5-vl"])
    records = {record["name"]: record for record in found["steps"]}
    assert records["identity-qwen2.5-vl"]["facts"] == {"around": "a.b:c"}
    assert (records["real-chain"]["reason"], records["real-chain"]["log"]) == ("no CUDA", None)
    assert steps.around("contextlib:ExitStack").__class__.__name__ == "ExitStack"
    with steps.around(""):
        pass


def test_an_old_verdict_is_not_taken_for_a_new_one(play, tmp_path):
    """Catches: a step that ends without a verdict in a work directory where it once passed."""
    (tmp_path / "work").mkdir()
    stale = {"step": "real-tree-static", "end": "passed", "reason": "", "facts": {}, "seconds": 1}
    (tmp_path / "work" / "real-tree-static.jsonl").write_text(json.dumps(stale) + "\n")
    assert play(SMOKE, "real-tree-static")[1]["failed"] == ["real-tree-static"]


@pytest.mark.parametrize(
    ("parts", "only", "hangs", "done"),
    [
        (SMOKE, "doctor,compile,sync-debug,two-ranks", "sync-debug", ["doctor", "compile"]),
        (HALVES, "kernel-accept,engine-vanilla-graphs,engine-chain-graphs,engine-chain-eager", "engine-chain-graphs",
         ["kernel-accept", "engine-vanilla-graphs"]),
    ],
    ids=["checks", "measurements"],
)  # fmt: skip
def test_an_interrupted_run_leaves_what_was_found(tmp_path, parts, only, hangs, done):
    """Catches: a file that is written at the end, or not as a whole; a step that outlives the run; steps to come that
    are not listed."""
    (tmp_path / "worker.py").write_text(WORKER)
    out, work = tmp_path / "out.json", tmp_path / "work"
    code = f"""
import pathlib, sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
import gpu_suite as suite
suite.WORKER = pathlib.Path({str(tmp_path / "worker.py")!r})
suite.command(lambda: suite.main(parts={parts!r}))
"""
    arguments = ["--out", str(out), "--work-dir", str(work), "--only", only]
    cut_off([sys.executable, "-c", code, *arguments], work / f"{hangs}.log")
    found = json.loads(out.read_text())
    assert [step["name"] for step in found["steps"]] == done
    assert hangs in found["to_come"] and len(found["to_come"]) == 2
    assert len(found["rows"]) == (4 if parts == HALVES else 0)  # one of a kernel, two of an engine, one it did not give


def test_every_planned_row_is_there_whatever_became_of_its_engine(play):
    """Catches: a crash or a time-out that takes measured rows with it, or leaves a planned one out without a word."""
    names = ("vanilla-graphs", "chain-graphs", "blind-graphs", "parallel-graphs", "vanilla-eager")
    only = "machine," + ",".join(f"engine-{name}" for name in names)
    status, found = play(HALVES, only, "--half", "2")
    assert status == 1
    by_key = {(row["engine"], row["batch"]): row for row in found["rows"]}
    assert set(by_key) == {(name, batch) for name in names for batch in (1, 4, 8)}
    assert all(by_key[name, batch]["outcome"] == "measured" for name in names for batch in (1, 4))
    why = {name: (by_key[name, 8]["outcome"], by_key[name, 8]["reason"]) for name in names}
    assert why["vanilla-graphs"][1] == "it left no row"
    assert why["chain-graphs"][0] == "failed" and why["chain-graphs"][1].startswith("timed out after ")
    assert why["blind-graphs"] == ("failed", "crashed (exit status 7); its last line: this is engine-blind-graphs")
    assert why["parallel-graphs"] == ("skipped", "its reason") and why["vanilla-eager"] == ("failed", "its reason")
    assert by_key["parallel-graphs", 4]["speedup"] == 1.0
    assert found["environment"]["gpu"] == "G" and "--half 2" in found["command"]


def test_a_dry_run_is_one_process_whose_last_step_alone_can_crash_it(play):
    """Catches: steps that a later one's crash takes with it."""
    _, found = play(HALVES, "kernel-accept,engine-blind-graphs", "--dry-run")
    assert (found["passed"], found["failed"]) == (["kernel-accept"], ["engine-blind-graphs"])
    assert "mean nothing" in found["note"] and {row.get("batch") for row in found["rows"]} == {None, 1, 4}


@pytest.mark.parametrize("parts", [SMOKE, HALVES])
def test_unknown_steps_are_refused(capsys, parts):
    """Catches: a misspelt step that runs nothing and passes."""
    with pytest.raises(SystemExit):
        suite.main(["--only", "kernles"], parts)
    assert "no step 'kernles'" in capsys.readouterr().err
