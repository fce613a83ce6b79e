"""vidspec beside vLLM's other features: every row of docs/coexistence.md that runs in this process, run again."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from tests.engine import coexistence
from tests.engine.harness import in_place_of
from vllm_vidspec.engine import preflight
from vllm_vidspec.engine.draft import prefill
from vllm_vidspec.engine.report.counters import Counters

pytestmark = pytest.mark.engine


SLOW = "EVS: --video-pruning-rate 0.5"  # three engines; a bug planted in it is seen by a test that is not slow
NEEDS_AVX512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU cache in float8 needs AVX-512"
)


def _marks(row):
    is_fp8 = row.feature == "FP8 KV cache" and row.expected == coexistence.WORKS
    return [pytest.mark.slow] * (row.name == SLOW) + [NEEDS_AVX512] * is_fp8


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=_marks(row)) for row in coexistence.ROWS if row.kind == "engine"],
    ids=lambda row: row.name,
)
def test_row(row, tmp_path):
    """Catches: what the page says and is no longer so."""
    seen = row.run(tmp_path)
    assert seen.verdict == row.expected, seen
    assert re.search(row.says, seen.detail), seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ray: --distributed-executor-backend ray, two ranks"])
def test_row_of_servers(name):
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    (row,) = [row for row in coexistence.ROWS if row.name == name]
    with tempfile.TemporaryDirectory(prefix="vs") as folder:  # short: Ray's sockets lie in it
        test_row(row, Path(folder))


def drop_refusals(monkeypatch):
    monkeypatch.setattr(preflight, "refusals", lambda *_: iter(()))


def shift_what_the_target_keeps(monkeypatch):
    """Every token of a pruned video but the first is taken for the one before it."""
    in_place_of(monkeypatch, prefill, "kept_places")(lambda original, *args: (original(*args) - 1).clamp(min=0))


def lose_a_placeholder(monkeypatch):
    """One token fewer than the prompt has places."""
    in_place_of(monkeypatch, prefill, "kept_places")(lambda original, *args: original(*args)[:-1])


def forget_the_adapter(monkeypatch):
    from vllm_vidspec.engine.runner import VidSpecModelRunner

    @in_place_of(monkeypatch, VidSpecModelRunner, "add_requests")
    def without(original, self, scheduler_output):
        for request in scheduler_output.scheduled_new_reqs:
            request.lora_request = None
        original(self, scheduler_output)


def skip_silently(monkeypatch):
    monkeypatch.setattr(Counters, "skip", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ('LoRA: --enable-lora, "model": "self"', drop_refusals),
        pytest.param("EVS: --video-pruning-rate 0.5", shift_what_the_target_keeps, marks=pytest.mark.slow),
        ("EVS: --video-pruning-rate 0.5", lose_a_placeholder),
        pytest.param("LoRA: --enable-lora, an unadapted draft", forget_the_adapter, marks=pytest.mark.slow),
        pytest.param("KV connector: the decode side has no pixels", skip_silently, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_bug_is_seen(name, plant, tmp_path, monkeypatch):
    """The rows above would not pass whatever the product does."""
    (row,) = [row for row in coexistence.ROWS if row.name == name]
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_row(row, tmp_path)
