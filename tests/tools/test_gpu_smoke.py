"""`make gpu-smoke` without a GPU: isolated steps, verdicts never kinder than what happened, one JSON."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.common import cut_off, is_gone, load
from vllm_vidspec import SUPPORTED_VLLM

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
        nothing = lambda told: None  # noqa: E731
        return {r["name"]: r for r in smoke.run_all(chosen, args, file, nothing, nothing)}

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


def test_a_step_has_its_own_time_and_no_more_than_as_much_again(monkeypatch):
    """Catches: a step that hangs and takes another's time; together longer than the pages say."""
    now = 100.0
    monkeypatch.setattr(smoke.time, "monotonic", lambda: now)
    given = []
    # The second takes all it has, the third is killed and takes a moment more.
    for limit, seconds in zip(smoke.budgets([10, 20, 30, 40, 5]), (3, 27, 32, 1, 0), strict=True):
        given.append(limit)
        now += seconds
    assert given == [10, 27, 30, 40, 10]


def test_all_time_outs_fit_into_what_the_pages_say():
    """Catches: a step whose time-out the pages' time does not hold."""
    assert smoke.SECONDS == sum(step.timeout_s for step in smoke.STEPS) == 600
    assert "600 s" in (smoke.ROOT / "docs" / "gpu.md").read_text()
    assert "The first ten minutes on a GPU" in (smoke.ROOT / "Makefile").read_text()


def test_whoever_is_cut_off_leaves_what_was_found(tmp_path):
    """Catches: a file that is written at the end, or not as a whole; steps to come that look as if nobody planned
    them."""
    (tmp_path / "steps.py").write_text(FAKE_STEPS)
    out, work = tmp_path / "smoke.json", tmp_path / "work"
    code = f"""
import sys; sys.path.insert(0, {str(smoke.ROOT / "scripts")!r})
import pathlib, gpu_smoke as smoke
smoke.STEPS_FILE = pathlib.Path({str(tmp_path / "steps.py")!r})
smoke.STEPS = tuple(smoke.Step(name, 60) for name in ("passes", "fails", "hangs", "skips"))
smoke.command(smoke.main)
"""
    cut_off([sys.executable, "-c", code, "--out", str(out), "--work-dir", str(work)], work / "hangs.log")
    written = json.loads(out.read_text())
    assert (written["passed"], written["failed"], written["to_come"]) == (["passes"], ["fails"], ["hangs", "skips"])
    assert [step["name"] for step in written["steps"]] == ["passes", "fails"]


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_fp32_products_are_ieee_where_the_triton_of_each_vllm_is_told(tmp_path, version):
    """vLLM's own attention names no precision. Catches: a Triton that no longer reads the variable, and texts that
    differ from vanilla's by TF32 alone; a cached binary that was compiled without it."""
    sources = load("scripts/setup_cuda_host.py").sources_of(version)
    if sources is None:
        pytest.skip("setup-cuda-host has not been run")
    file, python = tmp_path / "product.py", sources.parents[3] / "bin" / "python"
    file.write_text(PRODUCT)
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    plain |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_BACKENDS_IN_TREE": "1"}
    said = [
        subprocess.run([python, file], env=env, capture_output=True, text=True, check=True).stdout.strip()
        for env in (plain, plain | {"TRITON_F32_DEFAULT": smoke.ENVIRONMENT["TRITON_F32_DEFAULT"]})
    ]
    assert said == ["tf32", "ieee"]


# A product that names no precision, compiled for Hopper.
PRODUCT = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(a, b, c):
    where = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + where, tl.dot(tl.load(a + where), tl.load(b + where)))

