"""Pruning: which visual tokens the draft sees. Pure torch, touches neither vLLM nor a model."""

from vllm_vidspec.pruning.base import SCORE_NEEDS, PruneInputs, Pruner
from vllm_vidspec.pruning.grid import TokenGrid, budget
from vllm_vidspec.pruning.pruners import get_pruner, linspace_indices, needs_of
