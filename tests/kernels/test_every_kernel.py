"""What holds of every kernel: what runs, and the same bits in whatever order the programs of a grid run."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.impls import branch

TREES = {"in_trees": True, "is_loose": True}
# Of every kernel (and what is special) a test that is run again, and its parameters but the implementation.
CASES = {
    "accept": ("accept.test_equals_the_oracle",
               {"in_trees": False, "is_loose": False, "num_reqs": 16, "max_drafts": 25}),
    "accept of trees": ("accept.test_equals_the_oracle", TREES | {"num_reqs": 16, "max_drafts": 8}),
    "loosen": ("loosen.test_more_rows_than_a_program_takes", {}),
    "guidance_scores": ("guidance_scores.test_sizes", {"name": "33 rows"}),
    "kv_compact": ("kv_compact.test_equals_the_loop", {"max_drafts": 25, "layout": "NHD"}),
    "path_penalties": ("path_penalties.test_equals_a_walk_by_hand", {"vocab_size": 97}),
    "place_trees": ("place_trees.test_equals_the_loop", {"batch": "cut", "num_axes": 3, "out_of_place": False}),
    "begin_step": ("draft_step.test_begin_equals_the_loop", {"in_trees": True, "num_reqs": 9, "num_picked": 4}),
    "next_level": ("draft_step.test_level_equals_the_loop", {"size": 129, "frontier": 0, "num_pos_axes": 3}),
    "next_level of trees": ("draft_step.test_level_equals_the_loop", {"size": 43, "frontier": 3, "num_pos_axes": 3}),
    "candidates": ("sampling.test_noise_of_candidates", {"width": 3, "first": 2, "apply_temperature": True}),
    "draw": ("sampling.test_draw_equals_the_argmax", {"vocab_size": 2100, "dtype": torch.bfloat16}),
    "tree_attention": ("tree_attention.test_shares", {"num_sms": 5}),
    "tree_begin": ("draft_tree.test_trees_become_their_template", {"num_reqs": 3, "max_nodes": 7}),
    "tree_finish": ("draft_tree.test_leaves_are_the_best_candidates",
                    {"num_nodes": [2, 5], "num_parents": 3, "num_candidates": 5, "max_nodes": 7, "width": 9}),
    "tree_grow": ("draft_tree_grow.test_equals_the_loop", {"num_candidates": 5, "budget": 9}),
    "tree_place": ("draft_tree.test_place_equals_the_loop",
                   {"num_reqs": 3, "frontier": 4, "num_candidates": 5, "num_placed": 9, "num_fed": 4}),
    "tree_plan": ("draft_tree.test_plans_are_the_formulas",
                  {"adopts": True, "num_reqs": 33, "top_k": 8, "num_candidates": 8}),
    "gather_draft_windows": ("windows.test_equals_the_loop", {"num_reqs": 9, "ring": 16}),
    "copy_committed_suffix": ("windows.test_tails_equal_the_loop", {"num_reqs": 9}),
    "visual_relevance": ("visual_relevance.test_sizes", {"name": "65 queries, top 2"}),
}  # fmt: skip
KERNELS = {  # of an operation that has others than its own name says, and what runs on a CPU
    "guidance_scores": {"kernels": ("_row_stats_kernel", "_guidance_scores_kernel"), "other": "_guidance_scores_torch"},
}
WITHOUT_LOOP = {"guidance_scores", "tree_attention"}


@pytest.fixture
def again(device, monkeypatch):
    """Return a function that runs a case by an implementation."""

    def run(name, impl):
        place, arguments = CASES[name]
        module, test = place.split(".")
        function = getattr(importlib.import_module(f"tests.kernels.test_{module}"), test)
        offered = {"device": device, "monkeypatch": monkeypatch, "impl": impl} | arguments
        code = function.__code__
        function(**{argument: offered[argument] for argument in code.co_varnames[: code.co_argcount]})

    return run


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_order_of_programs(name, any_program_order, again):
    """Catches: a program that reads what another of its grid writes; a place that two programs write."""
    again(name, "triton")
    kernels = [kernel for kernel, num_programs in any_program_order if num_programs > 1]
    assert f"_{name.split()[0]}_kernel" in kernels, "the case has one program only"


@pytest.mark.parametrize("name", [name for name in CASES if " " not in name])
def test_dispatch(name, branches, again, device):
    """Catches: a forced branch that silently runs the other, a wrong automatic choice, a typo that runs something."""
    ran = branches(name, **KERNELS.get(name, {}))
    for impl in ("auto", "triton", "torch", *([] if name in WITHOUT_LOOP else ["numba"])):
        again(name, impl)
        expected = impl if name in WITHOUT_LOOP and impl != "auto" else branch(impl, device)
        if name in WITHOUT_LOOP and impl == "auto":
            expected = "triton" if device.type == "cuda" else "torch"
        assert ran and set(ran) == {expected}, impl
        ran.clear()
    with pytest.raises(ValueError, match="auto, triton, numba or torch"):
        again(name, "cpu")


@triton.jit
def _last_one_wins(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def _reads_its_neighbour(out_ptr):
    program = tl.program_id(0)
    tl.store(out_ptr + program + 1, tl.load(out_ptr + program) + 1)


@triton.jit
def _owns_its_place(out_ptr):
    tl.store(out_ptr + tl.program_id(0), tl.program_id(0))


@pytest.mark.parametrize("kernel", [_last_one_wins, _reads_its_neighbour])
def test_a_race_is_seen(kernel, any_program_order):
    """The instrument: a place written by all programs, and one program that needs another's result."""
    out = torch.zeros(9, dtype=torch.int32)
    with pytest.raises(AssertionError, match="depends on the order"):
        kernel[(8,)](out)
    _owns_its_place[(8,)](out)
    assert any_program_order == [(kernel.fn.__name__, 8), ("_owns_its_place", 8)]