source = ASTSource(kernel, dict.fromkeys("abc", "*fp32"))
print("tf32" if "tf32" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"] else "ieee")
"""


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
    for source in (smoke.ROOT / "kernels" / "vidspec_kernels").glob("*/*.py"):
        if re.search(r"^def _\w+_kernel\(", source.read_text(), re.MULTILINE):  # others are parts of kernels
            own = "".join(path.read_text() for path in KERNEL_TESTS.glob(f"test_{source.parent.name}*.py"))
            assert any(part in own for part in parts), f"nothing runs {source}"
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


@pytest.mark.parametrize("family", smoke_steps.PAIRS)
def test_whole_pairs_are_accepted(tmp_path, family):
    """Catches: shapes that start-up refuses, before a GPU is there to say so."""
    pytest.importorskip("transformers")
    from vllm_vidspec import assets
    from vllm_vidspec.doctor import check_pair

    bundled = {role: assets.checkpoint(family, role) for role in assets.PAIR}
    where = smoke_steps.whole_pair(family, bundled, tmp_path, share=2)
    check = check_pair(where["target"], where["draft"])
    assert check.status == "ok", check
    assert not list(tmp_path.rglob("*.safetensors"))
    for role, size in zip(assets.PAIR, smoke_steps.PAIRS[family][:2], strict=True):
        config, shape = json.loads(Path(where[role], "config.json").read_text()), smoke_steps.SHAPES[size]
        text = config["text_config"]
        assert (text["hidden_size"], text["num_hidden_layers"]) == (shape.hidden_size, shape.num_hidden_layers // 2)
        head_size = text["hidden_size"] // text["num_attention_heads"]
        assert head_size == 128 == 2 * sum(text["rope_parameters"]["mrope_section"])
        assert config["vision_config"]["depth"] == shape.vision["depth"]
        assert config["vision_config"]["out_hidden_size"] == shape.hidden_size
        processor = json.loads(Path(where[role], "processor_config.json").read_text())
        assert processor["video_processor"]["patch_size"] == config["vision_config"]["patch_size"]


def test_doctor_where_the_repository_is_not_installed(monkeypatch):
    """Catches: the very use that the page tells of, which fails for want of an entry point."""
    pytest.importorskip("vllm")
    from vllm_vidspec import doctor

    ok = doctor.Check("python", "ok", "3.11")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **kwargs: [])
    monkeypatch.setattr(doctor, "_CHECKS", (("python", lambda: [ok]), ("plugin", doctor._plugin)))
    monkeypatch.setattr(doctor, "_bundled_pairs", list)
    assert [check.status for check in doctor.run_checks()] == ["ok", "fail"]
    args = argparse.Namespace(device="cpu", skip_numbers=False)
    assert smoke_steps.doctor(args) == {"python": "ok", "plugin": "ok"}
    monkeypatch.setattr(doctor, "check_hook", lambda register: doctor.Check("plugin", "fail", "not hooked"))
    with pytest.raises(smoke_steps.StepFailedError, match="not hooked"):
        smoke_steps.doctor(args)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    """Catches: a part that fails and nobody hears of, a device of which nothing is known that counts as compiled."""
    args = argparse.Namespace(device="cuda", skip_numbers=False)
    # The report itself turns the interpreter off for whoever imports it.
    monkeypatch.setitem(sys.modules, "compile_report", SimpleNamespace(ARCHS={90: None}))
    monkeypatch.setattr(smoke_steps.os, "cpu_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (1, 2))
    with pytest.raises(smoke_steps.SkippedError, match="sm_12"):
        smoke_steps.compile_kernels(args)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))

    def start(command, **kwargs):
        broken = command[-1] == "1/2"
        line = "draw 152k\nno such instruction" if broken else "accept K5"
        return real([sys.executable, "-c", f"print({line!r}); raise SystemExit({int(broken)})"], **kwargs)

    real = subprocess.Popen
    monkeypatch.setattr(smoke_steps.subprocess, "Popen", start)
    with pytest.raises(smoke_steps.StepFailedError, match="ended with 1: draw 152k no such instruction"):
        smoke_steps.compile_kernels(args)
