"""The plan and the steps of the GPU runner, without a GPU: what is measured, what fits, what each step does."""

import importlib
import inspect
import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import harness, made_up
from benchmarks.gpu import checks, measure, plan, steps
from tools.common import ROOT, load
from vllm_vidspec import SUPPORTED_VLLM

KERNEL_TESTS = ROOT / "tests" / "kernels"
GIB = 2**30

# ---- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_holds_every_method_and_functions_that_are_there():
    """Catches: a step whose function was renamed or takes other arguments; engines without a vanilla one."""
    for step in plan.STEPS.values():
        module, _, name = step.call.partition(":")
        function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        inspect.signature(function).bind("context", *([] if step.argument is None else [step.argument]))
    assert set(steps.WITHOUT_NUMBERS) < plan.STEPS.keys()
    methods = {engine.method for engine in plan.ENGINES.values()}
    assert methods == {"vanilla", "chain", "tree-static", "policy", "parallel", "blind"}


def test_all_time_outs_fit_into_what_the_pages_say():
    """Catches: a step whose time-out the pages' time does not hold."""
    page, makefile = (ROOT / "docs" / "gpu.md").read_text(), (ROOT / "Makefile").read_text()
    assert plan.SECONDS["smoke"] == 26 * 60 and "26 minutes in all" in page and "a GPU, 26 at most" in makefile
    assert all(f"| {half} | {plan.SECONDS[part]:,} s |" in page for half, part in plan.HALVES.items())
    assert sum(plan.SECONDS[part] for part in plan.HALVES.values()) <= 25 * 60
    assert plan.SECONDS["decode"] <= 14 * 60 and "in 14 minutes" in page
    assert all("25 minutes at most" in text for text in (page, makefile))


def test_recorded_rates_are_a_steps_tokens_over_its_time():
    """Rows of docs/results/gpu-h100.json. Catches: an acceptance of one's own choice, of another method or pair; a
    length that is counted over several steps (ParallelVLM's M), divided by the time of one.
    """
    rows = json.loads((ROOT / "docs" / "results" / "gpu-h100.json").read_text())["engines"]
    rows = [row for row in rows if row.get("tokens_per_s")]
    assert {row["engine"] for row in rows} == set(plan.ENGINES) - {"policy"}
    vanilla = {row["batch"]: row["tokens_per_s"] for row in rows if row["engine"] == "vanilla"}
    for row in rows:
        rate = measure.rate_of(plan.ENGINES[row["engine"]], row["batch"], row["step_ms"], row.get("draft_ms"))
        assert {name: row.get(name) for name in rate} == rate, row
        found = measure.published_of(plan.ENGINES[row["engine"]])
        told = [row.get(f"published_{name}") for name in ("length", "over", "speedup")]
        assert told == [found and found.tau, found and found.over, found and found.speedup], row
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] * row["step_tokens"] / row["step_ms"], abs=0.01)
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / vanilla[row["batch"]], abs=1e-3)
    assert measure.rate_of(plan.ENGINES["parallel"], 1, 34.0, 0.0)["tokens_per_s"] is None


def test_the_models_are_those_that_a_card_has_room_for():
    """Catches: bf16 weights on a card of 80 GB, fp8 ones where there is room for more; another model than asked for."""
    assert plan.Sizes().video_tokens == 25_088, "128 frames, as in the papers"
    assert [plan.chosen_models("auto", total) for total in (79 * GIB, 139 * GIB)] == ["32b-fp8", "32b-bf16"]
    assert plan.chosen_models("72b-fp8", 79 * GIB) == "72b-fp8"


# ---- the steps -------------------------------------------------------------------------------------------------------


def verdict(name, function=None, **context):
    """Return the last line that a step writes, whose function this is."""
    lines = []
    with mock.patch.object(steps, "call", (function and (lambda step, given: function(given))) or steps.call):
        steps.run(plan.STEPS[name], steps.Context(write=lines.append, **context))
    return lines[-1]


