"""Drafting: which tokens a draft proposes, as trees batched over requests; pure torch, touches no model and no vLLM."""

from vllm_vidspec.drafting.adaptive import AdaptiveTree
from vllm_vidspec.drafting.static import StaticTree
from vllm_vidspec.drafting.tree import DraftTree, TreePolicy, candidates, chain_tables

__all__ = [
    "AdaptiveTree",
    "DraftTree",
    "StaticTree",
    "TreePolicy",
    "candidates",
    "chain_tables",
]
