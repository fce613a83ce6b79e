"""What holds of every kernel: what runs, the same bits in any order of its programs, mistakes that are seen."""

import sys

import pytest
import torch
import triton
import triton.language as tl

import vidspec_kernels
from tests.kernels.agreement import agree, mutated
from tests.kernels.operations import OPERATIONS, REFERENCES, ROUNDED, WITHOUT_LOOP
from vidspec_kernels import dispatch

KERNELS = {"guidance_scores": ("_row_stats_kernel", "_guidance_scores_kernel")}  # not named as the operation alone


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_do_not_depend_on_the_order_of_programs(name, any_program_order, device):
    """Catches: a program that reads what another of its grid writes; a place that two programs write."""
    operation = name.split()[0]
    agree(OPERATIONS[name], device, atol=ROUNDED.get(operation, 0.0))
    kernels = [kernel for kernel, num_programs in any_program_order if num_programs > 1]
    assert f"_{operation}_kernel" in kernels, "the case has one program only"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if " " not in name])
def test_dispatch(name, branches, device):
    """Catches: a forced branch that silently runs the other, a wrong automatic choice, a typo that runs something."""
    ran = branches(name, KERNELS.get(name, ()), REFERENCES.get(name))
    on_host = "torch" if name in WITHOUT_LOOP else "numba"
    runs = {"auto": on_host, "triton": "triton", on_host: on_host} | ({"torch": "torch"} if name in REFERENCES else {})
    if device.type == "cuda":
        runs = {"auto": "triton", "triton": "triton"}
    for impl, expected in runs.items():
        wrapper, arguments = OPERATIONS[name](device)
        wrapper(**arguments, impl=impl)
        assert ran and set(ran) == {expected}, impl
        ran.clear()
    for impl in ("cpu", *([] if name in REFERENCES else ["torch"])):
        wrapper, arguments = OPERATIONS[name](device)
        with pytest.raises(ValueError, match="impl must be auto, triton"):
            wrapper(**arguments, impl=impl)
    assert not ran


# Of an operation's case, mistakes in the text of its kernel that are easily missed.
MUTATIONS = {
    "accept of trees": {
        "the first of the longest": ("(depth * RADIX - mismatches)", "(depth * RADIX)"),
        "placeholders counted": ("& (tl.load(has_draft_ptr + req_state_idx) != 0)", ""),
        "a window one short": ("depth[None, :] == window)", "depth[None, :] == window - 1)"),
    },
    "begin_step": {"fed is kept": ("tl.store(fed_ptr + row, tl.full([], 0, tl.int64))", "tl.store(fed_ptr + row, 1)")},
    "copy_committed_suffix": {"an end off by one": ("length - num_last + j", "length - num_last + j - 1")},
    "gather_draft_windows": {"stale at its end": ("(end > length)) | is_torn", "(end >= length - 99)) | is_torn")},
    "kv_compact": {
        "turns in reverse": (
            "range(first, num_accepted + 1, BLOCK_MOVES)",
            "reversed(range(first, num_accepted + 1, BLOCK_MOVES))"),
    },
    "loosen": {"what is unmeasured": ("((score == score) | (source != RELEVANCE))", "(row >= 0)")},
    "next_level of trees": {"another's bit": ("node - 1, 0)", "node, 0)")},
    "path_penalties": {"without its own draft": ("node = own_node\n", "node = tl.load(parents_ptr + own_node)\n")},
    "place_trees": {
        "a prompt's tail left out": (
            "range(BLOCK_COLS, num_tokens, BLOCK_TOKENS)",
            "range(BLOCK_COLS, 0, BLOCK_TOKENS)"),
    },
    "tree_attention": {
        "a prefix one entry long": ("entry_mask = entries < num_keys", "entry_mask = entries < num_keys + 1"),
        "parts weighted equally": ("weights = tl.exp2(part_lse - shift)", "weights = tl.exp2(shift - shift)"),
        "parts of the next item": ("(some_reqs < req_idx)", "(some_reqs <= req_idx)"),
    },
    "tree_attention of a prefix": {
        "a prefix weighted equally": (
            'row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)',
            "row_max = tl.zeros_like(row_max)"),
    },
    "tree_begin": {"a mean of one length more": ("num_observed + 1, WINDOW", "num_observed + 2, WINDOW")},
    "tree_finish": {"another's plan": ("tl.store(depths_ptr + row, depth)", "tl.store(depths_ptr + req_idx, depth)")},
    "tree_grow": {"nodes that are reserved": ("next_free = depth + 1", "next_free = depth")},
    "tree_place": {"another request's candidates": ("token_ids_ptr += req_idx * num_offered", "token_ids_ptr += 0")},
    "tree_plan": {"eq. 10 for eq. 11": ("(1.0 - alpha) * width_range", "alpha * width_range")},
    "visual_relevance": {
        "stale rows": (
            "valid = entry % BLOCK_ROWS < tl.load(block_fill_ptr + block, mask=listed, other=0)",
            "valid = listed"),
        "a block early": ("* BLOCK_ROWS\n    share", "* BLOCK_ROWS - BLOCK_ROWS\n    share"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), [(name, mistake) for name in MUTATIONS for mistake in MUTATIONS[name]])
def test_mutations(name, mistake, device, tmp_path):
    """Kernel and what runs on a CPU no longer agree, which they do above."""
    operation = name.split()[0]
    owner, atol = sys.modules[getattr(vidspec_kernels, operation).__module__], ROUNDED.get(operation, 0.0)
    with mutated(tmp_path, owner, f"_{operation}_kernel", MUTATIONS[name][mistake]), pytest.raises(AssertionError):
        agree(OPERATIONS[name], device, atol=atol)


def test_every_loop_is_compared():
    """Catches: a loop that no case above runs."""
    compared = {name.split()[0] for name in OPERATIONS} - WITHOUT_LOOP
    loops = {
        name.removeprefix("bind_") for name in dispatch.load_loops() if name in compared or name.startswith("bind_")
    }
    assert loops == compared and set(MUTATIONS) <= set(OPERATIONS)


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