def test_a_steps_own_verdicts(monkeypatch):
    """Catches: an exception that counts as passed, numbers of nothing that count, a traceback for a word."""

    def launches(context):
        raise RuntimeError("CUDA error:\n  launch failed")

    fine = lambda context: {"a": 1}  # noqa: E731
    assert verdict("kernels", fine)["reason"] == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = verdict("kernels", mock.Mock(side_effect=steps.SkippedError("no pytest")))
    assert (found["outcome"], found["reason"], found["facts"]) == ("skipped", "no pytest", {})
    assert verdict("kernels", mock.Mock(side_effect=steps.StepFailedError("differs")))["outcome"] == "failed"
    broken = verdict("kernels", launches)
    assert broken["outcome"] == "failed"
    assert broken["reason"].startswith("RuntimeError: CUDA error: launch failed (test_gpu_steps.py:")
    assert verdict("kernels", fine)["outcome"] == "passed" and verdict("kernels", fine)["facts"] == {"a": 1}
    assert verdict("kernels", fine, dry_run="contextlib:nullcontext")["outcome"] == "unchecked"
    assert verdict("sync-debug", fine, dry_run="contextlib:nullcontext")["outcome"] == "passed"
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: None)
    found = verdict("engine-chain")
    assert (found["outcome"], found["reason"]) == ("skipped", "vLLM is not installed")


def test_every_kernel_is_among_those_that_the_device_is_asked_for():
    """Catches: a kernel's test that was renamed, and that no GPU runs any more."""
    parts = checks.KERNEL_TESTS.split(" or ")
    for source in (ROOT / "kernels" / "vidspec_kernels").glob("*/*.py"):
        if re.search(r"^def _\w+_kernel\(", source.read_text(), re.MULTILINE):  # others are parts of kernels
            own = "".join(path.read_text() for path in KERNEL_TESTS.glob(f"test_{source.parent.name}*.py"))
            assert any(part in own for part in parts), f"nothing runs {source}"
    everything = "".join(path.read_text() for path in KERNEL_TESTS.glob("test_*.py"))
    assert all(part in everything for part in parts), "a part of the selection that selects nothing"


def test_what_is_watched_for_synchronisation_is_there():
    """Catches: a method of the engine that has moved, before a GPU shows it."""
    pytest.importorskip("vllm")
    from vllm_vidspec.engine.draft.local_backend import LocalBackend
    from vllm_vidspec.engine.verify.verifier import CoupledVerifier

    owners = {"backend": LocalBackend, "verifier": CoupledVerifier}
    watched = re.findall(r"(\w+)\.(\w+) = watched\(", Path(checks.__file__).read_text())
    assert {owner for owner, _ in watched} == owners.keys()
    assert all(hasattr(owners[owner], name) for owner, name in watched)


def test_engines_are_told_what_the_plan_says():
    """Catches: an engine with another's drafts, a graph size too few, an eager one, one without room for a video."""
    where = {"target": "T", "draft": "D"}
    kwargs = {n: measure.llm_kwargs(e, where, plan.Sizes(), (1, 4), False) for n, e in plan.ENGINES.items()}
    assert "speculative_config" not in kwargs["vanilla"]
    drafts = {"method": "draft_model", "model": "D", "num_speculative_tokens": 5}
    assert kwargs["blind"]["speculative_config"] == drafts
    ours = kwargs["tree-static"]["speculative_config"]
    assert ours["method"] == "vidspec" and ours["draft_shape"] == "tree-static" and ours["num_speculative_tokens"] == 25
    assert kwargs["parallel"]["speculative_config"]["parallel"] == {"device": "cuda:0"}
    assert kwargs["chain"]["compilation_config"]["cudagraph_capture_sizes"] == [1, 4, 6, 24]
    for one in kwargs.values():
        assert one["max_num_seqs"] == 4 and one["load_format"] == "dummy"
        assert not one.keys() & {"enforce_eager", "kv_cache_memory_bytes"}
        # Without a profile of its own an encoder's output has to fit in a step.
        assert one["skip_mm_profiling"] and one["max_num_batched_tokens"] > plan.Sizes().video_tokens
    assert [name for name, one in kwargs.items() if one["enable_prefix_caching"]] == ["policy"]
    assert kwargs["policy"]["speculative_config"]["adaptive_tokens"]


