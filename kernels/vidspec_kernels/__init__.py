"""vidspec_kernels: Triton kernels beside their torch references; needs torch, triton and numpy only."""

from vidspec_kernels.accept import LOWEST, SHIFT, WINDOW, Looseness, TreeShapes, accept, accept_reference
from vidspec_kernels.guidance_scores import guidance_scores, guidance_scores_reference
from vidspec_kernels.kv_compact import CacheList, kv_compact, kv_compact_reference
from vidspec_kernels.step import step, step_reference
from vidspec_kernels.tree_attention import TreeAttentionScratch, tree_attention
from vidspec_kernels.tree_attention_reference import tree_attention_reference
from vidspec_kernels.uv_scores import uv_scores_reference, uv_text_sum, uv_video_scores
from vidspec_kernels.visual_relevance import (
    merge_relevance,
    storage_scale,
    store_states,
    visual_relevance,
    visual_relevance_reference,
)

__all__ = [
    "LOWEST",
    "SHIFT",
    "WINDOW",
    "CacheList",
    "Looseness",
    "TreeAttentionScratch",
    "TreeShapes",
    "accept",
    "accept_reference",
    "guidance_scores",
    "guidance_scores_reference",
    "kv_compact",
    "kv_compact_reference",
    "merge_relevance",
    "step",
    "step_reference",
    "storage_scale",
    "store_states",
    "tree_attention",
    "tree_attention_reference",
    "uv_scores_reference",
    "uv_text_sum",
    "uv_video_scores",
    "visual_relevance",
    "visual_relevance_reference",
]
