"""Observer: sees what is pruned and verified, and changes nothing. A runner has a list of them."""

from typing import Any

import torch

from vllm_vidspec.scoring import Scored


class Observer:
    """Sees what is pruned of each prompt, and what becomes of each draft; it overrides what it has use for."""

    keeps_embeddings: bool = False  # whether a `PrefillJob` keeps all embeddings of an item that its pruner compares

    def pruned(self, job: Any, kept: list[torch.Tensor]) -> None:
        """Take note of a `PrefillJob` whose items are all there, and of what stays of each, `[k_i]` int64."""

    def verified(self, part: Any, scored: Scored) -> None:
        """Take note of a `VerifySlice`, and of what was accepted in it."""
