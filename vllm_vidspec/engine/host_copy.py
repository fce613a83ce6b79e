"""HostCopy: a tensor on its way from the device to the host, without a wait on the critical path."""

import torch


class HostCopy:
    """Begins to copy a tensor to the host; on a GPU into pinned memory, behind what is queued already.

    Who asks a step later waits for the step before at most, which the host has to wait for anyway. Whether a copy
    `is_here` at once follows from the device alone, so that tensor-parallel ranks agree on it.

    Args:
        tensor: Any, on any device.
    """

    def __init__(self, tensor: torch.Tensor):
        self.is_here = tensor.device.type == "cpu"
        self._host = tensor
        if not self.is_here:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host, once it has arrived."""
        if not self.is_here:
            self._copied.synchronize()
        return self._host
