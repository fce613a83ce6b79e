"""What the GPU runner measures: kernels beside their floors and peers, engines of real shapes with made-up weights."""

import contextlib
import gc
import importlib
import importlib.util
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_plan
from gpu_plan import FAMILY, KERNELS, WITH_PEERS, Engine, Models, Sizes
from gpu_steps import Context, Row, SkippedError, Step, engine
from made_up import write_checkpoint

# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernel_rows(kernel: str, context: Context, with_peers: bool = False) -> None:
    """Write a row for each size and implementation of a kernel, as `bench_kernels.py` measures it.

    Peers from other libraries take longer to compile, so they have a step of their own, in turns with ours.
    """
    import bench_kernels

    module = importlib.import_module(f"kernel_cases.{kernel}")
    given = (gpu_plan.TINY_KERNELS if context.dry_run else KERNELS)[kernel]
    rounds = 1 if context.dry_run else module.ROUNDS
    with chosen_peers(with_peers, context.dry_run) if kernel in WITH_PEERS else contextlib.nullcontext():
        for size in bench_kernels.sizes_of(module.AXES, list(given)):
            keys = {"kernel": kernel, "case": " ".join(f"{name}={value}" for name, value in size.items())}
            case = module.case(**size)
            if context.dry_run:  # the reference would index with masks that nothing has computed
                case.calls.pop("torch", None)
            for row in bench_kernels.rows_of(case, rounds):
                outcome = "refused" if row["median"] is None else "measured"
                context.write({"outcome": outcome, "reason": row["note"]} | keys | row)


def chosen_peers(all_of_them: bool, dry_run: bool) -> contextlib.AbstractContextManager:
    """Measure our attention alone or beside its peers; in a dry run without the one that takes long to compile."""
    from kernel_cases import tree_attention

    ours, *others = tree_attention.PEERS
    kept = [ours, *(name for name in others if all_of_them and not (dry_run and name == "flex_attention"))]
    return mock.patch.object(tree_attention, "PEERS", {name: tree_attention.PEERS[name] for name in kept})


# ---- engines: how they are started -----------------------------------------------------------------------------------


def checkpoints(models: Models, sizes: Sizes, folder: Path) -> dict[str, str]:
    """Write the checkpoints of target and draft without weights; return their directories by role."""
    from vllm_vidspec.tools import pairs

    pixels = (sizes.height * sizes.width,) * 2
    return {
        role: str(
            write_checkpoint(Path(pairs.checkpoint(FAMILY, role)), folder / role, name, fp8=models.fp8, pixels=pixels)
        )
        for role, name in (("target", models.target), ("draft", models.draft))
    }


def llm_kwargs(
    engine: Engine, models: Models, where: dict[str, str], sizes: Sizes, batches: tuple[int, ...]
) -> dict[str, Any]:
    """Return the arguments of `LLM`; memory is given, so that all engines of a run have the same."""
    from vllm_vidspec.tools import pairs

    memory = gpu_plan.memory_of(models, engine, max(batches), sizes)
    ours = {"draft_kv_bytes": memory.pool, "draft_encoder_bytes": memory.embeddings} if engine.is_ours else {}
    in_process = sum(ours.values()) if engine.method != "parallel" else 0  # a parallel drafter has memory of its own
    in_process += (memory.cache + in_process) // 50 if in_process else 0  # pixels take a hundredth of it all
    overrides: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": sizes.max_model_len(engine),
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": memory.cache + in_process,
        "enable_prefix_caching": False,  # each request has KV blocks of its own
        "limit_mm_per_prompt": {"video": 1, "image": 0},
        "skip_mm_profiling": True,
        "disable_log_stats": True,
        "enforce_eager": not engine.graphs,
    }
    if engine.graphs:
        widths = {rows * batch for batch in batches for rows in (1, engine.num_drafts + 1)}
        overrides["compilation_config"] = {"mode": 0, "cudagraph_capture_sizes": sorted(widths)}
    if engine.method == "blind":
        drafts = {"model": where["draft"], "num_speculative_tokens": engine.num_drafts}
        overrides["speculative_config"] = {"method": "draft_model"} | drafts
    if not engine.is_ours:
        return pairs.llm_kwargs(FAMILY, target=where["target"], overrides=overrides)
    spec: dict[str, Any] = {"pruner": "uniform", "prune_ratio": 1 - gpu_plan.KEPT, "on_draft_error": "raise", **ours}
    if engine.method == "parallel":
        spec["parallel"] = {"device": "cuda:0"}
    spec |= {"drafting": "chain" if engine.method == "parallel" else engine.method}
    spec["num_speculative_tokens"] = engine.num_drafts
    return pairs.llm_kwargs(FAMILY, where["draft"], target=where["target"], overrides=overrides, **spec)


def prompt_of(sizes: Sizes) -> dict[str, Any]:
    """Return a prompt with a video of noise, the same for all requests."""
    import harness
    import numpy as np

    shape = (sizes.num_frames, sizes.height, sizes.width, 3)
    frames = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return harness.clip_prompt(FAMILY, frames)


