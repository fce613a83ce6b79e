"""What the GPU runner measures: kernels beside their floors and peers, engines of real shapes with made-up weights."""

import importlib.util
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import plan
from benchmarks.gpu.plan import FAMILY, Engine, Sizes
from benchmarks.gpu.steps import Context, Row, SkippedError, engine, expect

if TYPE_CHECKING:
    from benchmarks.methods import Figure


def kernel_rows(context: Context, kernel: str) -> None:
    """Write a row for each size and implementation of a kernel, as `python -m benchmarks.kernels` measures it."""
    from benchmarks.kernels import timing

    dry: dict[str, Any] = {"rounds": 1, "tiny": True} if context.dry_run else {}
    for row in timing.rows(kernel, **dry):
        context.write({"outcome": "refused" if row["median"] is None else "measured", "reason": row["note"]} | row)


def llm_kwargs(
    planned: Engine, where: dict[str, str], sizes: Sizes, batches: tuple[int, ...], dry_run: bool
) -> dict[str, Any]:
    """Return the arguments of `LLM` for an engine: its requests fit, each with KV blocks of its own, in CUDA graphs."""
    from benchmarks.made_up import user_kwargs
    from vllm_vidspec.tools import pairs

    widths = {rows * batch for batch in batches for rows in (1, planned.num_drafts + 1)}
    spec: dict[str, Any] | None = None
    if planned.method == "blind":
        spec = {"method": "draft_model", "model": where["draft"], "num_speculative_tokens": planned.num_drafts}
    elif planned.num_drafts:
        knobs: dict[str, Any] = {"prune_ratio": 0.9, "on_draft_error": "raise"}
        if planned.method == "parallel":
            # Of eight requests a tenth of the video and an answer, 57 KiB a token.
            knobs |= {"parallel": {"device": "cuda:0"}, "draft_kv_bytes": 2 * 2**30}
        elif planned.method == "policy":
            knobs["adaptive_tokens"] = True
        else:
            knobs["drafting"] = planned.method
        spec = pairs.speculative_config(FAMILY, where["draft"], num_speculative_tokens=planned.num_drafts, **knobs)
    return user_kwargs(where, spec) | {
        "dtype": "bfloat16",
        "max_model_len": sizes.video_tokens + plan.MAX_TOKENS + 100,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": sizes.video_tokens + 512,  # a video's embeddings must fit in
        # A parallel drafter has memory of its own.
        "gpu_memory_utilization": 0.75 if planned.method == "parallel" else 0.95,
        # Each request has KV blocks of its own; roles are played over videos that are read once.
        "enable_prefix_caching": planned.method == "policy",
        "limit_mm_per_prompt": {"video": 1, "image": 0},
        "skip_mm_profiling": True,
        "compilation_config": {"mode": 0, "cudagraph_capture_sizes": sorted(widths)},
        **({"kv_cache_memory_bytes": 2**28} if dry_run else {}),
    }


def prompt_of(sizes: Sizes, seed: int = 0) -> dict[str, Any]:
    """Return a prompt with a video of noise, of which every frame counts."""
    import numpy as np

    from vllm_vidspec.tools import pairs

    shape = (sizes.num_frames, sizes.height, sizes.width, 3)
    video = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    prompt = pairs.media_prompt(FAMILY, pairs.DEFAULT_QUESTION, videos=[video], num_frames=len(video))
    prompt["multi_modal_data"]["video"][0][1]["do_sample_frames"] = False
    return prompt


