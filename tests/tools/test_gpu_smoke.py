"""`make gpu-smoke` without a GPU: isolated steps, verdicts never kinder than what happened, one JSON."""

import argparse
import json
import re
import time
from pathlib import Path

import pytest

from tools.common import is_gone, load

smoke, smoke_steps = load("scripts/gpu_smoke.py"), load("scripts/gpu_smoke_steps.py")
KERNEL_TESTS = smoke.ROOT / "tests" / "kernels"

# A stand-in for gpu_smoke_steps.py: each step misbehaves in its own way.
FAKE_STEPS = """
import json, os, signal, subprocess, sys, time
name, result = sys.argv[1], sys.argv[sys.argv.index("--result") + 1]
def verdict(outcome, reason="", **facts):
    with open(result, "w") as file:
        json.dump({"outcome": outcome, "reason": reason, "facts": facts}, file)
print("this is", name, flush=True)
if name == "passes": verdict("passed", number=3)
if name == "fails": verdict("failed", "2 of 8 texts differ")
if name == "skips": verdict("skipped", "pytest is not installed")
if name == "unchecked": verdict("unchecked" if "--skip-numbers" in sys.argv else "passed")
if name == "tells its arguments": verdict("passed", around=sys.argv[sys.argv.index("--around") + 1])
if name == "segfaults": os.kill(os.getpid(), signal.SIGSEGV)
if name == "dies silently": sys.exit(0)
if name == "dies after it passed":
    verdict("passed")
    os.kill(os.getpid(), signal.SIGABRT)
if name == "claims something else": verdict("fine")
if name == "writes half a verdict": open(result, "w").write('{"outcome": "pas')
if name == "hangs":
    import faulthandler
    faulthandler.register(signal.SIGUSR1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def play(tmp_path):
    """`play(*steps, **args)` runs steps of the stand-in and returns their records by name."""
    file = tmp_path / "steps.py"
    file.write_text(FAKE_STEPS)

    def run(*steps, **more):
        usual = {"device": "cuda", "seconds": smoke.SECONDS, "skip_numbers": False, "around": ""}
        args = argparse.Namespace(work_dir=str(tmp_path / "work"), **usual | more)
        chosen = [step if isinstance(step, smoke.Step) else smoke.Step(step, 20) for step in steps]
        return {r["name"]: r for r in smoke.run_all(chosen, args, file, say=lambda line: None)}

    return run


def test_every_way_to_fail_is_told_and_stops_nobody(play):
    """Catches: a crash that ends the run or counts as passed, a reason without the cause, a verdict without a log."""
    records = play(
        "fails", "segfaults", "dies silently", "dies after it passed", "claims something else", "writes half a verdict",
        "skips", "passes",
    )  # fmt: skip
    assert {name: record["outcome"] for name, record in records.items()} == {
        **dict.fromkeys(list(records)[:6], "failed"),
        "skips": "skipped",
        "passes": "passed",
    }
    assert records["fails"]["reason"] == "2 of 8 texts differ"
    assert records["segfaults"]["reason"] == "crashed (signal SIGSEGV); its last line: this is segfaults"
    assert records["dies silently"]["reason"].startswith("crashed (exit status 0)")
    assert "after it had passed" in records["dies after it passed"]["reason"]
    assert records["passes"]["facts"] == {"number": 3} and records["passes"]["reason"] == ""
    for name, record in records.items():
        assert "\n" not in record["reason"] and 0 < record["seconds"] < 20
        assert Path(record["log"]).read_text().startswith(f"this is {name}")


def test_a_step_that_hangs_is_killed_with_its_children(play):
    start = time.monotonic()
    records = play(smoke.Step("hangs", 1.0), "passes")
    assert time.monotonic() - start < 15
    assert records["hangs"]["outcome"] == "failed" and records["hangs"]["reason"].startswith("timed out after 1 s")
    assert records["passes"]["outcome"] == "passed"
    _, child, *where = Path(records["hangs"]["log"]).read_text().splitlines()
    assert records["hangs"]["reason"].endswith(f"its last line: {child}")
    assert any("steps.py" in line for line in where), "it does not say where it hung"
    assert is_gone(child)


def test_without_cuda_a_step_that_needs_it_is_skipped_and_never_passed(play):
    records = play("passes", smoke.Step("unchecked", 20, needs_cuda=False), device="cpu")
    assert records["passes"] == {
        "name": "passes", "outcome": "skipped", "reason": "no CUDA", "facts": {}, "seconds": 0.0, "log": None,
    }  # fmt: skip
    assert records["unchecked"]["outcome"] == "passed"


def test_steps_are_told_what_to_run_in_and_whether_numbers_count(play):
    """Catches: an emulated device that steps never see, unchecked numbers that are a success."""
    assert play("unchecked", skip_numbers=True)["unchecked"]["outcome"] == "unchecked"
    assert play("tells its arguments", around="a.b:c")["tells its arguments"]["facts"] == {"around": "a.b:c"}
    assert smoke_steps.around("contextlib:ExitStack").__class__.__name__ == "ExitStack"
    with smoke_steps.around(""):
        pass


def test_when_the_time_is_up_the_rest_has_failed(play):
    records = play("passes", seconds=0.5)
    assert records["passes"]["outcome"] == "failed" and "were up" in records["passes"]["reason"]


def test_an_old_verdict_is_not_taken_for_a_new_one(play, tmp_path):
    """Catches: a step that crashes in a work directory where it once passed."""
    (tmp_path / "work").mkdir()
    stale = json.dumps({"outcome": "passed", "reason": "", "facts": {}})
    (tmp_path / "work" / "segfaults.json").write_text(stale)
    assert play("segfaults")["segfaults"]["outcome"] == "failed"


@pytest.mark.parametrize("names,status", [("passes,skips", 0), ("passes,fails", 1), ("segfaults", 1)])
def test_the_json_and_the_exit_status(tmp_path, monkeypatch, names, status):
    (tmp_path / "steps.py").write_text(FAKE_STEPS)
    monkeypatch.setattr(smoke, "STEPS_FILE", tmp_path / "steps.py")
    steps = tuple(smoke.Step(name, 20) for name in ("passes", "fails", "skips", "segfaults"))
    monkeypatch.setattr(smoke, "STEPS", steps)
    out = tmp_path / "smoke.json"
    arguments = ["--out", str(out), "--only", names, "--work-dir", str(tmp_path / "work")]
    assert smoke.main(arguments) == status
    written = json.loads(out.read_text())
    ran = [step["name"] for step in written["steps"]]
    told = [name for outcome in smoke.OUTCOMES for name in written[outcome]]
    assert sorted(told) == sorted(ran) == sorted(names.split(","))
    assert written.keys() >= {"command", "git_sha", "date", "seconds", "environment", "device", "numbers_checked"}


def test_unknown_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        smoke.main(["--only", "kernles"])
    assert "no step 'kernles'" in capsys.readouterr().err


def test_every_step_has_a_function_and_all_fit_into_the_time():
    assert {step.name for step in smoke.STEPS} == set(smoke_steps.STEPS)
    assert set(smoke_steps._WITHOUT_NUMBERS) < set(smoke_steps.STEPS)


def test_every_kernel_is_among_those_that_the_device_is_asked_for():
    """Catches: a kernel's test that was renamed, and that no GPU runs any more."""
    parts = smoke_steps._KERNEL_TESTS.split(" or ")
    for source in (smoke.ROOT / "kernels" / "vidspec_kernels").glob("*.py"):
        if re.search(r"^def _\w+_kernel\(", source.read_text(), re.MULTILINE):  # others are parts of kernels
            tests = re.findall(r"^def (test_\w+)", (KERNEL_TESTS / f"test_{source.name}").read_text(), re.MULTILINE)
            assert any(part in test for part in parts for test in tests), f"nothing runs {source.name}"
    everything = "".join(path.read_text() for path in KERNEL_TESTS.glob("test_*.py"))
    assert all(part in everything for part in parts), "a part of the selection that selects nothing"