def skip_prefill(runner: Any, most_tokens: int) -> None:
    """Skip the target's forwards of more tokens than decode steps have, and fill its KV cache with noise.

    A decode step over noise takes as long as one over a video, and minutes of prefill are saved.
    """
    import torch

    for cache in runner.kv_caches:
        cache.normal_()
    model, forward = runner.model, runner.model.forward
    hidden_size = runner.model_config.get_hidden_size()

    def decode_only(*args: Any, **kwargs: Any) -> Any:
        num_tokens = kwargs["positions"].shape[-1]
        if num_tokens <= most_tokens:
            return forward(*args, **kwargs)
        return torch.zeros(num_tokens, hidden_size, dtype=runner.model_config.dtype, device=runner.device)

    model.forward = decode_only


# ---- engines: what is measured ---------------------------------------------------------------------------------------


def engine_rows(plan: Engine, context: Context) -> None:
    """Write a row for each batch size: the time of decode steps, and tokens per second at the published acceptance."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        raise SkippedError("vLLM is not installed")
    total = torch.cuda.mem_get_info()[1]
    sizes = gpu_plan.TINY_SIZES if context.dry_run else Sizes()
    name = "dry-run" if context.dry_run else gpu_plan.chosen_models(context.models, sizes, total)
    models = gpu_plan.MODELS.get(name, gpu_plan.DRY_RUN_MODELS)
    length, speedup = gpu_plan.published_of(plan)
    common = asdict(plan) | {
        "engine": plan.name,
        "models": name,
        "video_tokens": sizes.video_tokens,
        "published_acceptance_length": length,
        "published_speedup": speedup,
        "prefill": "skipped, the target's KV is noise",
    }
    batches = []
    for batch in gpu_plan.TINY_BATCHES if context.dry_run else gpu_plan.BATCHES:
        if reason := gpu_plan.does_not_fit(models, plan, batch, sizes, total):
            context.write(common | {"outcome": "refused", "batch": batch, "reason": reason})
        else:
            batches.append(batch)
    if not batches:
        raise SkippedError(f"not even one request fits: {reason}")
    common["bandwidth_gb_per_s"] = None if context.dry_run else _bandwidth()
    where = checkpoints(models, sizes, Path(context.work_dir) / f"models-{name}")
    kwargs = llm_kwargs(plan, models, where, sizes, tuple(batches))
    import vllm  # noqa: F401

    gc.freeze()  # vLLM collects garbage some twenty times a start, over all that is imported
    begun = time.perf_counter()
    with engine(context, kwargs) as running:
        common["start_s"] = round(time.perf_counter() - begun, 1)
        meter = Meter(running, plan, sizes, max(batches))
        for batch in batches:
            row = meter.measure(batch)
            row["tokens_per_s"] = round(1e3 * batch * (length or 1.0) / row["step_ms"], 2)
            context.write(common | {"outcome": "measured", "reason": "", "batch": batch} | row)


def _bandwidth() -> float:
    """Return the copy bandwidth in GB/s, which shows whether the machine has changed between two engines."""
    import bench_kernels
    import torch

    found = bench_kernels.rates(torch.bfloat16, 1024)[0] / 1e3
    torch.cuda.empty_cache()
    return round(found, 1)


class Meter:
    """Times the decode steps of a running engine (of `harness.Engine`), of at most `max_batch` requests at a time."""

    def __init__(self, running: Any, plan: Engine, sizes: Sizes, max_batch: int):
        from decode_steps import Clock, DecodeLoop

        runner = running.runner
        skip_prefill(runner, max_batch * (plan.num_drafts + 1))
        self._loop, self._clock = DecodeLoop(running.llm.llm_engine, plan.is_ours), Clock(runner.speculator)
        self._sizes, self._max_tokens = sizes, sizes.max_model_len(plan)
        self._prompt = prompt_of(sizes)

    def measure(self, batch: int) -> Row:
        """Return the times of so many requests at a time."""
        self._loop.start([self._prompt] * batch, self._max_tokens, gpu_plan.MAX_STEPS)
        for _ in range(self._sizes.skip):
            self._loop.step()
        self._clock.take()
        steps = self._sizes.steps
        step_ms = sorted(1e3 * self._loop.timed(steps)[0] / steps for _ in range(self._sizes.rounds))
        taken = self._clock.take()
        self._loop.stop()
        return {
            "step_ms": round(statistics.median(step_ms), 4),
            "step_ms_low": round(step_ms[0], 4),
            "step_ms_high": round(step_ms[-1], 4),
            **taken,
        }


STEPS: dict[str, Step] = {
    **{f"kernel-{name}": lambda context, name=name: kernel_rows(name, context) for name in KERNELS},
    **{f"peers-{name}": lambda context, name=name: kernel_rows(name, context, with_peers=True) for name in WITH_PEERS},
    **{
        f"engine-{name}": lambda context, plan=plan: engine_rows(plan, context)
        for name, plan in gpu_plan.ENGINES.items()
    },
}
