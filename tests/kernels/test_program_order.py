"""Kernels leave the same bits in whatever order the programs of a grid run: else programs of a GPU would race."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

LEVEL, LOOSE_TREES = {"impl": "triton", "num_pos_axes": 3}, {"in_trees": True, "is_loose": True}
# Kernels (and what is special), their modules' tests that are run again, and those tests' parameters.
CASES = {
    "accept": ("test_kernel_equals_references_at_a_real_size", {"in_trees": False, "is_loose": False}),
    "accept strict trees": ("test_kernel_equals_references_at_a_real_size", {"in_trees": True, "is_loose": False}),
    "accept loose trees": ("test_equals_the_oracle", LOOSE_TREES | {"impl": "triton", "num_reqs": 16, "max_drafts": 8}),
    "guidance_scores": ("test_numbers_of_rows", {"impl": "triton", "num_queries": 33}),
    "kv_compact": ("test_equals_the_loop", {"impl": "triton", "max_drafts": 25, "layout": "NHD"}),
    "place_trees": ("test_equals_the_loop", {"impl": "triton", "batch": "cut", "num_axes": 3, "out_of_place": False}),
    "begin_step": ("test_equals_the_loop", {"impl": "triton", "in_trees": True, "num_reqs": 9, "num_picked": 4}),
    "candidates": ("test_noise", {"impl": "triton", "width": 3, "first": 2, "apply_temperature": True}),
    "draw": ("test_equals_the_argmax", {"impl": "triton", "vocab_size": 2100, "dtype": torch.bfloat16}),
    "next_level": ("test_equals_the_loop", LEVEL | {"size": 129, "frontier": 0}),
    "next_level of trees": ("test_equals_the_loop", LEVEL | {"size": 43, "frontier": 3}),
    "tree_attention": ("test_shares", {"impl": "triton", "num_sms": 5}),
    "tree_begin": ("test_trees_become_their_template", {"impl": "triton", "num_reqs": 3, "max_nodes": 7}),
    "tree_finish": (
        "test_leaves_are_the_best_candidates",
        {"impl": "triton", "num_nodes": [2, 5], "num_parents": 3, "num_candidates": 5, "max_nodes": 7, "width": 9},
    ),
    "tree_grow": ("test_kernel_equals_reference_at_a_real_size", {"num_reqs": 3}),
    "tree_place": (
        "test_equals_the_loop",
        {"impl": "triton", "num_reqs": 3, "frontier": 4, "num_candidates": 5, "num_placed": 9, "num_fed": 4},
    ),
    "tree_plan": ("test_kernel_equals_reference_at_a_real_size", {}),
    "take_windows": ("test_equals_the_loop", {"impl": "triton", "num_reqs": 9, "ring": 16}),
    "text_tails": ("test_tails_equal_the_loop", {"impl": "triton", "num_reqs": 9}),
    "visual_relevance": ("test_splits_with_ties", {"num_slots": 3, "top_n": 3}),
}
MODULES = {"take_windows": "windows", "text_tails": "windows"}  # where a module has several


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_order_of_programs(name, any_program_order, device, monkeypatch):
    """Catches: a program that reads what another of its grid writes; a place that two programs write."""
    test, arguments = CASES[name]
    name = name.split()[0]
    function = getattr(importlib.import_module(f"test_{MODULES.get(name, name)}"), test)
    offered = {"device": device, "monkeypatch": monkeypatch} | arguments
    code = function.__code__
    function(**{argument: offered[argument] for argument in code.co_varnames[: code.co_argcount]})
    kernels = [kernel for kernel, num_programs in any_program_order if num_programs > 1]
    assert f"_{name}_kernel" in kernels, "the case has one program only"


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
