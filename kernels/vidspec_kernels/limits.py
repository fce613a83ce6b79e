"""What a device has for a kernel's grid and tiles."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceLimits:
    """What a grid and a tile are made for."""

    num_sms: int  # Streaming multiprocessors
    shared_bytes: int  # Shared memory of a multiprocessor
    shared_bytes_per_program: int  # The most of it that one program may have
    capability: int  # Compute capability, 89 for 8.9


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a CUDA device, for "meta" of the current one; an H200's on a CPU."""
    if device.type == "cpu":
        return DeviceLimits(132, 228 * 1024, 227 * 1024, 90)
    properties = torch.cuda.get_device_properties(device if device.type == "cuda" else torch.cuda.current_device())
    return DeviceLimits(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin, 10 * properties.major + properties.minor,
    )  # fmt: skip


def shared_bytes_per_program(limits: DeviceLimits, programs_per_sm: int) -> int:
    """Return the shared memory that each of so many programs on a multiprocessor can have, less the driver's KB."""
    return min(limits.shared_bytes // programs_per_sm - 1024, limits.shared_bytes_per_program)
