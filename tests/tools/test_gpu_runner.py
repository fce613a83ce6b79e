"""`make gpu-smoke` and `make bench-gpu` without a GPU: isolated steps, honest verdicts, every planned row."""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import plan
from tools.common import cut_off, is_gone

# A stand-in for `benchmarks.gpu.steps`: each step misbehaves in its own way.
WORKER = """
import faulthandler, json, os, signal, subprocess, sys, time
name, lines, options = sys.argv[1:]
options, file = json.loads(options), open(lines, "a")
def write(**row):
    file.write(json.dumps({"step": name} | row) + chr(10)); file.flush()
def end(outcome, reason="", **facts):
    write(outcome=outcome, reason=reason, facts=facts)
print("this is", name, flush=True)
match name:
    case "environment": end("passed", gpu="G")
    case "two-ranks": end("failed", "2 of 8 texts differ")
    case "kernels": end("skipped", "pytest is not installed")
    case "identity-qwen2.5-vl": end("unchecked" if options["dry_run"] else "passed", dry_run=options["dry_run"])
    case "real-chain": os.kill(os.getpid(), signal.SIGSEGV)
    case "real-vanilla":
        end("passed")
        os.kill(os.getpid(), signal.SIGABRT)
    case "real-tree-static": end("fine")
    case "self-draft-bf16":
        file.write('{"step": "self-draft-bf16", "outcome": "pas'); file.flush()
    case "sync-debug":
        faulthandler.register(signal.SIGUSR1)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
    case _ if name.startswith("kernel-"):
        write(kernel=name[7:], outcome="measured", reason="", median=2.0)
        end("passed")
    case _ if name.startswith("engine-"):
        method = name.split("-")[1]
        for batch in (1, 4):
            rate = batch * (10.0 if method == "vanilla" else 20.0)
            write(engine=name[7:], method=method, batch=batch, outcome="measured", tokens_per_s=rate)
        write(engine=name[7:], method=method, batch=8, outcome="refused", reason="needs 98 GiB")
        if name == "engine-chain":
            file.write('{"step": "engi'); file.flush()
            print(os.getpid(), flush=True)
            time.sleep(60)
        end("passed")
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """`play(only, *arguments)` runs steps of the stand-in; returns the exit status and the JSON."""
    worker, out = tmp_path / "worker.py", tmp_path / "out.json"
    worker.write_text(WORKER)
    monkeypatch.setattr(runner, "WORKER", (str(worker),))
    limits = {"sync-debug": 1.0, "engine-chain": 2.0}  # only a step that hangs reaches its limit, on a busy machine too
    for part, steps in plan.PLAN.items():
        slow = tuple(dataclasses.replace(step, timeout_s=limits.get(step.name, 100)) for step in steps)
        monkeypatch.setitem(plan.PLAN, part, slow)

    def run(only, *more):
        status = runner.main(["--out", str(out), "--only", only, "--work-dir", str(tmp_path / "work"), *more])
        return status, json.loads(out.read_text())

    return run


def test_every_failure_is_recorded_and_the_other_steps_run(play, tmp_path):
    """Catches: a crash that ends the run or counts as passed, a reason without the cause, a step without a log; a
    verdict that an earlier run has left in the work directory.
    """
    (tmp_path / "work").mkdir()
    stale = {"step": "real-tree-static", "outcome": "passed", "reason": "", "facts": {}}
    (tmp_path / "work" / "real-tree-static.jsonl").write_text(json.dumps(stale) + "\n")
    failing = ("two-ranks", "real-chain", "real-vanilla", "real-tree-static", "self-draft-bf16")
    status, found = play(",".join(("environment", "kernels", *failing)), "--smoke")
    assert status == 1 and set(found["failed"]) == set(failing) and found["to_come"] == []
    assert (found["passed"], found["skipped"]) == (["environment"], ["kernels"])
    records = {record["name"]: record for record in found["steps"]}
    assert records["two-ranks"]["reason"] == "2 of 8 texts differ"
    assert records["real-chain"]["reason"] == "crashed (signal SIGSEGV); its last line: this is real-chain"
    assert re.match(r"crashed \(signal SIGABRT\).*, after it had passed", records["real-vanilla"]["reason"])
    assert records["real-tree-static"]["reason"] == records["self-draft-bf16"]["reason"] == "ended without a verdict"
    assert records["environment"]["facts"] == {"gpu": "G"} and records["environment"]["reason"] == ""
    for name, record in records.items():
        assert "\n" not in record["reason"] and 0 < record["seconds"] < 20
        assert Path(record["log"]).read_text().startswith(f"this is {name}")
    assert found["environment"] == {"gpu": "G"} and found.keys() >= {"command", "seconds"}


def test_a_step_that_hangs_is_killed_with_its_children(play):
    """Catches: an engine's process that keeps the GPU's memory; a hang of which nobody knows where."""
    start = time.monotonic()
    status, found = play("environment,sync-debug", "--smoke")
    assert status == 1 and time.monotonic() - start < 20 and found["passed"] == ["environment"]
    (hung,) = [record for record in found["steps"] if record["name"] == "sync-debug"]
    _, child, *where = Path(hung["log"]).read_text().splitlines()
    assert re.fullmatch(rf"timed out after \d s; its last line: {child}", hung["reason"])
    assert any("worker.py" in line for line in where), "the log lacks the stacks"
    assert is_gone(child)


def test_steps_are_told_what_the_command_was(play):
    """Catches: an emulated device that steps never see, unchecked numbers that are a success."""
    status, found = play("identity-qwen2.5-vl", "--smoke", "--dry-run", "a.b:c")
    assert status == 0 and found["unchecked"] == ["identity-qwen2.5-vl"] and "mean nothing" in found["note"]
    assert found["steps"][0]["facts"] == {"dry_run": "a.b:c"}


def test_an_interrupted_run_leaves_what_was_found(tmp_path):
    """Catches: a file written at the end; a step that outlives the run; steps to come that are not listed."""
    (tmp_path / "worker.py").write_text(WORKER)
    out, work = tmp_path / "out.json", tmp_path / "work"
    code = f"""
