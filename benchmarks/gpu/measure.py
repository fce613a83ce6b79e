"""What the GPU runner measures: kernels beside their floors and peers, engines of real shapes with made-up weights."""

import importlib
import importlib.util
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_plan
from decode_steps import Clock, DecodeLoop, NotAllDraftError
from gpu_plan import FAMILY, KERNELS, Engine, Sizes
from gpu_steps import Context, Row, SkippedError, Step, engine, expect
from made_up import user_kwargs, write_pair


def kernel_rows(kernel: str, context: Context) -> None:
    """Write a row for each size and implementation of a kernel, as `bench_kernels.py` measures it."""
    import bench_kernels

    module = importlib.import_module(f"kernel_cases.{kernel}")
    axes, rounds = (module.TINY, 1) if context.dry_run else (module.AXES, module.ROUNDS)
    for size in bench_kernels.sizes_of(axes, []):
        keys = {"kernel": kernel, "case": " ".join(f"{name}={value}" for name, value in size.items())}
        case = module.case(**size)
        if context.dry_run:  # the reference would index with masks that nothing has computed
            case.calls.pop("torch", None)
        for row in bench_kernels.rows_of(case, rounds):
            outcome = "refused" if row["median"] is None else "measured"
            context.write({"outcome": outcome, "reason": row["note"]} | keys | row)


def llm_kwargs(
    engine: Engine, where: dict[str, str], sizes: Sizes, batches: tuple[int, ...], dry_run: bool
) -> dict[str, Any]:
    from vllm_vidspec.tools import pairs

    widths = {rows * batch for batch in batches for rows in (1, engine.num_drafts + 1)}
    spec: dict[str, Any] | None = None
    if engine.method == "blind":
        spec = {"method": "draft_model", "model": where["draft"], "num_speculative_tokens": engine.num_drafts}
    elif engine.num_drafts:
        knobs: dict[str, Any] = {"prune_ratio": 0.9, "on_draft_error": "raise"}
        if engine.method == "parallel":
            # Of eight requests a tenth of the video and an answer, 57 KiB a token.
            knobs |= {"parallel": {"device": "cuda:0"}, "draft_kv_bytes": 2 * 2**30}
        elif engine.method == "controller":
            knobs["adaptive_tokens"] = True
        else:
            knobs["drafting"] = engine.method
        spec = pairs.speculative_config(FAMILY, where["draft"], num_speculative_tokens=engine.num_drafts, **knobs)
    return user_kwargs(where, spec) | {
        "dtype": "bfloat16",
        "max_model_len": sizes.video_tokens + gpu_plan.MAX_TOKENS + 100,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": sizes.video_tokens + 512,  # a video's embeddings must fit in
        # A parallel drafter has memory of its own.
        "gpu_memory_utilization": 0.75 if engine.method == "parallel" else 0.95,
        # Each request has KV blocks of its own; roles are played over videos that are read once.
        "enable_prefix_caching": engine.method == "controller",
        "limit_mm_per_prompt": {"video": 1, "image": 0},
        "skip_mm_profiling": True,
        "compilation_config": {"mode": 0, "cudagraph_capture_sizes": sorted(widths)},
        **({"kv_cache_memory_bytes": 2**28} if dry_run else {}),
    }


def prompt_of(sizes: Sizes, seed: int = 0) -> dict[str, Any]:
    """Return a prompt with a video of noise."""
    import numpy as np

    from vllm_vidspec.tools import pairs

    shape = (sizes.num_frames, sizes.height, sizes.width, 3)
    video = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    metadata = {  # every frame counts, where `pairs.video_prompt` would sample
        "fps": pairs.FRAME_RATE, "total_num_frames": len(video), "duration": len(video) / pairs.FRAME_RATE,
        "frames_indices": list(range(len(video))), "video_backend": "opencv", "do_sample_frames": False,
    }  # fmt: skip
    text = pairs.chat_prompt(FAMILY, pairs.DEFAULT_QUESTION, ["video"])
    return {"prompt": text, "multi_modal_data": {"video": [(video, metadata)]}}