def engine_rows(context: Context, method: str) -> None:
    """Write a row for each batch size: the time of decode steps, and tokens per second at the published acceptance."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        raise SkippedError("vLLM is not installed")
    from benchmarks import harness
    from benchmarks.made_up import write_pair

    planned, total = plan.ENGINES[method], torch.cuda.mem_get_info()[1]
    sizes, batches, models = Sizes(), plan.batches_of(total), plan.chosen_models(context.models, total)
    if method == "policy":  # all its requests must fit: none is refused
        batches = batches[:2]
    if context.dry_run:  # the bundled pair
        sizes, batches, models = plan.TINY_SIZES, plan.TINY_BATCHES, "dry-run"
    target, weights = plan.MODELS.get(models, (None, "fp8"))
    where = write_pair(
        FAMILY, Path(context.work_dir) / f"models-{models}", (target, target and plan.DRAFT),
        pixels=(sizes.height * sizes.width,) * 2, weights=weights,
    )  # fmt: skip
    published = published_of(planned)
    common = asdict(planned) | {
        "engine": method,
        "models": models,
        "video_tokens": sizes.video_tokens,
        "published_length": published and published.tau,
        "published_over": published and published.over,
        "published_speedup": published and published.speedup,
    }
    begun = time.perf_counter()
    with engine(context, llm_kwargs(planned, where, sizes, batches, bool(context.dry_run))) as running:
        common["start_s"] = round(time.perf_counter() - begun, 1)
        common["graphs"] = running.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
        expect(common["graphs"] != "NONE", "the engine has no CUDA graphs")
        prompts = [prompt_of(sizes, seed) for seed in range(max(batches) if method == "policy" else 1)]
        loop = harness.DecodeLoop(running.llm.llm_engine, planned.is_ours)
        for batch in batches:
            common |= {"outcome": "measured", "reason": "", "batch": batch}
            if method == "policy":
                context.write(common | in_turn(running, loop, prompts[:batch], sizes))
                continue
            try:
                row = measured(loop, sizes, prompts * batch)
            except harness.NotAllDraftError as error:  # they do not fit, and no more do
                context.write(common | {"outcome": "refused", "reason": str(error)})
                return
            supervisor = getattr(running.runner, "drafter_supervisor", None)
            draft_ms = supervisor and float(supervisor.tables.draft_us[batch]) / 1e3
            context.write(common | row | rate_of(planned, batch, row["step_ms"], draft_ms))


def published_of(planned: Engine) -> "Figure | None":
    """Return what is published of an engine's method; None for vanilla and the policy."""
    from benchmarks.methods import QWEN, TABLE_1

    return TABLE_1[QWEN].get(planned.tau_of)


def rate_of(planned: Engine, batch: int, step_ms: float, draft_ms: float | None) -> Row:
    """Return the tokens that a step of one request emits, what they are (counted, published or modelled), and a rate.

    A length that is counted over rejections is of several steps: a stream that is right as often is followed with the
    step's time and `draft_ms`, a forward of a parallel drafter beside the target, as it measures itself (0: it has
    measured none, so there is no rate). M is taken not to have the target's own token, the reading with which it is
    more.
    """
    from benchmarks.methods import STEP
    from vllm_vidspec.planning.acceptance import Agreement, rate_of_stream
    from vllm_vidspec.planning.speed import run_streams

    found, kind = published_of(planned), "counted"
    tokens: float | None = 1.0
    if found is not None and found.over == STEP:
        tokens, kind = found.acceptance_length, "published"
    elif found is not None:
        tokens, kind = None, "modelled"
        if draft_ms:
            agreement = Agreement((rate_of_stream(found.tau, counts_own_token=False),))
            run = run_streams(agreement, planned.num_drafts, step_ms, draft_ms, answer=20_000)
            tokens = round(run.tokens_per_step, 2)
    rate = None if tokens is None else round(1e3 * batch * tokens / step_ms, 2)
    return {"draft_ms": draft_ms, "step_tokens": tokens, "step_tokens_kind": kind, "tokens_per_s": rate}


def in_turn(running: Any, loop: Any, prompts: list[Any], sizes: Sizes) -> Row:
    """Return the times of a token while the engine is vanilla and has its policy, in turn.

    With made-up weights hardly a draft token is accepted: what the policy costs where drafts never pay. The first
    third of the rounds, in which it learns that, is apart.
    """
    from benchmarks.methods import POLICY
    from benchmarks.roles import VANILLA, Roles

    roles, before = Roles(running.llm), running.counters()["draft_steps"]
    token_ms: dict[str, list[float]] = {VANILLA: [], POLICY: []}
    for number in range(sizes.turns):
        for role in (VANILLA, POLICY)[:: 1 if number % 2 else -1]:
            roles.play(role)
            loop.start(prompts, sizes.turn_tokens)
            token_ms[role].append(round(loop.finish(), 4))
    ratios = [its / ours for its, ours in zip(token_ms[VANILLA], token_ms[POLICY], strict=True)]
    return {
        "vanilla_ms": token_ms[VANILLA],
        "policy_ms": token_ms[POLICY],
        "over_vanilla": round(statistics.median(ratios[sizes.turns // 3 :]), 4),
        "draft_steps": running.counters()["draft_steps"] - before,
    }


def measured(loop: Any, sizes: Sizes, prompts: list[Any]) -> Row:
    """Return the times of a decode step of so many requests; NotAllDraftError: they do not fit."""
    loop.start(prompts, plan.MAX_TOKENS)
    for _ in range(sizes.skip):
        loop.step()
    loop.take()
    step_ms = sorted(loop.timed(sizes.steps) for _ in range(sizes.rounds))
    taken = loop.take()
    loop.stop()
    median, low, high = (round(ms, 4) for ms in (statistics.median(step_ms), step_ms[0], step_ms[-1]))
    return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, **taken}