def test_a_clock_tells_what_a_step_drafts_for():
    """Catches: a speculator that is called twice or loses what it returns; figures that are returned twice."""
    speculator = SimpleNamespace(propose=lambda *args, **kwargs: (args, kwargs))
    runner = SimpleNamespace(speculator=speculator)
    engine = mock.Mock(**{"model_executor.driver_worker.worker.model_runner": runner})
    clock = harness.DecodeLoop(engine, is_ours=False)
    assert [speculator.propose(i, n=2) for i in range(3)] == [((i,), {"n": 2}) for i in range(3)]
    assert all(ms >= 0 for ms in clock.take().values())
    assert clock.take() == {"propose_ms": None, "propose_host_ms": None}


@pytest.mark.parametrize("name", [*made_up.PAIRS, *plan.MODELS])
def test_made_up_pairs_are_accepted(tmp_path, name):
    """Catches: shapes that start-up refuses, weights in a directory that should have none."""
    pytest.importorskip("transformers")
    from vllm_vidspec.doctor import check_pair

    target, weights = plan.MODELS.get(name, (None, None))
    names, share = ((target, plan.DRAFT), 1) if target else (made_up.PAIRS[name][:2], 2)
    where = made_up.write_pair(plan.FAMILY if target else name, tmp_path, names, weights=weights, share=share)
    assert check_pair(where["target"], where["draft"]).status == "ok"
    assert not list(tmp_path.rglob("*.safetensors"))
    for path, model in zip(where.values(), names, strict=True):
        config, shape = json.loads(Path(path, "config.json").read_text()), made_up.SHAPES[model]
        text, vision = config["text_config"], config["vision_config"]
        assert (text["hidden_size"], text["num_hidden_layers"]) == (shape.hidden, shape.layers // share)
        assert shape.hidden // text["num_attention_heads"] == 128 == 2 * sum(text["rope_parameters"]["mrope_section"])
        assert text["max_position_embeddings"] > plan.Sizes().video_tokens + 2 * plan.MAX_TOKENS
        assert ("quantization_config" in config) == (weights is not None)
        assert (vision["depth"], vision["out_hidden_size"]) == (made_up.VISION[model]["depth"], shape.hidden)
        processor = json.loads(Path(path, "processor_config.json").read_text())
        assert processor["video_processor"]["patch_size"] == vision["patch_size"]


# A product that names no precision, compiled for Hopper.
PRODUCT = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(a, b, c):
    where = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + where, tl.dot(tl.load(a + where), tl.load(b + where)))

source = ASTSource(kernel, dict.fromkeys("abc", "*fp32"))
print("tf32" if "tf32" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"] else "ieee")
"""


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_fp32_products_are_ieee_where_the_triton_of_each_vllm_is_told(tmp_path, version):
    """vLLM's own attention names no precision: texts would differ by TF32 alone, also of a cached binary."""
    sources = load("scripts/setup_cuda_host.py").sources_of(version)
    if sources is None:
        pytest.skip("setup-cuda-host has not been run")
    file, python = tmp_path / "product.py", sources.parents[3] / "bin" / "python"
    file.write_text(PRODUCT)
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    plain |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_BACKENDS_IN_TREE": "1"}
    found = [
        subprocess.run([python, file], env=env, capture_output=True, text=True, check=True).stdout.strip()
        for env in (plain, plain | {"TRITON_F32_DEFAULT": steps.ENVIRONMENT["TRITON_F32_DEFAULT"]})
    ]
    assert found == ["tf32", "ieee"]
