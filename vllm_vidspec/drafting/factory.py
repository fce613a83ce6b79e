"""Which policy a configuration asks for."""

import torch

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.drafting.adaptive import AdaptiveTree, SageKnobs
from vllm_vidspec.drafting.static import StaticTree
from vllm_vidspec.drafting.tree import TreePolicy


def make_policy(shape: str, config: VidSpecConfig, max_num_reqs: int, device: torch.device) -> TreePolicy:
    """Return the policy of a tree shape, "tree-static" or "tree-adaptive"."""
    if shape == "tree-static":
        return StaticTree(max_num_reqs, device, config.static_paths, config.num_speculative_tokens)
    knobs = SageKnobs(
        depth_min=config.tree_depth_min,
        depth_max=config.tree_depth_max,
        width_min=config.tree_width_min,
        width_max=config.tree_width_max,
        entropy_top_k=config.tree_entropy_top_k,
        threshold=config.tree_threshold,
        history_window=max(config.tree_history, 1),
        history_low=config.tree_history_low,
        history_high=config.tree_history_high,
        use_history=config.tree_history > 0,
        use_lookahead=config.tree_lookahead,
    )
    return AdaptiveTree(max_num_reqs, config.num_speculative_tokens, device, knobs)
