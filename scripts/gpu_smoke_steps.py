"""The steps of `gpu_smoke.py`, one a process: each returns facts, or says in one line why it failed or cannot run."""

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from made_up import PAIRS, SHAPES, user_kwargs, whole_pair

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("qwen2.5-vl", "llava-onevision")
# In bf16 the draft and the verify forward have other batch shapes, so nearly equal logits may order otherwise; what the
# draft sees is the same, so nearly all drafts must stand.
SELF_DRAFT_BOUND = 0.9
# Where nothing is computed, further tokens show nothing further, and a device may be emulated at a snail's pace.
_MOST_UNCHECKED_TOKENS = 4
_IDENTITY = (("chain", 5), ("tree-static", 25), ("tree-adaptive", 16))
_MOST_WORKERS = 8  # that test kernels: each takes half a GiB of the device
_KERNEL_TESTS = (
    "real_size or equals_the_oracle or equals_the_loop or equals_the_order or equals_the_argmax or are_the_best "
    "or half_precision or ragged or dtypes_ or groups_ or implementations_agree"
)


class StepFailedError(Exception):
    """A step's one line of why it failed."""


class SkippedError(Exception):
    """A step's one line of why it cannot run here."""


def _expect(holds: bool, reason: str) -> None:
    if not holds:
        raise StepFailedError(reason)


# ---- without an engine -----------------------------------------------------------------------------------------------


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Say what machine and which versions these are; there must be a vLLM."""
    facts = machine(args)
    import vllm

    facts["versions"]["vllm"] = vllm.__version__
    return facts


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Say what machine this is, and which versions of all but vLLM."""
    import torch

    from vllm_vidspec.tools.provenance import provenance

    facts: dict[str, Any] = provenance()
    facts["versions"] |= {"python": platform.python_version(), "torch": torch.__version__}
    facts["torch_cuda"] = torch.version.cuda
    if args.device == "cuda":
        _expect(torch.cuda.is_available(), "torch sees no CUDA device")
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_bytes": properties.total_memory,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return facts


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def doctor(args: argparse.Namespace) -> dict[str, Any]:
    """Run the checks of `vidspec doctor`."""
    from vllm_vidspec import doctor
    from vllm_vidspec.plugin import register

    checks = doctor.run_checks()
    if not doctor.entry_points():  # the repository is not installed: `engine` registers by hand, too
        checks = [doctor.check_hook(register) if check.name == "plugin" else check for check in checks]
    for check in checks:
        print(check)
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        raise StepFailedError(f"{failed[0].name}: {failed[0].detail}")
    return {check.name: check.status for check in checks}


