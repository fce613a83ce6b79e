"""What is said at start-up of a configuration that is accepted and could be faster; a line each."""

import logging
from collections.abc import Iterator
from typing import Any

from vllm_vidspec.config import NONE, VidSpecConfig
from vllm_vidspec.config.static_tree import GROWN_DEPTHS, TILE_ROWS, level_widths, most_nodes
from vllm_vidspec.drafting.adaptive import SAGE
from vllm_vidspec.planning.draft_cost import cost_hint, four_bit_checkpoint, stored_weights

logger = logging.getLogger("vllm.vidspec")


def say_hints(vllm_config: Any, config: VidSpecConfig) -> None:
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        for line in graph_ceiling(config, max_num_seqs, compilation.max_cudagraph_capture_size or 0):
            logger.info("vidspec: CUDA graphs end before --max-num-seqs: %s", line)
    if config.shapes & GROWN_DEPTHS.keys():
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        group = max(1, model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel))
        for line in tile_hint(config.num_speculative_tokens, group):
            logger.info("vidspec: %s", line)
    if not config.is_self_draft and not config.is_parallel:
        models = (vllm_config.model_config, vllm_config.speculative_config.draft_model_config)
        target, draft = (stored_weights(model.hf_config.to_dict(), model.quantization) for model in models)
        four_bits = four_bit_checkpoint(models[1].hf_config.to_dict())
        if target is None or draft is None:
            return
        if found := cost_hint(target, draft, config.max_path, four_bits):
            logger.info("vidspec: the draft's weights are dear: %s: docs/models.md, A quantised draft", found)


def tile_hint(num_nodes: int, group: int) -> Iterator[str]:
    """Yield a line if trees of so many nodes take a tile of rows more than smaller ones, of `group` heads a KV head."""
    fits = most_nodes(group)
    if num_nodes > fits:
        yield (
            f"trees of {num_nodes} nodes take more than one tile of {TILE_ROWS} rows, as the target has {group} query "
            f"heads to a KV head: num_speculative_tokens {fits} would fit"
        )


def graph_ceiling(config: VidSpecConfig, max_num_seqs: int, max_tokens: int) -> Iterator[str]:
    """Yield a line if batches that vLLM may schedule are beyond any CUDA graph, of the target or of the draft."""
    sizes = [(size, config.plan_for(size)) for size in range(1, max_num_seqs + 1)]
    drafting = [(size, plan) for size, plan in sizes if plan.num_tokens]
    verify = next((size for size, plan in drafting if size * (plan.num_tokens + 1) > max_tokens), None)
    draft = next((size for size, plan in drafting if size * max(2, level_width(config, plan.shape)) > max_tokens), None)
    ends = []
    if verify is not None:
        ends.append(f"a target step of {verify} requests has {verify * (config.plan_for(verify).num_tokens + 1)} rows")
    if draft is not None and not config.is_parallel:
        ends.append(f"a draft forward of {draft} more tokens than that")
    if ends:
        yield (
            f"at {max_tokens} tokens; {' and '.join(ends)}; from there on steps run without whole graphs "
            f"(--max-num-seqs is {max_num_seqs}; raise max_cudagraph_capture_size if so many decode at once)"
        )


def level_width(config: VidSpecConfig, shape: str) -> int:
    """Return the most nodes of a request in a draft forward behind the first: those of a level with children."""
    if shape in ("chain", NONE):
        return 1
    if shape == "tree-adaptive":
        return SAGE.width_max
    return max(level_widths(config.paths_of(shape)))
