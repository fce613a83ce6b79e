"""Compiles and loads our kernels before anything is captured or served, as the runner's parts need them.

A kernel that is compiled at its first launch stalls every request of that step for seconds, and one that is loaded at
its first launch may be loaded under capture. The CPU engine has loops instead, which its worker loads.
"""

import time
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from vidspec_kernels import warm_up
from vllm_vidspec.engine.kv_views import distinct_views

logger = init_logger("vllm.vidspec")


def warm_up_kernels(runner: Any) -> None:
    """Prepare every variant that a runner's steps can reach, on CUDA only, once its KV caches exist."""
    if runner.device.type != "cuda":
        return
    begin = time.perf_counter()
    prepare(runner)
    logger.info("vidspec: kernels ready in %.1f s", time.perf_counter() - begin)


def prepare(runner: Any) -> None:
    config, num_drafts, parts = runner.knobs.current, runner.num_speculative_steps, runner.parts
    in_trees, block_table = parts.trees is not None, runner.block_tables.input_block_tables[0]
    warm_up.warm_accept(
        num_drafts, runner.max_num_reqs, in_trees, parts.rules is not None, runner.counters.counts_requests
    )
    if parts.rules is not None:
        is_measured = parts.visual is not None
        warm_up.warm_loosen(num_drafts, parts.rules.protected, torch.float32, in_trees, is_measured)
    if parts.target_trees is not None:
        parts.target_trees.attention.warm_up(block_table, runner.dtype, num_drafts + 1)
        parts.target_trees.warm_up(runner)
    if in_trees:
        warm_up.warm_kv_compact(parts.trees.caches, block_table, num_drafts)
        warm_up.warm_path_penalties(runner.vocab_size, parts.trees.parents, parts.verifier.paths.tables)
    if parts.guidance is not None and parts.guidance.attention:
        heads = [(keys, num_heads) for keys, _, num_heads in distinct_views(parts.guidance.attention.values())]
        warm_up.warm_guidance_scores(heads, block_table, runner.dtype)
    if parts.visual is not None:
        store = parts.visual.store
        tables = (store.pool, store.block_fill, store.block_table, store.num_blocks)
        num_shards = get_tensor_model_parallel_world_size()
        warm_up.warm_visual_relevance(*tables, runner.dtype, config.score.top_n, num_drafts + 1, num_shards)
    if config.is_parallel:  # a drafter with a process of its own prepares itself
        runner.speculator.backend.warm_up()
    else:
        runner.speculator.backend.drafter.warm_up()
