"""Defects planted into a running engine, to see the tests of the decode path fail."""

import ctypes
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

# By name: what `propose` does in addition, given draft tokens, vLLM's batch and the sampled counts, in a lambda whose
# line complaints must name; and the counters that must show it.
PLANTS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "item": (lambda drafts, batch, sampled: sampled[0].item(), ("sync",)),
    "upload": (lambda drafts, batch, sampled: torch.tensor([1, 2], device=sampled.device), ("sync", "copy.blocking")),
    "allocation": (
        lambda drafts, batch, sampled: [torch.cuda.empty_cache(), sampled.new_empty(1 << 26)],
        ("alloc.device",),
    ),
    "pinned upload": (
        lambda drafts, batch, sampled: torch.ones(4).pin_memory().to(sampled.device, non_blocking=True),
        (),
    ),
    "launches": (lambda drafts, batch, sampled: [sampled + 1 for _ in range(40)], ()),
}


def line_of(name: str) -> str:
    """Return how a trace names a plant's line."""
    return f"plants.py:{PLANTS[name][0].__code__.co_firstlineno} <lambda>"


def plant_each(session: Any) -> dict[str, Any]:
    """Return the counted decode steps by plant; the plants are removed afterwards."""
    from null_gpu.engine_run import Measured, count_steps

    speculator, found = session.worker.model_runner.speculator, {}
    with session.decoding():
        for name, (plant, _) in PLANTS.items():

            def propose(batch, *args, plant=plant, **kwargs):
                plant(speculator.backend._draft_tokens, batch, args[4])  # num_sampled
                return type(speculator).propose(speculator, batch, *args, **kwargs)

            speculator.propose = propose
            session.step()
            out = Measured(name)
            count_steps(session, out)
            del speculator.propose
            session.step()
            found[name] = asdict(out)
    return found


def allocate_while_capturing() -> None:
    """Let the target's forward allocate past PyTorch's allocator while it is captured."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Target

    forward, runtime = Target.forward, ctypes.CDLL("libcudart.so.13")

    def planted(self, *args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64))
        return forward(self, *args, **kwargs)

    Target.forward = planted
