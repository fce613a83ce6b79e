"""A call of every operation, by name: what holds of all of them is tested on these."""

import functools

import torch

from tests.kernels import accept_requests, attention_case, relevance_inputs, sampling_case, step_case
from tests.kernels import test_draft_tree as tree
from tests.kernels import test_draft_tree_grow as grow
from tests.kernels import test_guidance_scores as guidance
from tests.kernels import test_kv_compact as compact
from tests.kernels import test_loosen as loosen
from tests.kernels import test_path_penalties as penalties
from tests.kernels import test_place_trees as place
from tests.kernels import test_windows as windows
from vidspec_kernels import guidance_scores, merge_relevance, visual_relevance


def guidance_case(device):
    inputs = guidance.make_inputs(device, requests=[(33, 70), (2, 67)], num_heads=1, num_kv_heads=1)
    lse = torch.full((len(inputs["query"]), 1), 8.0, device=device)
    return guidance_scores, inputs | {"out": guidance.make_out(inputs), "lse": lse}


def relevance_case(device):
    inputs = relevance_inputs.make_inputs(((65, (16, 8)), (1, (5,))), hidden=16, device=device)
    return visual_relevance, inputs | {"top_n": 2}


def merge_case(device):
    partials = torch.tensor([[[0.9, 0.5], [0.25, -torch.inf]], [[0.7, 0.6], [0.1, -0.5]]], device=device)
    return merge_relevance, {"partials": partials}


OPERATIONS = {
    "accept": functools.partial(accept_requests.case, in_trees=False, is_loose=False, max_drafts=25),
    "accept of trees": functools.partial(accept_requests.case, num_reqs=64),
    "begin_step": functools.partial(step_case.begin_case, num_reqs=20, num_picked=17, in_trees=True),
    "candidates": sampling_case.candidates_case,
    "copy_committed_suffix": windows.suffix_case,
    "draw": sampling_case.draw_case,
    "gather_draft_windows": functools.partial(windows.case, num_reqs=16),
    "guidance_scores": guidance_case,
    "kv_compact": functools.partial(compact.case, by_rows=True),
    "loosen": functools.partial(loosen.case, times=40, seed=1),
    "merge_relevance": merge_case,
    "next_level": functools.partial(step_case.level_case, size=129, frontier=0),
    "next_level of trees": functools.partial(step_case.level_case, size=43, frontier=3),
    "path_penalties": penalties.case,
    "place_trees": functools.partial(place.case, counts=(6, 6, 3, 1, 40), out_of_place=True),
    "tree_attention": attention_case.case,
    "tree_attention of a prefix": functools.partial(attention_case.case, has_prefix=True),
    "tree_begin": tree.begin_case,
    "tree_finish": tree.finish_case,
    "tree_grow": grow.level_case,
    "tree_place": tree.place_case,
    "tree_plan": tree.plan_case,
    "visual_relevance": relevance_case,
}
# Of these the kernel's sums are in another order than those on a CPU.
ROUNDED = {
    "candidates": 1e-5, "guidance_scores": 1e-4, "merge_relevance": 1e-6, "path_penalties": penalties.ROUNDED,
    "tree_attention": 2e-5, "tree_plan": 2e-6, "visual_relevance": 4e-6,
}  # fmt: skip
WITHOUT_LOOP = {"guidance_scores", "merge_relevance", "tree_attention"}
REFERENCES = {
    "guidance_scores": "_guidance_scores_torch", "merge_relevance": "_merge_relevance_torch",
    "tree_attention": "tree_attention_reference", "visual_relevance": "visual_relevance_reference",
}  # fmt: skip
