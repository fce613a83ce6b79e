"""Drafting: which tokens a draft proposes, as trees batched over requests; touches no model and no vLLM."""

import torch

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.drafting.adaptive import AdaptiveTree
from vllm_vidspec.drafting.static import StaticTree
from vllm_vidspec.drafting.tree import DraftTree, TreePolicy, topology_tables


def make_policy(shape: str, config: VidSpecConfig, max_num_reqs: int, device: torch.device) -> TreePolicy:
    """Return the policy of a tree shape."""
    if shape == "tree-adaptive":
        return AdaptiveTree(max_num_reqs, config.num_speculative_tokens, device)
    return StaticTree(max_num_reqs, device, config.paths_of(shape), config.num_speculative_tokens)
