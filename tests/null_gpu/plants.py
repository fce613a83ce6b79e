"""Defects planted into a running engine, so that the tests of the decode path are seen to fail."""

import ctypes
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch


def plant_item(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    num_sampled[0].item()


def plant_host_index(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    speculator._draft_tokens[torch.tensor([0])]


def plant_scalar_assignment(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    speculator._draft_tokens[batch.idx_mapping] = 3


def plant_boolean_mask(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    num_sampled[num_sampled > 1]


def plant_upload(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    torch.tensor([1, 2, 3], device=num_sampled.device)


def plant_allocation(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    torch.cuda.empty_cache()
    torch.empty(1 << 28, dtype=torch.uint8, device=num_sampled.device)


def plant_pinned_upload(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    torch.ones(4).pin_memory().to(num_sampled.device, non_blocking=True)


def plant_launches(speculator: Any, batch: Any, num_sampled: torch.Tensor) -> None:
    for _ in range(40):
        num_sampled + 1


# By name: the plant, and the counters that must show it.
PLANTS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "item": (plant_item, ("sync",)),
    "host index": (plant_host_index, ("sync", "copy.blocking")),
    "scalar assignment": (plant_scalar_assignment, ("sync", "copy.blocking")),
    "boolean mask": (plant_boolean_mask, ("sync",)),
    "upload": (plant_upload, ("sync", "copy.blocking")),
    "allocation": (plant_allocation, ("alloc.device",)),
    "pinned upload": (plant_pinned_upload, ()),
    "launches": (plant_launches, ()),
}


def plant_each(session: Any) -> dict[str, Any]:
    """Return by plant what the decode steps did with it; the engine is whole again afterwards."""
    from null_gpu.engine_run import Measured, count_steps

    speculator, found = session.worker.model_runner.speculator, {}
    names = session.add(session.prompts())
    session.probe("emulate", True)
    session.prefill(names)
    for name, (plant, _) in PLANTS.items():

        def propose(batch, *args, plant=plant, **kwargs):
            plant(speculator, batch, args[4])  # num_sampled
            return type(speculator).propose(speculator, batch, *args, **kwargs)

        speculator.propose = propose
        session.step()
        out = Measured(name)
        count_steps(session, out)
        del speculator.propose
        session.step()
        found[name] = asdict(out)
    session.probe("emulate", False)
    session.abort(names)
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
