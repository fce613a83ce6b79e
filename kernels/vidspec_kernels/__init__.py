"""vidspec_kernels: Triton kernels and what they must compute, a folder an operation; needs torch, triton and numpy.

`api.py` has the checked function, `triton.py` its kernels. What they must compute is said by `cpu.py`, loops that numba
compiles for CPUs, and where products of matrices are the work by `reference.py`, in torch. A small operation has all
but the loops in one file. Each function asserts that its tensors have the dtypes, devices, shapes and strides that it
states, and takes `impl` (see `dispatch.use_triton`).
"""

from vidspec_kernels.accept.api import accept
from vidspec_kernels.accept.tables import LOWEST, SHIFT, WINDOW, Looseness, Tally, TreeShapes
from vidspec_kernels.draft_step.begin_step import begin_step
from vidspec_kernels.draft_step.buffers import LevelBuffers, StepBuffers, StepTables
from vidspec_kernels.draft_step.next_level import next_level
from vidspec_kernels.draft_tree.begin import tree_begin
from vidspec_kernels.draft_tree.buffers import TreeGrowBuffers
from vidspec_kernels.draft_tree.finish import Leaves, tree_finish
from vidspec_kernels.draft_tree.grow import tree_grow
from vidspec_kernels.draft_tree.place import PlacedLevel, tree_place
from vidspec_kernels.draft_tree.plan import tree_plan
from vidspec_kernels.draft_tree.tables import PlanRules, TreePlans, TreeTables, TreeTemplate
from vidspec_kernels.float8 import NO_SCALES, Scales
from vidspec_kernels.guidance_scores.api import guidance_scores
from vidspec_kernels.kv_compact.api import CacheList, kv_compact
from vidspec_kernels.loosen.api import CHANCE, RELEVANCE, LooseTables, loosen
from vidspec_kernels.path_penalties.api import PenaltyTables, path_penalties
from vidspec_kernels.place_trees.api import TreePlaces, place_trees
from vidspec_kernels.sampling.candidates import candidates, candidates_reference
from vidspec_kernels.sampling.draw import draw, draw_reference
from vidspec_kernels.sampling.noise import Noise, SampleScratch
from vidspec_kernels.tree_attention.api import TreeAttentionScratch, tree_attention
from vidspec_kernels.uv_scores.api import uv_text_sum, uv_video_scores
from vidspec_kernels.visual_relevance.api import merge_relevance, visual_relevance
from vidspec_kernels.visual_relevance.store import storage_scale, store_states
from vidspec_kernels.windows.api import (
    NO_STREAM,
    NUM_ASKED,
    NUM_HEADERS,
    STALE,
    WINDOW_INFO_SIZE,
    copy_committed_suffix,
    gather_draft_windows,
)  # fmt: skip
