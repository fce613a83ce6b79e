"""tree_attention: equal shares of the work, an external prefix, the memory of calls."""

import importlib
import itertools
import math
from collections import Counter

import pytest
import torch

from tests.kernels import attention_case
from tests.kernels.attention_case import BLOCK, LIMITS, MIXED, NAN, SENTINEL, Case, check, requests_of, run
from vidspec_kernels.tree_attention import api as module
from vidspec_kernels.tree_attention import tiles
from vidspec_kernels.tree_attention import triton as kernel_file

IMPLS = ["triton", "torch"]


@pytest.mark.parametrize("dtype", list(attention_case.TOLERANCES))
@pytest.mark.parametrize("block_size", [16, 128])
def test_external_prefix(device, impl, dtype, block_size):
    """With the prefix's output and LSE given, the result is that of the whole; the prefix's KV entries are not read."""
    case = Case(device, requests_of(*MIXED, (3, 127), (4, 128)), dtype=dtype, block_size=block_size)
    out, lse = attention_case.external_prefix(case)  # here a sliced output and a transposed LSE
    fused = torch.full((out.shape[0], out.shape[1] + 2, out.shape[2] + 5), NAN, dtype=dtype, device=device)
    fused[:, 1:-1, 2:-3] = out
    prefix = (fused[:, 1:-1, 2:-3], lse.T.contiguous().T)
    check(case, impl, prefix=prefix)
    for i, request in enumerate(case.requests):
        for entry in range(request.prefix_len if request.words else 0):
            block = case.table[case.rows[i], entry // block_size].long()
            case.keys[block, entry % block_size] = NAN
            case.values[block, entry % block_size] = NAN
    check(case, impl, prefix=prefix)


def test_external_prefix_in_place(device, impl):
    """The prefix's output and LSE may be the outputs themselves: each row is read and written by one program."""
    case = Case(device, requests_of((65, 37), (3, 20)), num_heads=2, num_kv_heads=1)
    prefix = attention_case.external_prefix(case)
    expected, expected_lse = run(case, impl, prefix=prefix)
    out, lse = (tensor.clone() for tensor in prefix)
    run(case, impl, prefix=(out, lse), out=out, lse=lse)
    written = expected[:, 0, 0] != SENTINEL
    assert torch.equal(out[written], expected[written]) and torch.equal(lse[:, written], expected_lse[:, written])


@pytest.fixture
def taken(monkeypatch):
    """Count the tiles that each program of an interpreted launch takes."""
    if torch.cuda.is_available():
        pytest.skip("counts are the interpreter's")
    counts: Counter[int] = Counter()
    attend, interpreter = kernel_file._attend_tile, importlib.import_module("triton.runtime.interpreter")

    def counted(*args):
        counts[interpreter.interpreter_builder.grid_idx[0]] += 1
        return attend(*args)

    monkeypatch.setattr(kernel_file, "_attend_tile", counted)
    return counts


def shares(case: Case, num_sms: int) -> Counter[int]:
    """Return the tiles that each program of a float32 case takes, two programs on each of so many multiprocessors.

    A unit of work is a tile of keys, or the nodes of a row tile: one tile of them, two where any is past 32.
    """
    num_kv_heads, units, num_items = case.keys.shape[2], [], 0
    group = case.query.shape[1] // num_kv_heads
    tile = tiles.tile_shape(case.max_queries * group, case.query.shape[2], True, True, LIMITS)
    num_row_tiles, num_queries = math.ceil(case.max_queries * group / tile.block_rows), tile.block_rows // group
    for row_tile, request, _ in itertools.product(range(num_row_tiles), case.requests, range(num_kv_heads)):
        if words := request.words[num_queries * row_tile :][:num_queries]:
            num_items += 1
            num_key_tiles = math.ceil(request.prefix_len / tile.block_keys)
            units += [1] * num_key_tiles + [2 if any(word >> 32 for word in words) else 1]
    num_programs = min(2 * num_sms, max(len(units) // module.MIN_UNITS, num_items))
    if num_programs > num_row_tiles:
        num_programs -= num_programs % num_row_tiles
    bounds = [len(units) * program // num_programs for program in range(num_programs + 1)]
    return Counter({program: sum(units[slice(*ends)]) for program, ends in enumerate(itertools.pairwise(bounds))})


RAGGED = {
    # More than a program looks at at once.
    "one long among many": 20 * [(2, 30)] + [(2, 40 * BLOCK)] + 20 * [(1, 30)],
    "one tree among chains": [(40, 100)] + 7 * [(1, 300)],
    "padding between": [(0, 900), (3, 200), (0, 0), (0, 50), (3, 700), (0, 5)],
    "less work than programs": [(1, 10), (2, 0)],
}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("num_sms", [1, 4, 7])
def test_programs_take_their_shares(device, taken, name, num_sms):
    """The interpreted kernel takes the tiles that `shares` says. Catches: a share lost, done twice or left to one."""
    case = Case(device, requests_of(*RAGGED[name]), num_heads=2, num_kv_heads=1)
    check(case, "triton", scratch=attention_case.make_scratch(32, device, num_sms))
    assert taken == shares(case, num_sms)


def test_padding_changes_no_bit(device, monkeypatch):
    """Requests without rows, before, between and behind, leave the others' bits alone, whatever their tables hold."""
    monkeypatch.setattr(module, "MIN_UNITS", 1)
    case = Case(device, requests_of((5, 300), (3, 70)))
    out, lse = run(case, "triton")
    arguments, picked = case.arguments(), torch.tensor([0, 0, 1, 1, 1], device=device)
    is_padding = torch.tensor([True, False, True, False, True], device=device)
    padded = {name: arguments[name][picked] for name in ("rows", "query_start", "num_queries", "prefix_lens", "masks")}
    padded["num_queries"] = padded["num_queries"].masked_fill(is_padding, 0)
    padded["prefix_lens"] = padded["prefix_lens"].masked_fill(is_padding, 10**6)
    for impl in ("triton", "torch"):
        check(case, impl, **padded)
    again, again_lse = run(case, "triton", **padded)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_calls_share_their_scratch(device, monkeypatch):
    """Catches: a part of an earlier call taken for one of this."""
    monkeypatch.setattr(module, "MIN_UNITS", 1)
    scratch = attention_case.make_scratch(64, device, num_sms=5)
    cases = [
        Case(device, requests_of((3, 200), (2, 65)), num_heads=2, num_kv_heads=1),
        Case(device, requests_of((9, 20), (1, 300), (1, 0)), num_heads=2, num_kv_heads=1, head_size=64),
        Case(device, requests_of((1, 600)), num_heads=2, num_kv_heads=1),
    ]
    for case in cases:
        check(case, "triton", scratch=scratch)
    alone = attention_case.make_scratch(64, device, num_sms=5)
    for case in cases[:2]:
        assert torch.equal(run(case, "triton", scratch=scratch)[0], run(case, "triton", scratch=alone)[0])


def test_scratch_is_bounded(device):
    """17 MB for an H100's multiprocessors. Catches: memory that grows with a call; a tile that has no room there."""
    scratch = attention_case.make_scratch(128, device, num_sms=132)
    num_bytes = sum(memory.nbytes for memory in (scratch.part_out, scratch.part_lse))
    assert num_bytes == 132 * 4 * (256 * 128 + 256)
    for num_rows in (1, 7, 63, 64, 65, 455, 10_000):
        for head_size, widen in ((32, False), (80, False), (128, False), (256, False), (128, True)):
            tile = tiles.tile_shape(num_rows, head_size, widen, True, LIMITS)
            assert 2 * tile.programs_per_sm * tile.block_rows <= 256, tile


def test_the_launch_does_not_hang_on_lengths(device, monkeypatch):
    """The same grid and the same numbers for any lengths, as a captured launch has; the result follows the lengths."""
    launches, launch = [], module.launch

    def noting(kernel, grid, device, args, constants, plans, key, options=None):
        launches.append((grid, [arg for arg in args if not isinstance(arg, torch.Tensor)], constants, options))
        launch(kernel, grid, device, args, constants, plans, key, options)

    monkeypatch.setattr(module, "launch", noting)
    for shapes in ([(3, 5), (2, 700)], [(3, 400), (2, 0)]):
        check(Case(device, requests_of(*shapes), max_blocks=64, poison=NAN), "triton")
    assert len(launches) == 4 and launches[:2] == launches[2:]  # the merge of parts is a second one