def engine_rows(plan: Engine, context: Context) -> None:
    """Write a row for each batch size: the time of decode steps, and tokens per second at the published acceptance."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        raise SkippedError("vLLM is not installed")
    total = torch.cuda.mem_get_info()[1]
    sizes, batches = Sizes(), gpu_plan.batches_of(total)
    if plan.method == "controller":  # all its requests must fit: none is refused
        batches = batches[:2]
    name = gpu_plan.chosen_models(context.models, total)
    models = gpu_plan.MODELS[name]
    if context.dry_run:
        sizes, batches, models, name = gpu_plan.TINY_SIZES, gpu_plan.TINY_BATCHES, gpu_plan.DRY_RUN_MODELS, "dry-run"
    published = gpu_plan.published_of(plan)
    common = asdict(plan) | {
        "engine": plan.method,
        "models": name,
        "video_tokens": sizes.video_tokens,
        "published_length": published and published.tau,
        "published_over": published and published.over,
        "published_speedup": published and published.speedup,
    }
    where = write_pair(
        FAMILY, Path(context.work_dir) / f"models-{name}", (models.target, models.draft),
        pixels=(sizes.height * sizes.width,) * 2, weights="fp8" if models.fp8 else None,
    )  # fmt: skip
    begun = time.perf_counter()
    with engine(context, llm_kwargs(plan, where, sizes, batches, context.dry_run)) as running:
        common["start_s"] = round(time.perf_counter() - begun, 1)
        common["graphs"] = running.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
        expect(common["graphs"] != "NONE", "the engine has no CUDA graphs")
        if plan.method == "controller":
            prompts = [prompt_of(sizes, seed) for seed in range(max(batches))]
            for batch in batches:
                row = in_turn(running, prompts[:batch], sizes)
                context.write(common | {"outcome": "measured", "reason": "", "batch": batch} | row)
            return
        clock, prompt = Clock(running.runner.speculator), prompt_of(sizes)
        for batch in batches:
            try:
                row = measured(running, plan.is_ours, sizes, [prompt] * batch, clock)
            except NotAllDraftError as error:  # they do not fit, and no more do
                context.write(common | {"outcome": "refused", "batch": batch, "reason": str(error)})
                return
            client = getattr(running.runner, "drafter_client", None)
            turn_ms = client and float(client.tables.draft_us[batch]) / 1e3
            row |= rate_of(plan, batch, row["step_ms"], turn_ms)
            context.write(common | {"outcome": "measured", "reason": "", "batch": batch} | row)


def rate_of(plan: Engine, batch: int, step_ms: float, draft_ms: float | None) -> Row:
    """Return tokens per second: those of a step, and where they are from, over its time.

    `draft_ms` is a forward of a parallel drafter beside the target, as it tells itself; 0: it has told none.
    """
    tokens, kind = gpu_plan.step_tokens(plan, step_ms, draft_ms)
    rate = None if tokens is None else round(1e3 * batch * tokens / step_ms, 2)
    return {"draft_ms": draft_ms, "step_tokens": tokens, "step_tokens_kind": kind, "tokens_per_s": rate}


def in_turn(running: Any, prompts: list[Any], sizes: Sizes) -> Row:
    """Return the times of a token while the engine is vanilla and has its controller, in turn.

    With made-up weights hardly a draft token is accepted: what the controller costs where drafts are hopeless. The
    first third of the rounds, in which it learns that, is apart.
    """
    from vidspec_tools.bench.methods import CONTROLLER, VANILLA
    from vidspec_tools.bench.roles import Roles

    roles, loop = Roles(running.llm), DecodeLoop(running.llm.llm_engine, is_ours=False)
    token_ms: dict[str, list[float]] = {VANILLA: [], CONTROLLER: []}
    before = running.counters()["draft_steps"]
    for number in range(sizes.turns):
        for role in (VANILLA, CONTROLLER)[:: 1 if number % 2 else -1]:
            roles.play(role)
            loop.start(prompts, sizes.turn_tokens, gpu_plan.MAX_STEPS)
            token_ms[role].append(round(loop.finish(), 4))
    ratios = [its / ours for its, ours in zip(token_ms[VANILLA], token_ms[CONTROLLER], strict=True)]
    return {
        "vanilla_ms": token_ms[VANILLA],
        "controller_ms": token_ms[CONTROLLER],
        "over_vanilla": round(statistics.median(ratios[sizes.turns // 3 :]), 4),
        "draft_steps": running.counters()["draft_steps"] - before,
    }


def measured(running: Any, is_ours: bool, sizes: Sizes, prompts: list[Any], clock: Clock) -> Row:
    """Return the times of a decode step of so many requests; NotAllDraftError: they do not fit."""
    loop = DecodeLoop(running.llm.llm_engine, is_ours)
    loop.start(prompts, gpu_plan.MAX_TOKENS, gpu_plan.MAX_STEPS)
    for _ in range(sizes.skip):
        loop.step()
    clock.take()
    step_ms = sorted(loop.timed(sizes.steps) for _ in range(sizes.rounds))
    taken = clock.take()
    loop.stop()
    median, low, high = (round(ms, 4) for ms in (statistics.median(step_ms), step_ms[0], step_ms[-1]))
    return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, **taken}


STEPS: dict[str, Step] = {
    **{f"kernel-{name}": lambda context, name=name: kernel_rows(name, context) for name in KERNELS},
    **{
        f"engine-{name}": lambda context, plan=plan: engine_rows(plan, context)
        for name, plan in gpu_plan.ENGINES.items()
    },
}
