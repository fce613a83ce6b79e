"""What decides how fast drafts decode on a GPU: attention over trees that fit a tile, matrix products by their format
and kernel, and one engine that plays vanilla, chains and trees in turn.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu import plan
from benchmarks.gpu.measure import measured, prompt_of
from benchmarks.gpu.plan import FAMILY
from benchmarks.gpu.steps import Context, Row, engine

ROUNDS = 15
# Of a draft's level and of a verify step: heads, KV heads; keys; nodes; requests.
LEVELS = [(28, 4, 2500, nodes, 1) for nodes in (0, 4, 9)]
TREES = [(40, 8, 25_000, nodes, batch) for nodes in (15, 24, 25) for batch in (1, 4, 8)]
# Outputs and inputs of a layer's products.
PRODUCTS = {
    "7B": {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37_888, 3584), "down": (3584, 18_944)},
    "32B": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (55_296, 5120), "down": (5120, 27_648)},
}
ROWS = (1, 6, 16, 17, 26)
# What a checkpoint says of its layers (`made_up.QUANTISED`), and vLLM's kernel for it; None: its own choice.
FORMATS: tuple[tuple[str | None, str | None], ...] = (
    (None, None), ("fp8", "cutlass"), ("fp8", "marlin"), ("gptq", "machete"), ("gptq", "marlin"),
)  # fmt: skip


def in_graphs(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> Iterator[tuple[str, Row]]:
    """Yield of each call the microseconds of its replays in a CUDA graph, taken in turn, with cold caches."""
    import torch

    from benchmarks.kernels.timing import measure_us

    graphs = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    for name, found in measure_us({name: graph.replay for name, graph in graphs.items()}, rounds).items():
        yield name, dict(zip(("median", "p20", "p80"), (round(us, 2) for us in found), strict=True))


def rates(context: Context) -> None:
    """Write the memory's rate, and what a kernel that does nothing takes behind another in a graph."""
    import torch

    source = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    target, one = torch.empty_like(source), torch.zeros(1, device="cuda")

    def many() -> None:
        for _ in range(100):
            one.add_(1)

    for name, row in in_graphs({"copy": lambda: target.copy_(source), "100 small kernels": many}):
        more = {"gb_per_s": round(2 * 2**28 / row["median"] / 1e3, 1)} if name == "copy" else {}
        context.write({"what": "rates", "case": name} | row | more)


def attention(context: Context) -> None:
    """Write what attention over a tree takes in a layer: ours, and FlashAttention 3 over the prefix with our nodes."""
    from benchmarks.kernels import tree_attention

    cases = [(4, 2, 64, 5, 1)] if context.dry_run else LEVELS + TREES
    for heads, kv_heads, num_keys, nodes, batch in cases:
        inputs = tree_attention.Inputs(num_keys, batch, nodes, heads, kv_heads, 128)
        peers = {"ours": tree_attention.ours, "flash_and_nodes": tree_attention.flash_and_nodes}
        calls = {name: bind(inputs)[0] for name, bind in peers.items()}
        case = {"what": "attention", "shape": f"{heads}x{kv_heads}", "context": num_keys, "nodes": nodes}
        for name, row in in_graphs(calls):
            context.write(case | {"num_reqs": batch, "impl": name} | row)
        del inputs, calls


def products(context: Context, model: str) -> None:
    """Write what each product of a layer takes by rows, format and kernel, the quantisation of its inputs included."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    from benchmarks.made_up import QUANTISED

    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    shapes = {"tiny": (256, 256)} if context.dry_run else PRODUCTS[model]
    for weights, kernel in FORMATS:
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False)  # all that layers ask it
        if kernel is not None:
            config.kernel_config.linear_backend = kernel
        quantised = None
        if weights is not None:
            quantised = get_quantization_config(QUANTISED[weights]["quant_method"]).from_config(QUANTISED[weights])
        for name, (outputs, inputs) in shapes.items():
            case = {"what": "product", "model": model, "layer": name, "format": weights or "bf16", "kernel": kernel}
            try:
                with set_current_vllm_config(config):
                    if not torch.distributed.is_initialized():
                        init_distributed_environment(1, 0, "tcp://127.0.0.1:29511", 0)
                        ensure_model_parallel_initialized(1, 1)
                    layer = ColumnParallelLinear(inputs, outputs, bias=False, quant_config=quantised, prefix=name)
                    layer.quant_method.process_weights_after_loading(layer)
                    calls = {str(rows): functools.partial(layer, torch.randn(rows, inputs)) for rows in ROWS}
                    for rows, row in in_graphs(calls):
                        context.write(case | {"rows": int(rows)} | row)
            except Exception as error:  # a kernel that does not take this shape or format here
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                context.write(case | {"outcome": "refused", "reason": reason})


@dataclass(frozen=True)
class Pair:
    """Made-up models of an engine, what it drafts, and how many requests run at a time."""

    target: str
    draft: str
    target_weights: str | None
    batches: tuple[int, ...]
    K: int = 24


PAIRS = {
    "32b": Pair("Qwen2.5-VL 32B", "Qwen2.5-VL 7B", "fp8", (1, 4, 8)),
    "7b": Pair("Qwen2.5-VL 7B", "Qwen2.5-VL 3B", "fp8", (16, 28), K=17),
}


def llm_kwargs(pair: Pair, where: dict[str, str], sizes: plan.Sizes, batches: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of `LLM`: all that users have by default, but for sizes and graphs of these alone."""
    from benchmarks.made_up import user_kwargs
    from vllm_vidspec.tools import pairs

    spec = pairs.speculative_config(
        FAMILY, where["draft"], drafting="auto", num_speculative_tokens=pair.K, adaptive_tokens=True, prune_ratio=0.9
    )
    widths = {rows * batch for batch in batches for rows in (1, 2, 4, pair.K + 1)}
    return user_kwargs(where, spec) | {
        "dtype": "bfloat16",
        "max_model_len": sizes.video_tokens + plan.MAX_TOKENS + 100,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": sizes.video_tokens + 512,
        "gpu_memory_utilization": 0.95,
        "limit_mm_per_prompt": {"video": 1, "image": 0},
        "skip_mm_profiling": True,
        "compilation_config": {"mode": 0, "cudagraph_capture_sizes": sorted(widths)},
    }


