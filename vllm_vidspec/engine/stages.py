"""Pipeline stages of the target: vLLM's runner before the last, ours on the last, where the draft is.

vLLM sends to the earlier ones tokens, and nothing that says that drafts are a tree; nor do they send what they observe.
"""

import contextlib
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_vidspec.config import METHOD, VidSpecConfig
from vllm_vidspec.engine.knobs import Knobs


class EarlierStage(GPUModelRunner):
    """A stage before the last: nothing is drafted, observed or counted; what all workers are asked, it answers."""

    uncounted = staticmethod(contextlib.nullcontext)

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        self.knobs = Knobs(VidSpecConfig(**vllm_config.additional_config[METHOD]))

    def reserve(self, available_bytes: int) -> int:
        return 0

    def forget_kv(self) -> None:
        """Nothing of ours lies in this stage's KV memory."""


def is_last() -> bool:
    return get_pp_group().is_last_rank
