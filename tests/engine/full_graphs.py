"""The target's whole forwards as CUDA graphs would replay them, on the CPU engine.

vLLM's own manager dispatches, prepares and captures. A graph's stand-in makes the captured call once more, with the
capture's tensors and numbers. Steps without drafts are not captured: the CPU's backend plans them on the host.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils


class Replay:
    def __init__(self, forward: Callable, attention: Any):
        self._forward, self._attention = forward, attention
        self._step = attention.step

    def replay(self) -> None:
        """Run what was captured, whatever is planned by now."""
        planned, self._attention.step = self._attention.step, self._step
        self._forward(CUDAGraphMode.NONE)
        self._attention.step = planned


@contextlib.contextmanager
def captured(runner: Any, num_reqs: Sequence[int], mode: str = "FULL_DECODE_ONLY") -> Iterator[Counter]:
    """Let steps of up to so many requests be replayed; yield a counter of (rows, padded requests, requests)."""
    sizes = [count * (runner.num_speculative_steps + 1) for count in num_reqs]
    config, replayed = runner.compilation_config, Counter()
    prepare = type(runner).prepare_inputs

    def capture(manager, create_forward_fn, _progress_bar_desc):
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            forward = create_forward_fn(desc, warmup=False)
            forward(CUDAGraphMode.NONE)
            manager.graphs[desc] = Replay(forward, runner.parts.target_trees.attention)
        manager._graphs_captured = True

    def counting(self, scheduler_output, batch_req_state, batch_desc, *args):
        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            per_request = batch_desc.num_tokens // batch_desc.num_reqs
            replayed[per_request, batch_desc.num_reqs, len(batch_req_state.req_ids)] += 1
        return prepare(self, scheduler_output, batch_req_state, batch_desc, *args)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (config, "cudagraph_capture_sizes", sizes),
            (config, "max_cudagraph_capture_size", max(sizes)),
            (type(current_platform), "get_global_graph_pool", lambda self: None),
            (cudagraph_utils.CudaGraphManager, "capture", capture),
            (type(runner), "prepare_inputs", counting),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        manager = cudagraph_utils.ModelCudaGraphManager(
            runner.vllm_config, runner.device, CUDAGraphMode[mode], runner.decode_query_len
        )
        for descs in (*manager._capture_descs.values(), *manager._candidates.values()):
            descs[:] = [desc for desc in descs if desc.uniform_token_count != 1]
        parts = (runner.model, runner.model_state, runner.input_buffers, None, runner.block_tables)
        with torch.inference_mode():
            manager.capture(*parts, runner.attn_groups, runner.kv_cache_config)
        runner.hooks.after_forward(mock.Mock())
        stack.enter_context(mock.patch.object(runner, "cudagraph_manager", manager))
        yield replayed
