"""Pruning: which visual tokens the draft sees. Pure torch, touches neither vLLM nor a model."""

from vllm_vidspec.pruning.base import (
    SCORE_NEEDS,
    PruneInputs,
    Pruner,
    get_pruner,
    needs_of,
    pruner_names,
    register_pruner,
)
from vllm_vidspec.pruning.budget import budget
from vllm_vidspec.pruning.grid import TokenGrid
from vllm_vidspec.pruning.guided import GUIDED
from vllm_vidspec.pruning.indices import linspace_indices
from vllm_vidspec.pruning.temporal import TEMPORAL
from vllm_vidspec.pruning.unguided import NONE, UNGUIDED

__all__ = [
    "SCORE_NEEDS",
    "PruneInputs",
    "Pruner",
    "TokenGrid",
    "budget",
    "get_pruner",
    "linspace_indices",
    "needs_of",
    "pruner_names",
    "register_pruner",
]

for _pruner in (NONE, *GUIDED, *UNGUIDED, *TEMPORAL):
    register_pruner(_pruner)