def test_what_is_watched_for_waits_is_there():
    """Catches: a method of the engine that has moved, before a GPU is there to say so."""
    pytest.importorskip("vllm")
    from vllm_vidspec.engine.speculator import VidSpecSpeculator
    from vllm_vidspec.engine.verify.verifier import CoupledVerifier

    owners = {"speculator": VidSpecSpeculator, "verifier": CoupledVerifier}
    watched = re.findall(r"(\w+)\.(\w+) = watched\(", Path(smoke_steps.__file__).read_text())
    assert {owner for owner, _ in watched} == owners.keys()
    assert all(hasattr(owners[owner], name) for owner, name in watched)


def test_a_steps_own_verdicts(monkeypatch):
    """Catches: an exception that counts as passed, numbers that count although nothing computed them."""

    def raise_(error):
        raise error

    for name, step in {
        "skipped": lambda args: raise_(smoke_steps.SkippedError("no pytest")),
        "failed": lambda args: raise_(smoke_steps.StepFailedError("differs")),
        "broken": lambda args: raise_(RuntimeError("CUDA error:\n  launch failed")),
        "fine": lambda args: {"a": 1},
    }.items():
        monkeypatch.setitem(smoke_steps.STEPS, name, step)
    args = argparse.Namespace(skip_numbers=False)
    assert smoke_steps.run("skipped", args) == {"outcome": "skipped", "reason": "no pytest", "facts": {}}
    assert smoke_steps.run("failed", args)["outcome"] == "failed"
    broken = smoke_steps.run("broken", args)
    assert broken["outcome"] == "failed"
    assert broken["reason"].startswith("RuntimeError: CUDA error: launch failed (test_gpu_smoke.py:")
    assert smoke_steps.run("fine", args) == {"outcome": "passed", "reason": "", "facts": {"a": 1}}
    unchecked = smoke_steps.run("fine", argparse.Namespace(skip_numbers=True))
    assert unchecked["outcome"] == "unchecked"


def test_made_up_checkpoints_are_a_pair_that_is_accepted(tmp_path):
    """Catches: shapes that start-up refuses, before a GPU is there to say so."""
    pytest.importorskip("transformers")
    from vllm_vidspec.doctor import check_pair

    where = {role: smoke_steps.made_up_checkpoint(tmp_path, role, 4) for role in smoke_steps._SHAPES}
    check = check_pair(str(where["target"]), str(where["draft"]))
    assert check.status == "ok", check
    assert not list(tmp_path.rglob("*.safetensors"))
    for role, size in smoke_steps._SHAPES.items():
        text = json.loads((where[role] / "config.json").read_text())["text_config"]
        assert text["hidden_size"] == smoke_steps.SHAPES[size].hidden_size
        head_size = text["hidden_size"] // text["num_attention_heads"]
        assert head_size == 128 == 2 * sum(text["rope_parameters"]["mrope_section"])
