"""The checks of the GPU runner: what runs, what agrees with vanilla vLLM or a reference, what memory it holds."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.gpu.measure import measured
from benchmarks.gpu.plan import Sizes
from benchmarks.gpu.steps import ROOT, Context, SkippedError, engine, expect
from benchmarks.made_up import PAIRS, SHAPES, user_kwargs, write_pair
from vllm_vidspec.tools import pairs

# In bf16 draft and verify forwards have other batch shapes, so nearly equal logits may order otherwise. What the draft
# sees is the same, so nearly all drafts must be accepted.
SELF_DRAFT_BOUND = 0.9
_MAX_UNCHECKED_TOKENS = 4  # an emulated device is slow, and more tokens show nothing more
_SHAPES = (("chain", 5), ("tree-static", 25), ("tree-adaptive", 16))
_MAX_TEST_WORKERS = 8  # each takes half a GiB of the device
KERNEL_TESTS = (
    "real_size or equals_the_loop or equals_the_order or equals_the_argmax or are_the_best "
    "or half_precision or ragged or dtypes_ or groups_"
)


def kernels(context: Context) -> dict[str, Any]:
    """Run the kernels' own tests against their references, at real sizes, on the device, in several processes."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    # numba: the CPU loops are references here
    selection = f"({KERNEL_TESTS}) and not mutation and not benchmark and not compile and not numba"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", "-k", selection]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(_MAX_TEST_WORKERS, os.cpu_count() or 1))]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout)
    lines = [line for line in run.stdout.splitlines() if line.strip()] or ["pytest wrote nothing"]
    failures = [line for line in lines if line.startswith("FAILED")]
    # With status 1 every kernel was launched: enough where numbers do not count.
    expect(run.returncode == 0 or (context.dry_run and run.returncode == 1), (failures or lines[-1:])[0])
    return {"pytest": lines[-1]}


def _answers(
    context: Context, kwargs: dict[str, Any], family: str, count: int, max_tokens: int, temperatures: tuple = (0.0,)
) -> tuple[list[list[int]], dict[str, int]]:
    """Return an engine's answers about some videos, and how many tokens it drafted and accepted.

    It must draft some; of a vanilla one nothing is counted.
    """
    most = min(max_tokens, _MAX_UNCHECKED_TOKENS) if context.dry_run else max_tokens
    prompts, counts = harness.videos(family, range(count)), {}
    with engine(context, kwargs) as running:
        answers = [
            answer
            for temperature in temperatures
            for answer in running.answer(prompts, max_tokens=most, temperature=temperature, ignore_eos=True)
        ]
        if "speculative_config" in kwargs:
            counts = {name: running.counters()[name] for name in ("draft_tokens", "accepted_tokens")}
            expect(counts["draft_tokens"] > 0, "nothing was drafted")
    return answers, counts


def identity(context: Context, family: str) -> dict[str, Any]:
    """Compare every draft shape with vanilla vLLM in fp32, token by token, at T = 0 and T = 1."""
    vanilla, _ = _answers(context, pairs.llm_kwargs(family), family, 4, 32, (0.0, 1.0))
    facts: dict[str, Any] = {}
    for shape, k in _SHAPES:
        spec: dict[str, Any] = {"drafting": shape, "num_speculative_tokens": k, "on_draft_error": "raise"}
        ours, counts = _answers(context, pairs.llm_kwargs(family, "draft", **spec), family, 4, 32, (0.0, 1.0))
        facts.update({f"{shape}_{name}": count for name, count in counts.items()})
        if not context.dry_run:
            wrong = [i for i, (a, b) in enumerate(zip(vanilla, ours, strict=True)) if a != b]
            expect(not wrong, f"{shape}: {len(wrong)} of {len(ours)} texts differ from vanilla's, first {wrong[:1]}")
            expect(counts["accepted_tokens"] > 0, f"{shape}: no draft was accepted")
    return facts


def self_draft_bf16(context: Context) -> dict[str, Any]:
    """Let the target draft for itself over the whole video in bf16: nearly every draft must be accepted."""
    kwargs = pairs.llm_kwargs(
        "qwen2.5-vl", "target", pruner="none", num_speculative_tokens=5, on_draft_error="raise",
        overrides={"dtype": "bfloat16"},
    )  # fmt: skip
    _, counts = _answers(context, kwargs, "qwen2.5-vl", 8, 64)
    rate = counts["accepted_tokens"] / counts["draft_tokens"]
    low = f"acceptance {rate:.3f}, at least {SELF_DRAFT_BOUND} expected"
    expect(context.dry_run or rate >= SELF_DRAFT_BOUND, low)
    return {"acceptance_rate": round(rate, 4), "bound": SELF_DRAFT_BOUND}


