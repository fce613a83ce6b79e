"""vidspec beside vLLM's other features: every row of docs/coexistence.md that runs in this process, run again."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from tests.engine import coexistence
from tests.engine import coexistence_cases as cases
from tests.engine.harness import in_place_of
from vllm_vidspec.engine.draft import prefill

pytestmark = pytest.mark.engine


# Rows that start two engines or three for what less costly tests show, too: eight bits of weights are in the row of a
# cache with scales, AWQ has four; the matrix has prefix hits, and other tests embeddings and a limit of one video.
SLOW = (
    *("INT8 weights", "INT4 weights", "GPTQ", "FP8 KV cache: --kv-cache-dtype fp8, adaptive"),
    *("Prefix caching", "KV connector: the decode side has no pixels", "Prompt embeddings", "Media limits"),
)
NEEDS_AVX512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU kernels of eight bits and four need AVX-512"
)


def _marks(row):
    runs = row.expected == coexistence.WORKS
    is_slow, needs = row.name.startswith(SLOW), row.feature in ("FP8 KV cache", "INT4 weights", "AWQ", "GPTQ")
    return [pytest.mark.slow] * (runs and is_slow) + [NEEDS_AVX512] * (runs and needs)


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


@pytest.mark.slow
def test_a_planted_bug_is_seen(tmp_path, monkeypatch):
    """Every token of a pruned video but the first is taken for the one before it: the draft sees other tokens."""
    in_place_of(monkeypatch, prefill, "kept_places")(lambda original, *args: (original(*args) - 1).clamp(min=0))
    with pytest.raises((AssertionError, ValueError)):
        cases.evs(tmp_path)