from benchmarks.gpu import __main__ as runner
runner.WORKER = ({str(tmp_path / "worker.py")!r},)
runner.command(runner.main)
"""
    only = "kernel-draw,engine-vanilla,engine-chain,engine-blind"
    arguments = ["--out", str(out), "--work-dir", str(work), "--only", only]
    cut_off([sys.executable, "-c", code, *arguments], work / "engine-chain.log")
    found = json.loads(out.read_text())
    assert [step["name"] for step in found["steps"]] == ["kernel-draw", "engine-vanilla"]
    assert found["to_come"] == ["engine-chain", "engine-blind"]
    assert len(found["rows"]) == 4  # one of a kernel, three of an engine


def test_measured_rows_are_kept_whatever_became_of_their_engine(play):
    """Catches: a time-out that takes measured rows with it; a speedup over another batch size."""
    status, found = play("environment,engine-vanilla,engine-chain", "--half", "2")
    assert status == 1 and found["failed"] == ["engine-chain"]
    assert [(row["engine"], row["batch"], row["outcome"]) for row in found["rows"]] == [
        (engine, *row) for engine in ("vanilla", "chain") for row in ((1, "measured"), (4, "measured"), (8, "refused"))
    ]
    assert [row.get("speedup") for row in found["rows"]] == [1.0, 1.0, None, 2.0, 2.0, None]
    assert found["environment"]["gpu"] == "G" and "--half 2" in found["command"]


@pytest.mark.parametrize(
    ("part", "name"), [(["--smoke"], "kernles"), (["--half", "2"], "kernel-draw"), ([], "real-chain")]
)
def test_unknown_steps_are_refused(capsys, part, name):
    """Catches: a misspelt step, or one of another part, that runs nothing and passes."""
    with pytest.raises(SystemExit):
        runner.main(["--only", name, *part])
    assert f"no step '{name}'" in capsys.readouterr().err
