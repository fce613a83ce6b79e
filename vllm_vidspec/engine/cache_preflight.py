"""What attention guidance and trees ask of the target, checked on its configuration before any weight loads.

The layers themselves are checked once they exist (`kv_views`): this spares the wait wherever the configuration tells.
"""

import logging
from collections.abc import Iterator
from typing import Any

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine import kv_views, tree_attention
from vllm_vidspec.engine.listen import attention as attention_guidance
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import get_pruner

logger = logging.getLogger("vllm.vidspec")


def check_target(vllm_config: Any, config: VidSpecConfig) -> None:
    """Refuse a target whose layers or KV cache cannot be read as configured, and choose a backend where vLLM's cannot.

    Raises:
        VidSpecError: One line naming what is wrong, and the way out.
    """
    check_layers(vllm_config.model_config.get_total_num_hidden_layers(), config)
    for what, way_out in readers(config):
        check_cache(vllm_config, what, way_out)
        choose_backend(vllm_config, what, way_out)


def readers(config: VidSpecConfig) -> Iterator[tuple[str, str]]:
    """Yield who reads the target's KV cache, and what to do without it."""
    if "attention" in get_pruner(config.prune.pruner).needs:
        yield attention_guidance.REFUSAL
    if config.shapes - {"chain"}:
        yield tree_attention.REFUSAL


def check_layers(num_layers: int, config: VidSpecConfig) -> None:
    """Refuse layers that the target does not have.

    Raises:
        VidSpecError: `guidance_layers` or `uv_layer` names one, and the pruner reads it.
    """
    needs = get_pruner(config.prune.pruner).needs
    if "attention" in needs:
        attention_guidance.chosen_layers(config.prune.guidance_layers, num_layers)
    if "uv" in needs and config.prune.uv_layer is not None and config.prune.uv_layer > num_layers:
        raise VidSpecError(f"uv_layer: the target has layers 1 to {num_layers}, not {config.prune.uv_layer}")


def check_cache(vllm_config: Any, what: str, way_out: str) -> None:
    """Refuse a KV cache of another type or layout than `what` reads.

    Raises:
        VidSpecError: A quantised cache, or keys that the CPU packs (bf16 with AMX).
    """
    from vllm.platforms import current_platform

    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not cache.kv_cache_dtype_skip_layers:  # some layers may be plain: each is looked at when it exists
        kv_views.check_dtype(cache.cache_dtype, what, way_out)
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        layout = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size())
        kv_views.check_layout_name(layout, what, way_out)


def choose_backend(vllm_config: Any, what: str, way_out: str) -> None:
    """Let vLLM use the best attention backend that `what` reads, where its own first choice is another.

    Why: on some GPUs (compute capability 10) that is FlashInfer, whose cache and softmax nothing of ours reads.

    Raises:
        VidSpecError: The user named another, or this device has none.
    """
    from vllm.platforms import current_platform

    attention = vllm_config.attention_config
    if attention.backend_per_kind or not current_platform.is_cuda():
        return
    if attention.backend is not None:
        kv_views.check_backend(attention.backend.name, what, way_out)
        return
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    candidates, _ = current_platform.get_valid_backends(
        device_capability=current_platform.get_device_capability(),
        attn_selector_config=AttentionSelectorConfig(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=cache.cache_dtype,
            block_size=cache.block_size if cache.user_specified_block_size else None,
            use_kv_connector=vllm_config.kv_transfer_config is not None,
        ),
        num_heads=model.get_num_attention_heads(parallel),
    )
    ranked = [candidate.backend for candidate in sorted(candidates, key=lambda candidate: candidate.priority)]
    readable = [backend for backend in ranked if backend.name in kv_views.BACKENDS]
    if not ranked or ranked[0] in readable[:1]:
        return  # its own choice serves; without any, vLLM says why
    if not readable:
        kv_views.check_backend(ranked[0].name, what, way_out)
    logger.info("vidspec: attention backend %s, since %s does not read %s", readable[0].name, what, ranked[0].name)
    attention.backend = readable[0]
