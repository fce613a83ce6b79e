"""SharedStreams: the drafter's streams as the target's device reads them when it cuts windows."""

import weakref
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d, get_accelerator_view_from_cpu_tensor

from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.parallel import Tables
from vllm_vidspec.parallel.tables import PAGE

logger = init_logger("vllm.vidspec")

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags


class SharedStreams:
    """The table itself, so that a window is cut from what stands there when the device comes to it.

    The host is ahead of a GPU by a step, with asynchronous scheduling by two: the table is mapped into the device's
    addresses. Where that fails, the device gets copies that are as old as the host is ahead, counted in
    `window_snapshots`.

    Attributes:
        is_direct: Whether the device reads the table itself.
    """

    def __init__(self, tables: Tables, device: torch.device, counters: Counters):
        self._tables, self._counters = tables, counters
        self._streams = torch.from_numpy(tables.streams)
        self.is_direct = device.type == "cpu"
        if not self.is_direct:
            try:
                self._streams, self.is_direct = self._map(), True
            except Exception as error:  # whatever it is: a driver, a container, a limit of locked memory
                logger.warning(
                    "vidspec: the device cannot read the drafter's streams (%s): windows are cut from copies that are "
                    "a step old, or two with asynchronous scheduling; fewer drafts stand",
                    error,
                )
                self._streams = torch.zeros_like(self._streams, device=device)

    def _map(self) -> torch.Tensor:
        """Return a view of the table at its device address.

        Raises:
            RuntimeError: The device reads something else than what the host writes.
        """
        host, pointer = self._streams, self._streams.data_ptr()
        num_bytes = -(-host.nbytes // PAGE) * PAGE
        error = torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, _PORTABLE_AND_MAPPED)
        if error.value:
            raise RuntimeError(f"cudaHostRegister: error {error.value}")
        weakref.finalize(self, _unregister, pointer, self._tables).atexit = False
        if not host.is_pinned():  # vLLM would return a view of a copy
            raise RuntimeError("registered memory does not count as pinned")
        view = get_accelerator_view_from_cpu_tensor(host)
        for number in (1, 0):
            host[-1, -1] = number
            if int(view[-1, -1]) != number:
                raise RuntimeError("it reads other memory than the host writes")
        return view

    def for_step(self, rows: torch.Tensor, rows_np: np.ndarray) -> torch.Tensor:
        """Return `[max_reqs, NUM_HEADERS + R]` int32 on the device, for `gather_draft_windows` of `[n]` int64 rows."""
        if not self.is_direct:
            self._counters.add("window_snapshots")
            self._streams[rows] = async_tensor_h2d(self._tables.streams[rows_np], device=rows.device)
        return self._streams


def _unregister(pointer: int, _tables: Any) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
