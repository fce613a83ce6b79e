"""GPUs by name, as their makers specify them, and what of that a forward is assumed to reach; plain Python."""

from dataclasses import dataclass

from vllm_vidspec.errors import VidSpecError, quoted


@dataclass(frozen=True)
class Gpu:
    """A card, from its data sheet.

    Attributes:
        name: As users write it.
        memory_bytes: Of its memory.
        bandwidth: Bytes per second from memory, peak.
        flops: Dense bf16 operations per second, peak.
        link_bandwidth: Bytes per second to other cards, one direction, peak.
        link_latency_s: Of one all-reduce of nothing; assumed, not specified.
        num_sms: Its multiprocessors.
        splits_keys: Whether vLLM's own attention shares a request's keys out among programs where it has several query
            rows: FlashAttention 3 and 4 do, version 2 does not.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    link_latency_s: float
    num_sms: int = 132
    splits_keys: bool = True


_NVLINK_S, _PCIE_S = 10e-6, 30e-6
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 2.04e12, 312e12, 300e9, _NVLINK_S, 108, splits_keys=False),
        Gpu("h100", 80e9, 3.35e12, 989e12, 450e9, _NVLINK_S),
        Gpu("h200", 141e9, 4.8e12, 989e12, 450e9, _NVLINK_S),
        Gpu("h20", 96e9, 4.0e12, 148e12, 450e9, _NVLINK_S, 78),
        Gpu("l40s", 48e9, 0.864e12, 362e12, 32e9, _PCIE_S, 142, splits_keys=False),
        Gpu("b200", 180e9, 8.0e12, 2250e12, 900e9, _NVLINK_S, 148),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What is between a data sheet and a forward; none of it has been measured on a GPU by this project.

    Attributes:
        memory_frac: Of the memory's peak that a whole forward reaches.
        flops_frac: Of the products' peak.
        link_frac: Of the link's peak.
        launch_s: From one kernel to the next, in a CUDA graph.
        layer_launches: Kernels of a decoder layer.
        forward_launches: Kernels of a forward beside its layers: inputs, head, the draw of a token.
        step_s: Host time of a target's step that no kernel hides, with drafts or without.
        speculation_s: The same of a step with drafts, on top.
        usable_frac: Of a card's memory that weights and KV may take; the rest is activations, graphs and room.
        walk_s: Of one program of FlashAttention 2 over a key of 128 dimensions, where keys are not split: 1.34 ms a
            layer over 32k keys on an RTX 3090 (vllm-project/flash-attention PR 193, published there).
    """

    memory_frac: float = 0.8
    flops_frac: float = 0.6
    link_frac: float = 0.7
    launch_s: float = 1.5e-6
    layer_launches: int = 12
    forward_launches: int = 10
    step_s: float = 0.5e-3
    speculation_s: float = 0.3e-3
    usable_frac: float = 0.9
    walk_s: float = 41e-9


ASSUMED = Assumptions()


def gpu_named(name: str) -> Gpu:
    """Return a card by its name.

    Raises:
        VidSpecError: One line with the names that are known.
    """
    found = GPUS.get(name.strip().lower())
    if found is None:
        raise VidSpecError(f"--gpu: {quoted(name)} is none of {', '.join(GPUS)}")
    return found
