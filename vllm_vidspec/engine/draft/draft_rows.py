"""What the drafter knows of each persistent row beside its block table; written on the host, read on the device."""

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


class DraftRows:
    """Per-row integers. Logical token t of a request (past its pruned prompt) is KV entry t - num_dropped.

    Args:
        max_num_reqs: Persistent rows.
        device: Where they live.
    """

    def __init__(self, max_num_reqs: int, device: torch.device):
        # [max_num_reqs]; rows that do not draft keep whatever they had
        self._num_dropped = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)
        self._pos_delta = StagedWriteTensor(max_num_reqs, dtype=torch.int64, device=device)
        self.num_dropped_np = np.zeros(max_num_reqs, dtype=np.int64)
        self.pos_delta_np = np.zeros(max_num_reqs, dtype=np.int64)
        # [max_num_reqs] nodes of the last drafts that were fed, so that their KV stands: bit j - 1 is node j
        self.fed = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)

    @property
    def num_dropped(self) -> torch.Tensor:
        """`[max_num_reqs]` int32 visual tokens that the draft does not see."""
        return self._num_dropped.gpu

    @property
    def pos_delta(self) -> torch.Tensor:
        """`[max_num_reqs]` int64 rope position minus logical position of the text after the prompt."""
        return self._pos_delta.gpu

    def stage(self, row: int, num_dropped: int, pos_delta: int) -> None:
        """Write a row of a request that begins; visible on the device after `apply`."""
        self.num_dropped_np[row] = num_dropped
        self.pos_delta_np[row] = pos_delta
        self._num_dropped.stage_write_elem(row, num_dropped)
        self._pos_delta.stage_write_elem(row, pos_delta)

    def forget(self, row: int) -> None:
        """Forget which drafts were fed: the row's next request has had none."""
        self.fed[row : row + 1].zero_()

    def apply(self) -> None:
        """Send the staged rows."""
        self._num_dropped.apply_write()
        self._pos_delta.apply_write()
