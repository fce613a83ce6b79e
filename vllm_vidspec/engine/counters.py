"""What the worker counts: device accumulators read back without a host sync, and the file that /metrics shows."""

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.errors import VidSpecError

logger = init_logger("vllm.vidspec")


class Counters:
    """Counts of one worker; only tensor-parallel rank 0 publishes."""

    def __init__(self, vllm_config, device: torch.device, max_num_reqs: int, num_speculative_tokens: int):
        # [3 + K]: verify steps with drafts, drafted, accepted, accepted at each position
        self._totals = torch.zeros(3 + num_speculative_tokens, dtype=torch.int64, device=device)
        self._positions = torch.arange(num_speculative_tokens, device=device)  # [K]
        # [max_num_reqs] whether the persistent row's scheduled draft tokens are real
        self.has_draft = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros_like(self._totals, device="cpu", pin_memory=self._on_gpu)
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._published = np.zeros(len(self._host), dtype=np.int64)
        self._file = self._open(vllm_config)
        self._logged: set[str] = set()

    @staticmethod
    def _open(vllm_config) -> metrics.MetricsFile | None:
        if get_tensor_model_parallel_rank() != 0:
            return None
        try:
            return metrics.MetricsFile.open(metrics.path_for(vllm_config.instance_id))
        except VidSpecError as error:  # a worker on another host than the API server
            logger.warning("vidspec: counters are not published: %s", error)
            return None

    def observe(self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, cu_num_logits: torch.Tensor) -> None:
        """Add one verify step.

        Args:
            idx_mapping: `[num_reqs]` int64 persistent rows.
            num_sampled: `[num_reqs]` int32, accepted drafts plus the target's own token.
            cu_num_logits: `[num_reqs + 1]` int32; a request has one logits row more than drafts.
        """
        num_drafts = (cu_num_logits[1:] - cu_num_logits[:-1] - 1) * self.has_draft[idx_mapping]  # [num_reqs]
        counted = num_drafts > 0
        accepted = (num_sampled - 1) * counted
        self._totals[0] += counted.sum()
        self._totals[1] += num_drafts.sum()
        self._totals[2] += accepted.sum()
        self._totals[3:] += (self._positions < accepted[:, None]).sum(0)

    def flush(self) -> None:
        """Publish what the device has counted; on a GPU what it had counted when the last copy finished."""
        if self._file is None:
            return
        if self._copied is None:
            self._host.copy_(self._totals)
        elif not self._copied.query():
            return
        gained = self._host.numpy() - self._published
        if gained.any():
            for name, value in zip(("drafts", "draft_tokens", "accepted_tokens"), gained.tolist(), strict=False):
                self._file.add(name, value)
            self._file.add_accepted_per_position(gained[3:])
            self._published += gained
        if self._copied is not None:
            self._host.copy_(self._totals, non_blocking=True)
            self._copied.record()

    def add(self, name: str, value: int = 1) -> None:
        """Add to a host-side counter."""
        if self._file is not None:
            self._file.add(name, value)

    def set(self, name: str, value: int) -> None:
        """Set a gauge."""
        if self._file is not None:
            self._file.set(name, value)

    def skip(self, reason: str, req_id: str, detail: str) -> None:
        """Count a request that runs without speculation; the first of each reason is logged."""
        self.add(f"skipped_{reason}")
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "vidspec: request %s runs without speculation: %s (further ones are only counted)", req_id, detail
            )