def roles_in_turn(context: Context, name: str) -> None:
    """Write of one engine its memory by owner, a step's time as vanilla, with chains and with each tree, by batch size,
    a profile of three steps of a tree, and the time to the first token of a new video, as vanilla and drafting.
    """
    from benchmarks import harness
    from benchmarks.made_up import write_checkpoint
    from benchmarks.methods import POLICY
    from benchmarks.roles import VANILLA, Roles
    from vllm_vidspec import assets
    from vllm_vidspec.engine.policy import Decision
    from vllm_vidspec.engine.step_times import Trial

    pair, sizes = PAIRS[name], plan.TINY_SIZES if context.dry_run else plan.Sizes()
    batches = plan.TINY_BATCHES if context.dry_run else pair.batches
    folder = Path(context.work_dir) / f"decode-{name}"
    shapes = {"target": (pair.target, pair.target_weights), "draft": (pair.draft, "gptq")}
    where = {
        role: str(
            write_checkpoint(
                assets.checkpoint(FAMILY, role), folder / role, None if context.dry_run else shape,
                weights=None if context.dry_run else weights, pixels=(sizes.height * sizes.width,) * 2,
            )
        )
        for role, (shape, weights) in shapes.items()
    }  # fmt: skip
    kwargs = llm_kwargs(pair, where, sizes, batches)
    if context.dry_run:
        kwargs["kv_cache_memory_bytes"] = 2**28
    with engine(context, kwargs) as running:
        common = {"engine": name, "video_tokens": sizes.video_tokens}
        context.write({"what": "memory", **common, **memory_of(running)})
        loop, roles = harness.DecodeLoop(running.llm.llm_engine, True), Roles(running.llm)
        side, rows = running.llm.llm_engine.engine_core.engine_core.scheduler._vidspec_side, loop._rows
        seeds = itertools.count()
        for batch, option in itertools.product(batches, (None, *side.options[:-1])):
            roles.play(VANILLA if option is None else POLICY)
            side.trial = None if option is None else Trial(option)
            if option is not None:
                side.trial.decision = Decision(option)
            loop._rows = rows if option is not None else None
            shape = "vanilla" if option is None else f"{option.shape} {option.num_tokens}"
            row = {"what": "step", **common, "batch": batch, "shape": shape}
            try:
                context.write(row | measured(loop, sizes, [prompt_of(sizes)] * batch))
            except harness.NotAllDraftError as error:
                loop.stop()
                context.write(row | {"outcome": "refused", "reason": str(error)})
            if batch == batches[0]:
                context.write({"what": "ttft", **common, "shape": shape, **first_token(loop, sizes, next(seeds))})
        side.trial = Trial(side.options[0])
        loop.start([prompt_of(sizes)] * batches[0], plan.MAX_TOKENS)
        for row in profile(loop):
            context.write({"what": "profile", **common, "batch": batches[0], **row})
        loop.stop()


def memory_of(running: Any) -> Row:
    """Return bytes by owner: the target's KV cache, the draft's pool and weights, and what is free."""
    import torch

    config, counters = running.llm.llm_engine.vllm_config, running.counters()
    from vllm_vidspec.engine.draft.model_config import kv_bytes_per_token

    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    free, total = torch.cuda.mem_get_info()
    names = ("draft_pool_bytes", "draft_load_bytes", "draft_encoder_bytes")
    kv_bytes = tokens * kv_bytes_per_token(config)
    return {"kv_bytes": kv_bytes, "free_bytes": free, "total_bytes": total, **{key: counters[key] for key in names}}


def first_token(loop: Any, sizes: plan.Sizes, seed: int) -> Row:
    """Return the seconds to the first token of a new video alone, preprocessing included, and until it has drafts."""
    prompt = prompt_of(sizes, 1000 + seed)
    begun, rows = time.perf_counter(), loop._rows
    loop._rows = None
    loop.start([prompt], plan.MAX_TOKENS)
    ttft_s, loop._rows = time.perf_counter() - begun, rows
    while rows is not None and not rows.has_draft_np.any() and time.perf_counter() < begun + 30:
        loop.step()
    found = {"ttft_s": round(ttft_s, 4), "drafting_s": round(time.perf_counter() - begun, 4)}
    loop.stop()
    return found


def profile(loop: Any, num_steps: int = 3, most: int = 60) -> Iterator[Row]:
    """Yield the kernels of some steps, the longest first: name, calls a step, microseconds a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    loop.step()
    with recording(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(num_steps):
            loop.step()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:most]:
        yield {
            "kernel": event.key[:120],
            "calls": round(event.count / num_steps, 2),
            "us": round(event.self_device_time_total / num_steps, 2),
        }
