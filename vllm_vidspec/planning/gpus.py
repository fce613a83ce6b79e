"""GPUs by name, as their makers specify them: the one table of cards, for the planner and the compile report."""

from dataclasses import dataclass

from vllm_vidspec.errors import VidSpecError, quoted


@dataclass(frozen=True)
class Architecture:
    """What a kernel is compiled for, and its usual card."""

    num_sms: int  # multiprocessors of that card
    shared_kb: int  # shared memory of a multiprocessor
    program_kb: int  # shared memory of one program
    threads: int  # of a multiprocessor


ARCHITECTURES = {
    80: Architecture(108, 164, 163, 2048),  # A100
    89: Architecture(142, 100, 99, 1536),  # L40S
    90: Architecture(132, 228, 227, 2048),  # H100, H200
    100: Architecture(148, 228, 227, 2048),  # B200
    120: Architecture(188, 100, 99, 1536),  # RTX PRO 6000; of the RTX 50 fewer multiprocessors
}


@dataclass(frozen=True)
class Gpu:
    """A card, from its data sheet."""

    name: str  # as users write it
    arch: int  # A key of ARCHITECTURES
    memory_bytes: float  # of its memory
    bandwidth: float  # bytes per second from memory, peak
    flops: float  # dense bf16 operations per second, peak
    link_bandwidth: float  # bytes per second to other cards, one direction, peak
    link_latency_s: float  # of one all-reduce of nothing; assumed, not specified


_NVLINK_S, _PCIE_S = 10e-6, 30e-6
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80, 80e9, 2.04e12, 312e12, 300e9, _NVLINK_S),
        Gpu("h100", 90, 80e9, 3.35e12, 989e12, 450e9, _NVLINK_S),
        Gpu("h200", 90, 141e9, 4.8e12, 989e12, 450e9, _NVLINK_S),
        Gpu("h20", 90, 96e9, 4.0e12, 148e12, 450e9, _NVLINK_S),
        Gpu("l40s", 89, 48e9, 0.864e12, 362e12, 32e9, _PCIE_S),
        Gpu("b200", 100, 180e9, 8.0e12, 2250e12, 900e9, _NVLINK_S),
    )
}


def gpu_named(name: str) -> Gpu:
    found = GPUS.get(name.strip().lower())
    if found is None:
        raise VidSpecError(f"--gpu: unknown GPU {quoted(name)}; expected one of {', '.join(GPUS)}")
    return found
