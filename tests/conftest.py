"""The environment of every test, set before torch, triton or vLLM is imported."""

import os
import sys

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "THP_MEM_ALLOC_ENABLE": "1",  # fewer page faults while an engine fills its KV cache with zeros
    # Products in bf16 round alike on CPUs with AMX and without.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import pytest  # noqa: E402

from vllm_vidspec.devices import has_nvidia_gpu  # noqa: E402


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU; run cheap tests first, or last among workers, so that no long file is left alone at the
    end."""
    has_gpu = has_nvidia_gpu()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

    def rank(item):
        return tuple(item.get_closest_marker(marker) is not None for marker in ("serve", "engine"))

    items.sort(key=rank, reverse="PYTEST_XDIST_WORKER" in os.environ)


@pytest.fixture(autouse=True)
def no_draft_errors(request):
    """A draft error, of the drafter's process too, fails any test without the mark `draft_errors`."""
    harness = sys.modules.get("tests.engine.harness")
    before = harness.draft_errors() if harness else None
    yield
    harness = sys.modules.get("tests.engine.harness")
    if harness and not request.node.get_closest_marker("draft_errors"):
        errors = harness.draft_errors()
        errors.subtract(before or {})
        assert not +errors, f"errors on the draft's side: {dict(+errors)}"
