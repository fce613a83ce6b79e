"""scripts/setup_env.py: what names an environment, what makes it complete, what it refuses."""

import json
import os
import threading

import pytest

from tools.common import ROOT, Installer, load


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
