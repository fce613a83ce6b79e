"""vidspec_kernels: Triton kernels beside their torch references, a folder an operation; needs torch, triton and numpy.

`api.py` has the checked function, `triton.py` its kernels, `reference.py` the specification in numpy or torch, `cpu.py`
what numba compiles for CPUs. A small operation has all but the last in one file. Each function asserts that its tensors
have the dtypes, devices, shapes and strides that it states, and takes `impl` (see `dispatch.use_triton`).
"""

from vidspec_kernels.accept.api import accept
from vidspec_kernels.accept.reference import accept_reference
from vidspec_kernels.accept.tables import LOWEST, SHIFT, WINDOW, Looseness, Tally, TreeShapes
from vidspec_kernels.draft_step.begin_step import begin_step, begin_step_reference
from vidspec_kernels.draft_step.buffers import LevelBuffers, StepBuffers, StepTables
from vidspec_kernels.draft_step.next_level import next_level, next_level_reference
from vidspec_kernels.draft_tree.begin import tree_begin
from vidspec_kernels.draft_tree.buffers import TreeGrowBuffers
from vidspec_kernels.draft_tree.finish import Leaves, tree_finish
from vidspec_kernels.draft_tree.grow import tree_grow
from vidspec_kernels.draft_tree.place import PlacedLevel, tree_place
from vidspec_kernels.draft_tree.plan import tree_plan
from vidspec_kernels.draft_tree.tables import PlanRules, TreePlans, TreeTables, TreeTemplate
from vidspec_kernels.guidance_scores.api import guidance_scores
from vidspec_kernels.guidance_scores.reference import guidance_scores_reference
from vidspec_kernels.kv_compact.api import CacheList, kv_compact, kv_compact_reference
from vidspec_kernels.loosen.api import CHANCE, RELEVANCE, LooseTables, loosen, loosen_reference, random_scores
from vidspec_kernels.path_penalties.api import PenaltyTables, path_penalties, path_penalties_reference
from vidspec_kernels.place_trees.api import TreePlaces, place_trees, place_trees_reference
from vidspec_kernels.sampling.candidates import candidates, candidates_reference
from vidspec_kernels.sampling.draw import draw, draw_reference
from vidspec_kernels.sampling.noise import Noise, SampleScratch
from vidspec_kernels.tree_attention.api import TreeAttentionScratch, tree_attention
from vidspec_kernels.tree_attention.reference import tree_attention_reference
from vidspec_kernels.uv_scores.api import uv_scores_reference, uv_text_sum, uv_video_scores
from vidspec_kernels.visual_relevance.api import merge_relevance, visual_relevance
from vidspec_kernels.visual_relevance.reference import visual_relevance_reference
from vidspec_kernels.visual_relevance.store import storage_scale, store_states
from vidspec_kernels.windows.api import (
    NO_STREAM,
    NUM_ASKED,
    NUM_HEADERS,
    STALE,
    WINDOW_INFO_SIZE,
    copy_committed_suffix,
    copy_committed_suffix_reference,
    gather_draft_windows,
    gather_draft_windows_reference,
)  # fmt: skip

__all__ = [
    "CHANCE", "LOWEST", "NO_STREAM", "NUM_ASKED", "NUM_HEADERS", "RELEVANCE", "SHIFT", "STALE", "WINDOW",
    "WINDOW_INFO_SIZE", "CacheList", "Leaves", "LevelBuffers", "LooseTables", "Looseness", "Noise", "PenaltyTables",
    "PlacedLevel", "PlanRules", "SampleScratch", "StepBuffers", "StepTables", "Tally", "TreeAttentionScratch",
    "TreeGrowBuffers", "TreePlaces", "TreePlans", "TreeShapes", "TreeTables", "TreeTemplate", "accept",
    "accept_reference", "begin_step", "begin_step_reference", "candidates", "candidates_reference",
    "copy_committed_suffix", "copy_committed_suffix_reference", "draw", "draw_reference", "gather_draft_windows",
    "gather_draft_windows_reference", "guidance_scores", "guidance_scores_reference", "kv_compact",
    "kv_compact_reference", "loosen", "loosen_reference", "merge_relevance", "next_level", "next_level_reference",
    "path_penalties", "path_penalties_reference", "place_trees", "place_trees_reference", "random_scores",
    "storage_scale", "store_states", "tree_attention", "tree_attention_reference", "tree_begin", "tree_finish",
    "tree_grow", "tree_place", "tree_plan", "uv_scores_reference", "uv_text_sum", "uv_video_scores", "visual_relevance",
    "visual_relevance_reference",
]  # fmt: skip
