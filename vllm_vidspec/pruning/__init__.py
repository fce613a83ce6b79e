"""Pruning: which visual tokens the draft sees. Pure torch, touches neither vLLM nor a model."""

from vllm_vidspec.pruning.base import SCORE_NEEDS, PruneInputs, Pruner
from vllm_vidspec.pruning.budget import budget
from vllm_vidspec.pruning.grid import TokenGrid
from vllm_vidspec.pruning.indices import linspace_indices
from vllm_vidspec.pruning.registry import get_pruner, needs_of

__all__ = [
    "SCORE_NEEDS",
    "PruneInputs",
    "Pruner",
    "TokenGrid",
    "budget",
    "get_pruner",
    "linspace_indices",
    "needs_of",
]
