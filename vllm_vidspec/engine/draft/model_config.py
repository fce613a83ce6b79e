"""Configurations of the draft network, made from the target's, and copies of layers that they are for."""

import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.gpu.spec_decode.utils import get_pp_safe_draft_load_config


def kv_bytes_per_token(vllm_config: VllmConfig) -> int:
    """Return the KV bytes that one token takes on this rank, over all layers of a configuration."""
    return sum(spec.page_size_bytes // spec.block_size for spec in get_kv_cache_spec(vllm_config).values())


def draft_config(
    base: VllmConfig,
    is_self_draft: bool,
    linear_backends: dict[str, str] | None = None,
    has_own_tower: bool = True,
) -> VllmConfig:
    """Return the draft's configuration, with a forward context of its own, given the target's.

    `linear_backends` are the kernels of its layers by quantisation; None: the target's. A tower that is not to be its
    own is not loaded.
    """
    speculative = base.speculative_config
    compilation = copy.copy(base.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = list(base.compilation_config.static_all_moe_layers) if is_self_draft else []
    config = copy.copy(base)  # shallow, and without running __post_init__ again
    config.compilation_config = compilation
    config.speculative_config = None
    if is_self_draft:
        return config
    # Its own: a checkpoint that says how its cache is quantised writes it there.
    config.cache_config = copy.copy(base.cache_config)
    if speculative.kv_cache_dtype is not None:
        config.cache_config.cache_dtype = speculative.kv_cache_dtype
    if linear_backends is not None:
        config.kernel_config = copy.copy(base.kernel_config)
        config.kernel_config.linear_backend_per_quant = linear_backends
    config.model_config = copy.copy(speculative.draft_model_config)
    config.model_config.multimodal_config = _media_config(base.model_config.multimodal_config, has_own_tower)
    config.parallel_config = copy.copy(speculative.draft_parallel_config)
    config.parallel_config.rank = base.parallel_config.rank
    # vLLM leaves this open, and a forward that may have experts is agreed upon by all data-parallel engines.
    config.parallel_config.is_moe_model = config.model_config.is_moe
    config.load_config = get_pp_safe_draft_load_config(get_draft_load_config(base))
    config.quant_config = VllmConfig.get_quantization_config(config.model_config, config.load_config)
    return config


def _media_config(target: Any, has_own_tower: bool) -> Any:
    """Return the draft's multimodal configuration: the target's, for which its pixels are made, but without the scales
    that were measured on the target's tower, and without `--video-pruning-rate`: the draft sees what the target kept.
    """
    if target is None:
        return None
    config = copy.copy(target)
    config.mm_encoder_fp8_scale_path = config.mm_encoder_fp8_scale_save_path = None
    config.video_pruning_rate = None
    config.language_model_only |= not has_own_tower
    return config


def unhooked(layer: Any) -> Any:
    """Copy an attention layer without its parameters: what is done to the layer later is not done to the copy."""
    if not isinstance(layer, Attention):
        return layer
    layer = copy.copy(layer)
    layer.impl = copy.copy(layer.impl)
    return layer


def follow(config: VllmConfig, target: VllmConfig) -> None:
    """Take what vLLM settles of the target's cache once models are loaded, but for its type and a layout of our own."""
    own, theirs = config.cache_config, target.cache_config
    if own is not theirs:
        config.cache_config = copy.copy(theirs)
        config.cache_config.cache_dtype = own.cache_dtype
        config.cache_config.kv_cache_layout = theirs.kv_cache_layout or own.kv_cache_layout


def of_two_rows(config: VllmConfig, speculative_config: Any) -> VllmConfig:
    """Return the draft's configuration as its metadata builders are to see it: a step may feed two tokens at once.

    Else FlashInfer takes a step's first forward for a prefill, and vLLM's Triton kernel has scratch for half the rows.
    """
    config = copy.copy(config)
    config.speculative_config = copy.copy(speculative_config)
    config.speculative_config.num_speculative_tokens = 1
    return config


def with_usual_kernels(config: VllmConfig) -> VllmConfig:
    """Let vLLM choose kernels: what quantises an output head takes few, and Marlin's for fp8 are not among them."""
    config = copy.copy(config)
    config.kernel_config = copy.copy(config.kernel_config)
    config.kernel_config.linear_backend, config.kernel_config.linear_backend_per_quant = "auto", None
    return config


def without_override(config: VllmConfig) -> VllmConfig:
    """Drop `--num-gpu-blocks-override`: it sizes the target's cache, not the draft's."""
    config = copy.copy(config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks_override = None
    return config
