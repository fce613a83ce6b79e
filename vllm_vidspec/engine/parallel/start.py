"""Start-up of a rank of the drafter: vLLM's distributed state, the draft's weights, its KV pool, its graphs."""

from typing import Any

import torch
import vllm.ir
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.workspace import init_workspace_manager

from vidspec_kernels.dispatch import load_loops
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat.config import drafter_config
from vllm_vidspec.engine.draft.drafter import DraftContext, Drafter
from vllm_vidspec.engine.draft.graphs import DraftGraphs, mode_of_draft
from vllm_vidspec.engine.draft.memory import DraftMemory
from vllm_vidspec.engine.draft.messages import Committed
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.parallel.launch import Plan
from vllm_vidspec.engine.parallel.rank import DrafterCounters, DrafterRank, TargetMirror
from vllm_vidspec.engine.tree_attention import make_attention
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.pool import VISION_SHARE
from vllm_vidspec.streams import Tables

_MAX_RUN = 32  # most tokens of a stream that follow one begun on the device; as many bits say what is fed
_MARGIN_BYTES = 256 << 20  # for graphs, and what a forward takes beyond its profile


def build(plan: Plan, vllm_config: Any, config: VidSpecConfig, tables: Tables) -> DrafterRank:
    """Return a rank that is ready; a VidSpecError where a knob asks for too much memory, or for too little."""
    vllm_config = drafter_config(vllm_config, config.parallel.tensor_parallel_size, plan.rank)
    # A token of each stream is drawn, and has room, at a time.
    config = config.changed({"num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": None})
    device = _device(plan.rank)
    # As vLLM's workers begin.
    vllm_config.kernel_config.ir_op_priority.set_default()
    vllm.ir.set_default_torch_wrap(vllm_config.compilation_config.ir_enable_torch_wrap)
    with set_current_vllm_config(vllm_config):
        where = (plan.rank, f"file:///proc/self/fd/{plan.rendezvous}", plan.rank, current_platform.dist_backend)
        init_worker_distributed_environment(vllm_config, *where)
        init_workspace_manager(device)
        knobs, counters = Knobs(config), DrafterCounters(tables.counters if plan.rank == 0 else None)
        agreement = Agreement(get_tp_group())
        model = DraftModel(vllm_config, device, is_self_draft=False, agreement=agreement)
        counters.set("draft_load_bytes", model.load(None, config))
        with torch.inference_mode():  # as vLLM's workers profile, capture and serve; not what loads weights
            drafter, mirror = _make_drafter(plan, vllm_config, knobs, counters, model, agreement)
            drafter.capture()
    return DrafterRank(drafter, mirror, knobs, counters)


def _make_drafter(
    plan: Plan, vllm_config: Any, knobs: Knobs, counters: DrafterCounters, model: DraftModel, agreement: Agreement
) -> tuple[Drafter, TargetMirror]:
    max_num_reqs = plan.sizes["max_num_reqs"]
    on_cpu, asked = model.device.type == "cpu", vllm_config.compilation_config.cudagraph_mode
    mode = CUDAGraphMode.NONE if on_cpu or not asked else asked
    model.use_cudagraph_mode(mode_of_draft(mode))
    # Before what is left is measured: the texts of all rows may take a gigabyte.
    mirror = TargetMirror(vllm_config, max_num_reqs, plan.vocab_size, model.device)
    memory = DraftMemory.plan(knobs.current, vllm_config, model, _available_bytes(vllm_config, knobs.current, model))
    model.resolve_layout()
    sample = CoupledSampler(mirror.sampler, knobs.current.draft_noise)
    by_default = sample.processes_by_default(vllm_config.model_config)
    graphs = DraftGraphs(vllm_config, model.device, mode, max_num_reqs, by_default)
    layers = attention_layers(model.config).values()
    context = DraftContext(
        model=model,
        knobs=knobs,
        sample=sample,
        counters=counters,  # type: ignore[arg-type]
        agreement=agreement,
        graphs=graphs,
        memory=memory,
        committed=Committed(mirror.num_tokens, mirror.text, mirror.states.last_sampled_tokens, None),
        attention=make_attention(layers, model.config, model.device, num_rows=2, in_trees=False, whose="draft"),
        max_num_reqs=max_num_reqs,
        max_model_len=vllm_config.model_config.max_model_len,
        max_run=_MAX_RUN,
    )
    drafter = Drafter(context)
    if not on_cpu:
        drafter.warm_up()
        return drafter, mirror
    load_loops()
    # vLLM compiles the look-up of a vocabulary that ranks share at its first call, for longer than answers take.
    for count in (1, 2) if get_tp_group().world_size > 1 else ():
        model.embed(torch.zeros(count, dtype=torch.int64), [], None)
    return drafter, mirror


def _device(rank: int) -> torch.device:
    if current_platform.is_cpu():
        # vLLM's CPU engine replaces parts of torch as it is imported; the draft's buffers rely on them.
        import vllm.v1.worker.cpu_worker  # noqa: F401

        return torch.device("cpu")
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    return device


def _available_bytes(vllm_config: Any, config: VidSpecConfig, model: DraftModel) -> int:
    """Return the KV memory that the drafter may take: of its own device, or as much as the target has of the CPU's."""
    cache = vllm_config.cache_config
    if model.device.type == "cpu":
        from vllm import envs

        return cache.kv_cache_memory_bytes or (envs.VLLM_CPU_KVCACHE_SPACE or 4) << 30
    model.profile()
    free, total = torch.cuda.mem_get_info(model.device)
    return available_bytes(free, total, cache.gpu_memory_utilization, config)


def available_bytes(free: int, total: int, utilization: float, config: VidSpecConfig) -> int:
    """Return the KV memory that the drafter may take of a GPU: up to the target's utilization, or by `draft_kv_bytes`,
    which what is free must hold; else a VidSpecError.
    """
    if (pool := config.draft_kv_bytes) is None:
        available = free - int((1 - utilization) * total)
        if available <= 0:
            raise VidSpecError(
                f"parallel: the drafter's device has {free} of {total} bytes left; no room for its KV cache"
            )
        return available
    encoder = config.state_bytes_for("embeddings")
    wanted = pool + encoder if encoder is not None else int(pool / (1 - VISION_SHARE))
    if free < wanted + _MARGIN_BYTES:
        raise VidSpecError(
            f"parallel: the drafter's device has {free} of {total} bytes left; draft_kv_bytes {pool}, embeddings and a "
            f"margin take {wanted + _MARGIN_BYTES}"
        )
    return wanted + _MARGIN_BYTES