def compile_kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Fill Triton's cache with what launches at real shapes need, in all cores at a time, for this device."""
    import torch

    sys.path.append(str(ROOT / "benchmarks"))
    from compile_report import ARCHS

    arch = int("{}{}".format(*torch.cuda.get_device_capability()))
    if arch not in ARCHS:
        raise SkippedError(f"what sm_{arch} can hold is not among the reports; kernels compile when they are launched")
    report, count = ROOT / "benchmarks" / "compile_report.py", os.cpu_count() or 1
    parts = [
        subprocess.Popen(
            [sys.executable, str(report), "--archs", str(arch), "--warm", f"{part}/{count}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for part in range(count)
    ]  # fmt: skip
    said = [part.communicate()[0] for part in parts]
    print(*said)
    for part, text in zip(parts, said, strict=True):
        _expect(part.returncode == 0, f"a part ended with {part.returncode}: {' '.join(text.splitlines()[-2:])[-300:]}")
    return {"arch": arch, "processes": count, "cases": sum(len(text.splitlines()) for text in said)}


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Run the kernels' own tests against their references, at real sizes, on the device, in several processes."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise SkippedError("pytest and hypothesis are not installed")
    # Loops of the CPU are references here.
    selection = f"({_KERNEL_TESTS}) and not mutation and not benchmark and not compile and not numba"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", "-k", selection]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(_MOST_WORKERS, os.cpu_count() or 1))]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout)
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    failures = [line for line in lines if line.startswith("FAILED")]
    if args.skip_numbers and run.returncode == 1:  # every kernel was launched; what came of it is garbage
        return {"pytest": lines[-1]}
    _expect(run.returncode == 0, failures[0] if failures else lines[-1] if lines else "pytest said nothing")
    return {"pytest": lines[-1]}


# ---- engines on the bundled pairs ------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(args: argparse.Namespace, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Start an engine in this process, and let it run in what the command line wants it in.

    The plugin is loaded by hand: the repository may not be installed.
    """
    import gc

    from vllm_vidspec.plugin import register

    register()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**kwargs)
    try:
        with around(args.around):
            yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def counters_of(llm: Any) -> dict[str, int]:
    from vllm_vidspec import metrics

    return metrics.read_metrics(metrics.path_for(llm.llm_engine.vllm_config.instance_id))


def _generate(
    args: argparse.Namespace, llm: Any, prompts: list[Any], max_tokens: int, temperature: float
) -> list[list[int]]:
    from vllm import SamplingParams

    if args.skip_numbers:
        max_tokens = min(max_tokens, _MOST_UNCHECKED_TOKENS)
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def _videos(family: str, count: int) -> list[dict[str, Any]]:
    from vllm_vidspec.shapeworld import world
    from vllm_vidspec.tools import pairs

    return [pairs.video_prompt(family, world.held_out(i).frames) for i in range(count)]


def identity(args: argparse.Namespace, family: str) -> dict[str, Any]:
    """Compare every shape of draft with vanilla vLLM in fp32, token by token, at T = 0 and T = 1."""
    from vllm_vidspec.tools import pairs

    texts: dict[str, list[list[int]]] = {}
    facts: dict[str, Any] = {}
    shapes = _IDENTITY if args.device == "cuda" else _IDENTITY[:1]
    for name, spec in (("vanilla", None), *((shape, {"num_speculative_tokens": k}) for shape, k in shapes)):
        more = {} if spec is None else dict(spec, drafting=name, on_draft_error="raise")
        start = time.perf_counter()
        with engine(args, pairs.llm_kwargs(family, None if spec is None else "draft", **more)) as llm:
            prompts = _videos(family, 4)
            texts[name] = _generate(args, llm, prompts, 32, 0.0) + _generate(args, llm, prompts, 32, 1.0)
            if spec is not None:
                counts = counters_of(llm)
                facts[f"{name}_accepted"] = counts["accepted_tokens"]
                facts[f"{name}_drafted"] = counts["draft_tokens"]
                _expect(counts["draft_tokens"] > 0, f"{name}: nothing was drafted")
        facts[f"{name}_s"] = round(time.perf_counter() - start, 1)
    if not args.skip_numbers:
        for shape, _ in shapes:
            pairs_of = zip(texts["vanilla"], texts[shape], strict=True)
            wrong = [i for i, (ours, theirs) in enumerate(pairs_of) if ours != theirs]
            _expect(
                not wrong, f"{shape}: {len(wrong)} of {len(texts[shape])} texts are not vanilla's, first {wrong[:1]}"
            )
            _expect(facts[f"{shape}_accepted"] > 0, f"{shape}: no draft was accepted")
    return facts


def self_draft_bf16(args: argparse.Namespace) -> dict[str, Any]:
    """Let the target draft for itself over the whole video in bf16: nearly every draft must stand."""
    from vllm_vidspec.tools import pairs

    kwargs = pairs.llm_kwargs(
        "qwen2.5-vl", "target", pruner="none", num_speculative_tokens=5, on_draft_error="raise",
        overrides={"dtype": "bfloat16"},
    )  # fmt: skip
    with engine(args, kwargs) as llm:
        _generate(args, llm, _videos("qwen2.5-vl", 8), 64, 0.0)
        counts = counters_of(llm)
    rate = counts["accepted_tokens"] / max(1, counts["draft_tokens"])
    _expect(counts["draft_tokens"] > 0, "nothing was drafted")
    if not args.skip_numbers:
        _expect(rate >= SELF_DRAFT_BOUND, f"acceptance {rate:.3f}, at least {SELF_DRAFT_BOUND} expected")
    return {"acceptance_rate": round(rate, 4), "bound": SELF_DRAFT_BOUND}


def sync_debug(args: argparse.Namespace) -> dict[str, Any]:
    """Let torch raise at every synchronising call inside drafting and verifying, once they are warm."""
    import torch

    from vllm_vidspec.tools import pairs

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
    for shape, k in _IDENTITY:
        kwargs = pairs.llm_kwargs(
            "qwen2.5-vl", "draft", drafting=shape, num_speculative_tokens=k, on_draft_error="raise"
        )
        with engine(args, kwargs) as llm:
            prompts = _videos("qwen2.5-vl", 2)
            for temperature in (0.0, 1.0):
                _generate(args, llm, prompts, 16, temperature)
            runner = runner_of(llm)
            speculator, verifier = runner.speculator, runner.rejection_sampler
            speculator._propose = watched("draft", speculator._propose)
            verifier._verify = watched("verify", verifier._verify)
            for temperature in (0.0, 1.0):
                _generate(args, llm, prompts, 16, temperature)
        facts[shape] = dict(calls)
    _expect(min(calls.values()) > 0, "nothing was watched")
    return facts


def two_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Let two tensor-parallel ranks draft with a user's compilation and graphs."""
    import torch

    from vllm_vidspec.tools import pairs

    if (count := torch.cuda.device_count()) < 2:
        raise SkippedError(f"{count} device")
    kwargs = pairs.llm_kwargs(  # the Qwen pair's three vision heads are not for two
        "llava-onevision", "draft", on_draft_error="raise",
        overrides={"tensor_parallel_size": 2, "dtype": "bfloat16", "enforce_eager": False},
    )  # fmt: skip
    with engine(args, kwargs) as llm:
        _generate(args, llm, _videos("llava-onevision", 4), 32, 0.0)
        counts = counters_of(llm)
    _expect(counts["draft_tokens"] > 0, "nothing was drafted")
    _expect(args.skip_numbers or counts["accepted_tokens"] > 0, "no draft was accepted")
    return {name: counts[name] for name in ("draft_tokens", "accepted_tokens")}


# ---- real shapes, made-up weights ------------------------------------------------------------------------------------


def real_shapes(args: argparse.Namespace, drafting: str | None) -> dict[str, Any]:
    """Run a 7B target, with or without a 3B draft, as users do: memory at each point, time of a step."""
    import torch

    from vllm_vidspec import assets
    from vllm_vidspec.tools import pairs

    free, total = torch.cuda.mem_get_info()
    family, share = "qwen2.5-vl", 1 if total > 70 * 2**30 else 4
    bundled = {role: assets.checkpoint(family, role) for role in assets.PAIR}
    where = whole_pair(family, bundled, Path(args.work_dir), share)
    spec = {} if drafting is None else {"drafting": drafting, "on_draft_error": "raise"}
    kwargs = user_kwargs(where, pairs.speculative_config(family, where["draft"], **spec) if spec else None)
    layers = [SHAPES[size].num_hidden_layers // share for size in PAIRS[family][:2]]
    facts: dict[str, Any] = {"layers": layers, "free_before_bytes": free, "gpu_memory_bytes": total}
    with engine(args, kwargs) as llm:
        compiled = llm.llm_engine.vllm_config.compilation_config
        facts |= {"mode": compiled.mode.name, "graphs": compiled.cudagraph_mode.name}
        usual = (facts["mode"], facts["graphs"]) == ("VLLM_COMPILE", "FULL_AND_PIECEWISE")
        _expect(usual, f"not what users run: {facts['mode']}, {facts['graphs']}")
        facts["held_after_start_bytes"] = torch.cuda.memory_allocated()
        prompts = _videos(family, 8)
        _generate(args, llm, prompts, 16, 0.0)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        for batch in (1, 8):
            facts[f"batch_{batch}"] = _time_steps(args, llm, prompts[:batch])
        facts["held_after_steps_bytes"] = torch.cuda.memory_allocated()
        facts["peak_of_steps_bytes"] = torch.cuda.max_memory_allocated()
        facts["free_after_bytes"] = torch.cuda.mem_get_info()[0]
        if drafting is not None:
            counts = counters_of(llm)
            facts |= {name: counts[name] for name in ("draft_load_bytes", "draft_pool_bytes")}
            _expect(counts["draft_steps"] > 0, "nothing was drafted")
    if not args.skip_numbers:
        grown = facts["held_after_steps_bytes"] - held
        _expect(grown < 2**24, f"steps hold {grown} bytes more than before")
    return facts


def _time_steps(args: argparse.Namespace, llm: Any, prompts: list[Any]) -> dict[str, float]:
    """Return ms per decode step and tokens per second; the prompts' prefill is timed apart and taken off."""
    import torch

    runner, steps = runner_of(llm), 0
    execute = runner.execute_model

    def counted(*positional: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        return execute(*positional, **named)

    def timed(max_tokens: int) -> tuple[float, int, int]:
        before = steps
        torch.cuda.synchronize()
        start = time.perf_counter()
        num_tokens = sum(map(len, _generate(args, llm, prompts, max_tokens, 0.0)))
        torch.cuda.synchronize()
        return time.perf_counter() - start, num_tokens, steps - before

    runner.execute_model = counted
    try:
        prefill, whole = timed(1), timed(65)
    finally:
        runner.execute_model = execute
    seconds, num_tokens, num_steps = (after - before for before, after in zip(prefill, whole, strict=True))
    return {
        "ms_per_step": round(1000 * seconds / max(1, num_steps), 3),
        "tokens_per_s": round(num_tokens / max(seconds, 1e-9), 1),
        "steps": num_steps,
    }


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "environment": environment,
    "doctor": doctor,
    "compile": compile_kernels,
    "kernels": kernels,
    **{f"identity-{family}": lambda args, family=family: identity(args, family) for family in FAMILIES},
    "sync-debug": sync_debug,
    "self-draft-bf16": self_draft_bf16,
    "two-ranks": two_ranks,
    "real-vanilla": lambda args: real_shapes(args, None),
    "real-chain": lambda args: real_shapes(args, "chain"),
    "real-tree-static": lambda args: real_shapes(args, "tree-static"),
}
# What a device that computes nothing proves as well as one that computes.
_WITHOUT_NUMBERS = ("environment", "doctor", "compile", "sync-debug")


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a step; return its outcome, its one line, and its facts."""
    try:
        facts = STEPS[name](args)
    except SkippedError as why:
        return {"outcome": "skipped", "reason": str(why), "facts": {}}
    except StepFailedError as why:
        return {"outcome": "failed", "reason": str(why), "facts": {}}
    except Exception as error:
        return {"outcome": "failed", "reason": reason_of(error), "facts": {}}
    is_checked = name in _WITHOUT_NUMBERS or not args.skip_numbers
    reason = "" if is_checked else "ran; its numbers were not checked"
    return {"outcome": "passed" if is_checked else "unchecked", "reason": reason, "facts": facts}


def reason_of(error: BaseException) -> str:
    """Return an error in one line, with the place that raised it; the log gets all of it."""
    traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return " ".join(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})".split())[:400]


def around(name: str) -> contextlib.AbstractContextManager:
    """Return a context manager that is called "module:name"; one that does nothing for no name."""
    if not name:
        return contextlib.nullcontext()
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def main() -> int:
    """Run one step and write its verdict; the exit status says no more than that there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(STEPS))
    parser.add_argument("--result", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--skip-numbers", action="store_true")
    parser.add_argument("--around", default="")
    args = parser.parse_args()
    # Who hangs is asked where, before it is killed; the log has the answer.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    verdict = run(args.name, args)
    Path(args.result).write_text(json.dumps(verdict))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads must not keep the process: the verdict is written


if __name__ == "__main__":
    sys.exit(main())