def two_ranks(context: Context) -> dict[str, Any]:
    """Let two tensor-parallel ranks draft with a user's compilation and graphs."""
    import torch

    if (count := torch.cuda.device_count()) < 2:
        raise SkippedError(f"{count} device")
    kwargs = pairs.llm_kwargs(  # the Qwen pair's three vision heads cannot be shared by two ranks
        "llava-onevision", "draft", on_draft_error="raise",
        overrides={"tensor_parallel_size": 2, "dtype": "bfloat16", "enforce_eager": False},
    )  # fmt: skip
    _, counts = _answers(context, kwargs, "llava-onevision", 4, 32)
    expect(context.dry_run or counts["accepted_tokens"] > 0, "no draft was accepted")
    return counts


def sync_debug(context: Context) -> dict[str, Any]:
    """Let torch raise at every host-device synchronisation inside drafting and verifying, once they are warm."""
    import torch

    calls = {"draft": 0, "verify": 0}

    def watched(name: str, function: Callable) -> Callable:
        def run(*positional: Any, **named: Any) -> Any:
            calls[name] += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*positional, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    facts: dict[str, Any] = {}
    max_tokens = _MAX_UNCHECKED_TOKENS if context.dry_run else 16
    for shape, k in _SHAPES:
        knobs: dict[str, Any] = {"drafting": shape, "num_speculative_tokens": k, "on_draft_error": "raise"}
        with engine(context, pairs.llm_kwargs("qwen2.5-vl", "draft", **knobs)) as running:
            prompts = harness.videos("qwen2.5-vl", range(2))
            backend, verifier = running.runner.speculator.backend, running.runner.rejection_sampler
            for is_warm in (False, True):
                if is_warm:
                    backend._draft = watched("draft", backend._draft)
                    verifier._verify = watched("verify", verifier._verify)
                for temperature in (0.0, 1.0):
                    running.answer(prompts, max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        facts[shape] = dict(calls)
    expect(min(calls.values()) > 0, "nothing was watched")
    return facts


def real_shapes(context: Context, drafting: str) -> dict[str, Any]:
    """Run a 7B target with vLLM's defaults, a 3B draft in a shape ("": vanilla): memory at each point, step times."""
    import torch

    free, total = torch.cuda.mem_get_info()
    family, share = "qwen2.5-vl", 1 if total > 70 * 2**30 else 4
    where = write_pair(family, Path(context.work_dir), share=share)
    spec = {"drafting": drafting, "on_draft_error": "raise"}
    kwargs = user_kwargs(where, pairs.speculative_config(family, where["draft"], **spec) if drafting else None)
    layers = [SHAPES[name].layers // share for name in PAIRS[family][:2]]
    facts: dict[str, Any] = {"layers": layers, "free_before_bytes": free, "gpu_memory_bytes": total}
    with engine(context, kwargs) as running:
        compiled = running.llm.llm_engine.vllm_config.compilation_config
        facts |= {"mode": compiled.mode.name, "graphs": compiled.cudagraph_mode.name}
        is_default = (facts["mode"], facts["graphs"]) == ("VLLM_COMPILE", "FULL_AND_PIECEWISE")
        expect(is_default, f"not vLLM's defaults: {facts['mode']}, {facts['graphs']}")
        facts["held_after_start_bytes"] = torch.cuda.memory_allocated()
        prompts = harness.videos(family, range(8))
        running.answer(prompts, max_tokens=_MAX_UNCHECKED_TOKENS if context.dry_run else 16, ignore_eos=True)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        loop = harness.DecodeLoop(running.llm.llm_engine, bool(drafting))
        sizes = Sizes(skip=0, rounds=1, steps=2 if context.dry_run else 32)
        for batch in (1, 8):
            facts[f"batch_{batch}"] = measured(loop, sizes, prompts[:batch])
        facts["held_after_steps_bytes"] = torch.cuda.memory_allocated()
        facts["peak_of_steps_bytes"] = torch.cuda.max_memory_allocated()
        facts["free_after_bytes"] = torch.cuda.mem_get_info()[0]
        if drafting:
            counts = running.counters()
            facts |= {name: counts[name] for name in ("draft_load_bytes", "draft_pool_bytes")}
            expect(counts["draft_steps"] > 0, "nothing was drafted")
    grown = facts["held_after_steps_bytes"] - held
    expect(context.dry_run or grown < 2**24, f"steps hold {grown} bytes more than before")
    return facts
