"""vidspec_kernels: Triton kernels beside their torch references; needs torch, triton and numpy only."""

from vidspec_kernels.accept import LOWEST, SHIFT, WINDOW, Looseness, Tally, TreeShapes, accept, accept_reference
from vidspec_kernels.begin_step import begin_step, begin_step_reference
from vidspec_kernels.candidates import candidates, candidates_reference
from vidspec_kernels.draw import draw, draw_reference
from vidspec_kernels.guidance_scores import guidance_scores, guidance_scores_reference
from vidspec_kernels.kv_compact import CacheList, kv_compact, kv_compact_reference
from vidspec_kernels.loosen import CHANCE, RELEVANCE, LooseTables, loosen, loosen_reference, random_scores
from vidspec_kernels.next_level import next_level, next_level_reference
from vidspec_kernels.path_penalties import PenaltyTables, path_penalties, path_penalties_reference
from vidspec_kernels.place_trees import TreePlaces, place_trees, place_trees_reference
from vidspec_kernels.sampling import Noise, SampleScratch
from vidspec_kernels.step_buffers import LevelBuffers, StepBuffers, StepTables
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
from vidspec_kernels.windows import (
    NO_STREAM,
    NUM_ASKED,
    NUM_HEADERS,
    NUM_TOLD,
    STALE,
    take_windows,
    take_windows_reference,
    text_tails,
    text_tails_reference,
)

__all__ = [
    "CHANCE",
    "LOWEST",
    "NO_STREAM",
    "NUM_ASKED",
    "NUM_HEADERS",
    "NUM_TOLD",
    "RELEVANCE",
    "SHIFT",
    "STALE",
    "WINDOW",
    "CacheList",
    "LevelBuffers",
    "LooseTables",
    "Looseness",
    "Noise",
    "PenaltyTables",
    "SampleScratch",
    "StepBuffers",
    "StepTables",
    "Tally",
    "TreeAttentionScratch",
    "TreePlaces",
    "TreeShapes",
    "accept",
    "accept_reference",
    "begin_step",
    "begin_step_reference",
    "candidates",
    "candidates_reference",
    "draw",
    "draw_reference",
    "guidance_scores",
    "guidance_scores_reference",
    "kv_compact",
    "kv_compact_reference",
    "loosen",
    "loosen_reference",
    "merge_relevance",
    "next_level",
    "next_level_reference",
    "path_penalties",
    "path_penalties_reference",
    "place_trees",
    "place_trees_reference",
    "random_scores",
    "storage_scale",
    "store_states",
    "take_windows",
    "take_windows_reference",
    "text_tails",
    "text_tails_reference",
    "tree_attention",
    "tree_attention_reference",
    "uv_scores_reference",
    "uv_text_sum",
    "uv_video_scores",
    "visual_relevance",
    "visual_relevance_reference",
]
