"""Compiled loops that run instead of the numpy references on a CPU: the kernels' own programs, one element at a time.

The references say what is meant, in array operations of which each costs a microsecond or more, and a decode step makes
thousands. Here what is one launch on a GPU is one call, compiled by numba. `tests/kernels` ask both, and the Triton
kernels, for the same results.

Loops are compiled when they are imported and kept beside this file; the CPU engine imports them while it loads. Each
file stands by itself, and constants of others are arguments: numba's cache knows of a file when it has changed, not of
what that file imports.
"""

from vidspec_kernels.cpu.compaction import kv_compact
from vidspec_kernels.cpu.penalties import path_penalties
from vidspec_kernels.cpu.relevance import visual_relevance
from vidspec_kernels.cpu.sampling import bind_candidates, bind_draw
from vidspec_kernels.cpu.steps import begin_step, bind_next_level
from vidspec_kernels.cpu.trees import bind_tree_grow, tree_begin, tree_finish, tree_place, tree_plan
from vidspec_kernels.cpu.verify import accept, loosen, place_trees
from vidspec_kernels.cpu.windows import take_windows, text_tails

# By the reference that each stands in for; all take its arguments, those that bind a call too.
LOOPS = {
    f"{loop.__name__}_reference": loop
    for loop in (
        accept, begin_step, bind_candidates, bind_draw, bind_next_level, bind_tree_grow, kv_compact, loosen,
        path_penalties, place_trees, take_windows, text_tails, tree_begin, tree_finish, tree_place, tree_plan,
        visual_relevance,
    )
}  # fmt: skip
