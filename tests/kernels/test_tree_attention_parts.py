"""tree_attention: equal shares of the work, an external prefix, the memory of calls, planted mistakes in its source."""

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.kernels import attention_case
from tests.kernels.agreement import mutated
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


MUTATIONS = {
    "a sibling's bit leaks into the mask": {
        "triton": [("(word[:, None] >> node[None, :]) & 1", "(word[:, None] >> node[None, :]) & 3")],
        "torch": [("& _BITS[:num_nodes].to(rows.device)", "& (_BITS | _BITS << 1)[:num_nodes].to(rows.device)")],
    },
    "a prefix one entry short": {
        "triton": [("entry_mask = entries < num_keys", "entry_mask = entries < num_keys - 1")],
        "torch": [("entry < prefix_end", "entry < prefix_end - 1")],
    },
    "a prefix one entry long": {
        "triton": [("entry_mask = entries < num_keys", "entry_mask = entries < num_keys + 1")],
        "torch": [("valid[:, 0])[:, None].to(torch.int64)", "valid[:, 0])[:, None].to(torch.int64) + 1")],
    },
    "parts averaged, not weighted by their LSE": {
        "triton": [
            ("weights = tl.exp2(part_lse - shift)", "weights = tl.where(part_lse == float('-inf'), 0.0, 1.0)"),
            ("correction = tl.exp2(top - shift)", "correction = tl.full([MERGE_ROWS], 1.0, tl.float32)"),
            ('row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)', "row_max = tl.zeros_like(row_max)"),
        ],
        "torch": [("return out * weight + prefix_out * prefix_weight", "return out * 0.5 + prefix_out * 0.5")],
    },
    "heads of a group spread over the KV heads": {
        "triton": [
            ("first_head = kv_head * GROUP", "first_head = kv_head"),
            ("head = row % GROUP", "head = row % GROUP * 2"),
        ],
        "torch": [(
            "view(num_reqs, max_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)",
            "view(num_reqs, max_queries, -1, num_kv_heads, head_size).permute(0, 3, 2, 1, 4)",
        )],
    },
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(device, impl, mutation, tmp_path, monkeypatch):
    """`check`, which every test above rests on, fails for each of these changes of kernel and reference."""
    monkeypatch.setattr(module, "MIN_UNITS", 1)
    case = Case(device, requests_of((5, 150), (6, 20)), num_heads=6, num_kv_heads=2, poison=1.0)
    external: dict = {"prefix": attention_case.external_prefix(case)}
    # Only the kernel merges parts; both merge an external prefix.
    merges = [external] if impl == "torch" else [{}, external]
    for changes in merges if "LSE" in mutation else [{}]:
        check(case, impl, **changes)
        name = "_tree_attention_kernel" if impl == "triton" else "tree_attention_reference"
        seen = pytest.raises(AssertionError, match="Tensor-likes are not close")
        with mutated(tmp_path, module, name, *MUTATIONS[mutation][impl]), seen:
            check(case, impl, **changes)


@pytest.fixture
def taken(monkeypatch):
    """Count the tiles that each program of an interpreted launch takes."""
    if torch.cuda.is_available():
        pytest.skip("counts are the interpreter's")
    counts: Counter[int] = Counter()
    attend, builder = (
        kernel_file._attend_tile,
        importlib.import_module("triton.runtime.interpreter").interpreter_builder,
    )

    def counted(*args):
        counts[builder.grid_idx[0]] += 1
        return attend(*args)

    monkeypatch.setattr(kernel_file, "_attend_tile", counted)
    return counts


@dataclass(frozen=True)
class Piece:
    """Consecutive units of one item: key tiles first, then one for the nodes."""

    row_tile: int
    req_idx: int
    kv_head: int
    begin: int
    end: int
    num_units: int


def shares(
    num_queries: Sequence[int], prefix_lens: Sequence[int], group: int, num_kv_heads: int, tile: tiles.TileShape,
    num_row_tiles: int, grid: int,
) -> list[list[Piece]]:  # fmt: skip
    """Return what each program of a launch does, in order; programs without work are left out."""
    items = [
        (row_tile, req_idx, kv_head, 1 + math.ceil(prefix_len / tile.block_keys))
        for row_tile in range(num_row_tiles)
        for req_idx, (count, prefix_len) in enumerate(zip(num_queries, prefix_lens, strict=True))
        if count * group > row_tile * tile.block_rows
        for kv_head in range(num_kv_heads)
    ]
    total = sum(num_units for *_, num_units in items)
    num_programs = min(grid, max(total // module.MIN_UNITS, len(items)))
    if num_programs > num_row_tiles:
        num_programs -= num_programs % num_row_tiles
    found: list[list[Piece]] = [[] for _ in range(num_programs)]
    program, item_begin = 0, 0
    for row_tile, req_idx, kv_head, num_units in items:
        unit, item_end = item_begin, item_begin + num_units
        while unit < item_end:
            end = min(item_end, total * (program + 1) // num_programs)
            found[program].append(Piece(row_tile, req_idx, kv_head, unit - item_begin, end - item_begin, num_units))
            unit = end
            program += unit == total * (program + 1) // num_programs
        item_begin = item_end
    return found


def shares_of(case, num_sms):
    """Return what each program does of a case that float32 makes: two programs on each of so many multiprocessors."""
    group = case.query.shape[1] // case.keys.shape[2]
    tile = tiles.tile_shape(case.max_queries * group, case.query.shape[2], True, True, LIMITS)
    num_row_tiles = -(-case.max_queries * group // tile.block_rows)
    lens = [request.prefix_len for request in case.requests]
    return shares(case.counts, lens, group, case.keys.shape[2], tile, num_row_tiles, 2 * num_sms)


RAGGED = {
    "one long among many": [(2, 40 * BLOCK)] + 31 * [(2, 30)],
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
    expected = Counter()
    for program, pieces in enumerate(shares_of(case, num_sms)):
        for piece in pieces:
            is_last = piece.end == piece.num_units
            expected[program] += piece.end - piece.begin - is_last
            if is_last:  # of the words of the row tile's rows, those that hold a node
                high = any(word >> 32 for word in words_of(case, piece))
                expected[program] += 2 if high else 1
    assert taken == expected


def words_of(case, piece):
    """Return the mask words of a row tile: 16 rows, of 2 heads each."""
    return case.requests[piece.req_idx].words[8 * piece.row_tile : 8 * piece.row_tile + 8]


@pytest.mark.parametrize("num_queries", [1, 9, 26, 65])
def test_a_long_request_is_spread_over_the_whole_gpu(num_queries):
    """One request of 100k entries among 31 of 1k, 28 heads on 4: no program has more than a unit above the mean."""
    tile = tiles.tile_shape(7 * num_queries, 128, False, True, LIMITS)
    num_row_tiles = -(-7 * num_queries // tile.block_rows)
    grid = tile.programs_per_sm * LIMITS.num_sms
    found = shares(32 * [num_queries], [100_000] + 31 * [1_000], 7, 4, tile, num_row_tiles, grid)
    units = [sum(piece.end - piece.begin for piece in pieces) for pieces in found]
    assert grid - num_row_tiles < len(units) <= grid
    assert sum(units) == 4 * num_row_tiles * (1564 + 31 * 17) and max(units) - min(units) <= 1
    of_the_long = [pieces for pieces in found if any(piece.req_idx == 0 for piece in pieces)]
    assert len(of_the_long) > 0.7 * len(found)


@pytest.mark.parametrize("num_row_tiles", [1, 2, 3, 4, 5])
def test_row_tiles_of_a_key_are_read_together(num_row_tiles):
    """Programs of equal row tiles are at the same keys at the same time. Catches: shares' ends that are rounded up."""
    tile = tiles.TileShape(128, 64, 32, 5, 8, 1)
    lens = [25_000, 1_000, 7_777, 3, 0]
    found = shares(5 * [128 * num_row_tiles], lens, 1, 3, tile, num_row_tiles, 132)
    per_row_tile = len(found) // num_row_tiles
    assert per_row_tile * num_row_tiles == len(found)
    for i, pieces in enumerate(found[:per_row_tile]):
        for row_tile in range(1, num_row_tiles):
            others = found[i + row_tile * per_row_tile]
            assert [(p.req_idx, p.kv_head, p.begin, p.end) for p in pieces] == [
                (p.req_idx, p.kv_head, p.begin, p.end) for p in others
            ]


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
    """Catches: an arrival that is left for the next call; a part of an earlier call taken for one of this."""
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
    num_bytes = sum(memory.nbytes for memory in (scratch.part_out, scratch.part_lse, scratch.arrivals))
    assert num_bytes == 132 * 4 * (256 * 128 + 256 + 8)
    for num_rows in (1, 7, 63, 64, 65, 455, 10_000):
        for head_size, widen in ((32, False), (80, False), (128, False), (256, False), (128, True)):
            tile = tiles.tile_shape(num_rows, head_size, widen, True, LIMITS)
            assert 2 * tile.programs_per_sm * tile.block_rows <= 256, tile


def test_the_launch_does_not_hang_on_lengths(device, monkeypatch):
    """The same grid and the same numbers for any lengths, as a captured launch has; the result follows the lengths."""
    launches = []
    kernel = module._tree_attention_kernel

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                launches.append((grid, [arg for arg in args if not isinstance(arg, torch.Tensor)], kwargs))
                kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(module, "_tree_attention_kernel", Watched())
    for shapes in ([(3, 5), (2, 700)], [(3, 400), (2, 0)]):
        check(Case(device, requests_of(*shapes), max_blocks=64, poison=NAN), "triton")
    assert len(launches) == 2 and launches[0] == launches[1]
