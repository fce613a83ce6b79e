"""What is released: what wheel and sdist hold and say, an install from a served index, the table of versions."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tools.common import ROOT, load
from tools.test_packaging import ENTRY_POINTS, LOCK, PROJECT
from vllm_vidspec import SUPPORTED_CPU, SUPPORTED_VLLM, __version__, doctor

release = load("scripts/release.py")
PAGE = (ROOT / "docs" / "versions.md").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("what is released are the files that git tracks")
    return release.build(tmp_path_factory.mktemp("dist"))


def test_wheel_holds_the_two_packages_and_says_what_they_are(built):
    """Catches: a test or training file in the wheel, an asset or a marker that is not; metadata nobody can read."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        info = f"vllm_vidspec-{__version__}.dist-info"
        said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        points = wheel.read(f"{info}/entry_points.txt").decode()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    ours = {
        name.removeprefix("kernels/") for name in tracked if re.match(r"vllm_vidspec/|kernels/vidspec_kernels/", name)
    }
    assert {name for name in names if not name.startswith(info)} == ours
    assert {"vllm_vidspec/py.typed", "vidspec_kernels/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert (said["Name"], said["Version"]) == ("vllm-vidspec", __version__)
    assert (said["License-Expression"], said["License-File"]) == ("MIT", "LICENSE")
    assert said["Requires-Python"] == PROJECT["requires-python"] and said["Description-Content-Type"] == "text/markdown"
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    for (group, name), value in ENTRY_POINTS.items():
        assert f"[{group}]" in points and f"{name} = {value}" in points


def test_sdist_builds_what_was_built(built):
    """The wheel is built from the sdist; what it leaves out are the clone's own folders."""
    with tarfile.open(built[1]) as sdist:
        folders = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert {"LICENSE", "pyproject.toml", "kernels", "vllm_vidspec"} <= folders
    assert not {"tests", "training", "benchmarks", "scripts", "docs", "vidspec_tools"} & folders


def test_a_served_index_installs(built, tmp_path):
    """Catches: a wheel whose command does not start away from the clone."""
    with release.served(*built) as index:
        options = ["--no-deps", "--no-cache-dir", "-q", "--target", str(tmp_path), "--index-url", index]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, "vllm-vidspec"], check=True, cwd=tmp_path)
    code = "import vllm_vidspec, vllm_vidspec.cli as cli; print(vllm_vidspec.__file__); cli.app(['--version'])"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.stdout.split() == [str(tmp_path / "vllm_vidspec" / "__init__.py"), "vidspec", __version__], run.stderr


def test_an_empty_environment_does_not_see_the_clone(monkeypatch, tmp_path):
    """Catches: an install that is "shown to work" by the clone on PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    row = release._timed([sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"], "x", tmp_path, 20)
    assert (row["status"], row["last"]) == (0, "None")


@pytest.mark.parametrize(("failing", "status"), [("pip install vllm-vidspec", 1), ("vidspec doctor", 0)])
def test_a_python_that_cannot_install_fails_the_release(built, monkeypatch, failing, status):
    """Catches: CI that is green whatever pip says; one that is red because no engine is installed."""

    def timed(words, name, folder, limit_s):
        return {"step": name, "status": int(name == failing), "seconds": 0.0, "last": "-"}

    monkeypatch.setattr(release, "build", lambda out: built)
    monkeypatch.setattr(release, "_timed", timed)
    monkeypatch.setattr(sys, "argv", ["release.py", "--python", sys.executable])
    with pytest.raises(SystemExit) as ended:
        release.main()
    assert ended.value.code == status


def pin(lock, name):
    return next(line for line in lock if re.match(rf"{name}={{2,3}}\d", line)).split("=")[-1]


def test_the_table_of_versions_is_what_ci_runs():
    """Catches: a version that is supported by words, or tested and not said."""
    ci, makefile = ((ROOT / name).read_text() for name in (".ci/run", "Makefile"))
    assert re.findall(r"^make (test\S*)", ci, re.MULTILINE) == ["test", "test-cuda-host"]
    assert re.findall(r"CUDA_HOST\) --vllm (\S+) -m pytest .*not slow|CUDA_HOST\) --vllm (\S+) .*HOST_TESTS", makefile)
    python = re.search(r"SYSTEM_PYTHON = python=.*?python(3\.\d+)", makefile).group(1)
    plugin = __version__.rpartition(".")[0]
    rows = [f"| {plugin} | {SUPPORTED_CPU} CPU | {pin(LOCK, 'torch')} | {python} | `make test` |"]
    for version in SUPPORTED_VLLM:
        assert f"$(CUDA_HOST) --vllm {version} -m pytest" in makefile
        lock = (ROOT / "requirements" / f"lock-cuda-host-{version}.txt").read_text().splitlines()
        assert pin(lock, "vllm").startswith(f"{version}.")
        rows.append(f"| {plugin} | {version} CUDA | {pin(lock, 'torch')} | {python} | `make test-cuda-host` |")
    assert [line for line in PAGE.splitlines() if line.startswith(f"| {plugin} ")] == rows


def test_pythons_are_those_that_ran_the_demo():
    """Catches: a version of Python that is said to work and has run nothing."""
    first, last = doctor._PYTHONS
    assert PROJECT["requires-python"] == f">={first[0]}.{first[1]}"
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert named == re.findall(r"^\| (3\.\d+) .*with the same tokens \|$", PAGE, re.MULTILINE)
    assert f"Python {named[0]} to {named[-1]}" in PAGE and named[-1] <= f"{last[0]}.{last[1]}"


def test_the_changelog_has_this_version():
    """Keep a Changelog: newest first, the unreleased on top, sections of known names."""
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert heads[0] == ("Unreleased", "") and __version__ in [name for name, _ in heads]
    assert all(date for _, date in heads[1:]) and sorted(heads[1:], key=lambda one: one[1], reverse=True) == heads[1:]
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= known


@pytest.mark.parametrize("linter", ["actionlint", "hadolint"])
def test_workflows_and_container_files_are_linted(linter):
    program = shutil.which(linter) or shutil.which(f"node-{linter}")
    if program is None:
        pytest.skip(f"needs {linter}")
    files = sorted(map(str, ROOT.glob(".github/workflows/*" if linter == "actionlint" else "containers/*.Dockerfile")))
    assert len(files) > 0
    run = subprocess.run([program, *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
