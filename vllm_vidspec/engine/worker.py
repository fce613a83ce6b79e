"""vLLM's GPU worker with our model runner, and what it shares with the CPU worker.

Nothing of vLLM's CPU engine may be imported here: its import replaces torch.cuda's streams, events and copies.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vidspec_kernels import warm_up
from vllm_vidspec.engine.kv_views import distinct_views
from vllm_vidspec.engine.runner import VidSpecModelRunner
from vllm_vidspec.engine.stages import EarlierStage, is_last
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics.files import leave_refusal
from vllm_vidspec.scoring import TOP_N

logger = init_logger("vllm.vidspec")


def leaves_refusal(method: Callable) -> Callable:
    """Let a worker's step of start-up leave the line of a VidSpecError for the server, which prints it last."""

    @functools.wraps(method)
    def step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except VidSpecError as error:
            leave_refusal(self.vllm_config, str(error))
            raise

    return step


class VidSpecWorker:
    """What both workers share."""

    model_runner: VidSpecModelRunner | EarlierStage

    @leaves_refusal
    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        self._not_counting = contextlib.ExitStack()
        # The draft's pool goes where the target's cache does: neither is worth keeping while the engine sleeps.
        pool = self._maybe_get_memory_pool_context  # type: ignore[attr-defined]
        self.model_runner.kv_allocation = functools.partial(pool, tag="kv_cache")

    @leaves_refusal
    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]

    @leaves_refusal
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, on a GPU with requests of its own, which are not counted."""
        with self.model_runner.uncounted():
            return super().compile_or_warm_up_model()  # type: ignore[misc]

    @leaves_refusal
    def determine_available_memory(self) -> int:
        """Return the bytes left for the target's KV cache, ours taken out; a VidSpecError if there are none."""
        available = super().determine_available_memory()  # type: ignore[misc]
        return available - self.model_runner.reserve(available)

    def sleep(self, level: int = 1) -> None:
        """Let go of the device's memory; running requests go on without speculation afterwards.

        Level 2 discards weights, and vLLM reloads the target's alone: we sleep at level 1 then, with a copy of them on
        the host. Refusing it would leave vLLM's scheduler paused.
        """
        if level > 1:
            logger.warning("vidspec: nothing reloads the draft's weights: sleeping at level 1, not %d", level)
        self.model_runner.forget_kv()
        super().sleep(min(level, 1))  # type: ignore[misc]

    def discard(self, tags: tuple[str, ...]) -> None:
        self.model_runner.forget_kv()
        super().discard(tags)  # type: ignore[misc]

    def vidspec_knobs(self) -> dict[str, Any]:
        return self.model_runner.knobs.current.model_dump()

    def vidspec_uncounted(self, begins: bool) -> None:
        """Begin or end to count nothing: what runs in between is no client's request."""
        if begins:
            self._not_counting.enter_context(self.model_runner.uncounted())
        else:
            self._not_counting.close()

    def vidspec_retune(self, knobs: dict[str, Any]) -> None:
        """Change knobs of pruning and scoring between requests; see `Knobs.retune`; over `collective_rpc`."""
        self.model_runner.knobs.retune(knobs)


class VidSpecGPUWorker(VidSpecWorker, Worker):
    """GPU worker on Model Runner V2."""

    def _make_model_runner(self):
        return (VidSpecModelRunner if is_last() else EarlierStage)(self.vllm_config, self.device)

    def compile_or_warm_up_model(self):
        if is_last():
            warm_up_kernels(self.model_runner)  # before vLLM's own warm-up, which captures
        return super().compile_or_warm_up_model()


def warm_up_kernels(runner: Any) -> None:
    """Compile and load every kernel variant that a runner's steps can reach, on CUDA only, once its KV caches exist.

    A kernel that is compiled at its first launch stalls every request of that step for seconds, and one that is loaded
    at its first launch may be loaded under capture. The CPU engine has loops instead, which its worker loads.
    """
    if runner.device.type != "cuda":
        return
    begin = time.perf_counter()
    prepare(runner)
    logger.info("vidspec: kernels ready in %.1f s", time.perf_counter() - begin)


def prepare(runner: Any) -> None:
    config, num_drafts, parts = runner.knobs.current, runner.num_speculative_steps, runner.parts
    in_trees, block_table = parts.trees is not None, runner.block_tables.input_block_tables[0]
    warm_up.warm_accept(num_drafts, runner.max_num_reqs, in_trees, parts.rules is not None)
    if parts.rules is not None:
        is_measured = parts.visual is not None
        warm_up.warm_loosen(num_drafts, parts.rules.protected, torch.float32, in_trees, is_measured)
    if parts.target_trees is not None:
        parts.target_trees.attention.warm_up(block_table, runner.dtype, num_drafts + 1)
        parts.target_trees.warm_up(runner)
    if in_trees:
        warm_up.warm_kv_compact(parts.trees.caches, block_table, num_drafts)
        warm_up.warm_path_penalties(runner.vocab_size, parts.trees.parents, parts.verifier.paths.tables)
    if observed := [layer for guide in parts.guides for layer in guide.attention.values()]:
        heads = [(keys, *kind) for keys, _, *kind in distinct_views(observed)]
        warm_up.warm_guidance_scores(heads, block_table, runner.dtype)
    if parts.visual is not None:
        store = parts.visual.store
        tables = (store.pool, store.block_fill, store.block_table, store.num_blocks)
        num_shards = get_tensor_model_parallel_world_size()
        warm_up.warm_visual_relevance(*tables, runner.dtype, TOP_N, num_drafts + 1, num_shards)
    if config.is_parallel:  # a drafter with a process of its own prepares itself
        runner.speculator.backend.warm_up()
    else:
        runner.speculator.backend.drafter.warm_up()
