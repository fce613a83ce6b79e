"""Pruning: which visual tokens the draft sees; pure torch, touches neither vLLM nor a model."""

from vllm_vidspec.pruning.budget import budget
from vllm_vidspec.pruning.grid import TokenGrid
from vllm_vidspec.pruning.pruners import Pruner, get_pruner, linspace_indices, pruner_names, register_pruner

__all__ = ["Pruner", "TokenGrid", "budget", "get_pruner", "linspace_indices", "pruner_names", "register_pruner"]
