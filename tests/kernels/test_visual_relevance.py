"""visual_relevance: all paths against plain float64 loops, what may not be read."""

import math

import pytest
import torch

from tests.kernels.relevance_inputs import DEVICE, FP8, NAN, check, expect, make_inputs
from vidspec_kernels import visual_relevance
from vidspec_kernels.limits import DeviceLimits
from vidspec_kernels.visual_relevance import api as module
from vidspec_kernels.visual_relevance import cpu, reference, tiles

IMPLS = ["triton", "numba", "torch"]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def of_top(top_n):
    """A request with more, with fewer and with exactly as many video tokens as N."""
    return ((2, (64, 64, 30)), (1, (top_n // 2,)), (1, (64,) * (top_n // 64) + (top_n % 64,)))


SIZES = {
    # Against the stored values, so that only the products may round; the float8 scale left in.
    **{f"dtypes_{query}_{store}": (10, dict(query_dtype=query, store_dtype=store)) for query, store in (
        (F32, F32), (BF16, BF16), (F16, F16), (BF16, FP8), (F32, FP8), (BF16, F32), (F32, F16))},
    # Powers of two and their neighbours.
    **{f"top {n}": (n, dict(requests=of_top(n), hidden=32, block_rows=64)) for n in (1, 2, 10, 16, 17, 100, 128)},
    # Around the chunks of both kinds of product: the last chunk read into the next row.
    **{f"d{hidden} {dtype}": (3, dict(
        requests=((1, (16, 9)), (1, (3,))), hidden=hidden, query_dtype=dtype, store_dtype=dtype))
       for hidden in (1, 32, 33, 64, 200) for dtype in (F32, F16)},
    # Around shares of 64 rows and tiles of 128, in blocks much smaller and larger than a tile.
    **{f"{n} tokens, blocks of {rows}": (4, dict(
        requests=((1, (1,) * n if rows == 1 else (n,)),), hidden=16, block_rows=rows))
       for n in (0, 1, 63, 64, 65, 127, 128, 129) for rows in (1, 256)},
    # Around the least tile of queries; two tiles of different sizes, as the largest tree has; groups of queries.
    **{f"{n} queries, top {top}": (top, dict(requests=((n, (16, 8)), (1, (5,))), hidden=16))
       for n, top in ((16, 2), (17, 2), (48, 2), (65, 2), (81, 2), (33, 33))},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes(impl, name, monkeypatch):
    """What each of these catches is said beside it; a second call gives the same bits."""
    assert (tiles._BLOCK_DIM_WIDE, tiles._BLOCK_DIM, tiles._LEAST_SHARE, tiles._BLOCK_KEYS) == (32, 64, 64, 128)
    top_n, given = SIZES[name]
    if name.startswith(("127", "128", "129")):
        monkeypatch.setattr(tiles, "_MAX_SPLITS", 1)
    if "queries" in name:
        monkeypatch.setattr(module, "_MERGE_ENTRIES", 64)
    inputs = make_inputs(**given)
    got = check(inputs, top_n, impl)
    assert torch.equal(got, check(inputs, top_n, impl))
    if name.startswith("top"):
        assert got[[0, 1, 3]].isfinite().all() and int(got[2].isfinite().sum()) == top_n // 2


@pytest.mark.parametrize(
    ("num_queries", "expected"),
    [(0, (4, None)), (1, (4, None)), (17, (5, None)), (33, (5, 4)), (49, (6, None)), (65, (6, 4)), (80, (6, 4))],
)
def test_queries_are_padded_to_16(num_queries, expected):
    """Catches: the next power of two, which loads and multiplies up to twice the rows."""
    assert tiles._query_blocks(num_queries) == expected


@pytest.mark.parametrize("arch", [(80, 108, 164, 163), (89, 142, 100, 99), (90, 132, 228, 227), (100, 148, 228, 227)])
@pytest.mark.parametrize(("max_queries", "top_n"), [(1, 10), (26, 10), (65, 10), (65, 128), (128, 10)])
def test_tiles_have_stages_and_take_all_queries(arch, max_queries, top_n):
    """Three stages at least, of what fits so many programs; each query in one group. Rows are no part of a variant."""
    capability, num_sms, shared_kb, most_kb = arch
    limits = DeviceLimits(num_sms, shared_kb * 1024, most_kb * 1024, capability)
    bf16, log_top = torch.bfloat16, (top_n - 1).bit_length()
    tile = tiles._tile(bf16, bf16, max_queries, log_top, limits, False)
    assert tile.options["num_stages"] >= 3
    padded = 2 ** tile.constants["LOG_QUERIES"] + 2 ** (tile.constants["LOG_MORE"] or -math.inf)
    assert (tile.num_groups - 1) * padded < max_queries <= tile.num_groups * padded
    assert tile.num_groups == 1 or top_n > 32 or max_queries > 80
    assert 2 ** tile.constants["LOG_KEYS"] >= 2**log_top


@pytest.mark.parametrize("num_slots", [1, 2, 3, 100])
@pytest.mark.parametrize("top_n", [3, 100])
def test_splits_with_ties(monkeypatch, num_slots, top_n):
    """Programs of several tiles, of one and of none; duplicates of four rows count as often as they are there."""
    monkeypatch.setattr(tiles, "_MAX_SPLITS", num_slots)
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(4, 16, generator=generator, dtype=torch.float64)

    def normal(rows, hidden):
        return distinct[torch.randint(4, (rows,), generator=generator)]

    inputs = make_inputs(((1, (64, 50, 1, 64, 33)), (1, (9,))), hidden=16, block_rows=64, normal=normal)
    check(inputs, top_n, "triton")


def test_many_splits_are_merged_in_chunks(monkeypatch):
    """Catches: only the first chunk of a row's partial results read."""
    monkeypatch.setattr(module, "_MERGE_ENTRIES", 16)
    # 64-row shares in 11 splits of 4 entries; a descending walk through the tiles finds something in each.
    inputs = make_inputs(((1, (64,) * 11), (2, (64,) * 3)), hidden=16, block_rows=64)
    check(inputs, 4, "triton")


@pytest.mark.parametrize(("impl", "owner"), [("torch", reference), ("numba", cpu)])
@pytest.mark.parametrize("entries", [1, 2 * 6 * 16 * 96])
def test_strips_on_the_host(monkeypatch, impl, owner, entries):
    """One request at a time, and two with a shorter last strip."""
    monkeypatch.setattr(owner, "STRIP_ENTRIES", entries)
    inputs = make_inputs()
    assert len(inputs["rows"]) % 2 == 1 and inputs["max_blocks"] == 6
    check(inputs, 10, impl)


@pytest.mark.parametrize(("capability", "num_splits"), [(80, 4), (90, 1)])
def test_tiles_of_both_sizes(monkeypatch, capability, num_splits):
    """Ampere takes shorter tiles beside many queries: the same cosines, from one share or several."""
    limits = DeviceLimits(132, 164 * 1024, 163 * 1024, capability)
    monkeypatch.setattr(module, "device_limits", lambda device: limits)
    monkeypatch.setattr(tiles, "_MAX_SPLITS", num_splits)
    inputs = make_inputs(((33, (64, 64, 3, 64, 10)),), hidden=16, block_rows=64)
    tile = tiles._tile(torch.float32, torch.float32, 33, 3, limits, True)
    assert tile.constants["LOG_KEYS"] == (6 if capability == 80 else 7)
    check(inputs, 5, "triton")


@pytest.mark.parametrize(
    ("num_reqs", "num_rows", "num_slots", "expected"),
    [(1, 25_000, 132, 132), (1, 100_000, 216, 216), (1, 25_000, 296, 256), (1, 300, 264, 5), (1, 0, 264, 1),
     (8, 64_000, 264, 256), (64, 64_000, 264, 33), (10**4, 600, 264, 1)],
)  # fmt: skip
def test_number_of_splits(num_reqs, num_rows, num_slots, expected):
    """A long video fills the multiprocessors once; the ten best of its shares, 16 each, are merged in one pass."""
    assert tiles._num_splits(num_reqs, num_rows, num_slots) == expected <= module._MERGE_ENTRIES // 16


def test_zero_query(impl):
    """Cosines 0 for each video token, not NaN, and -inf for those that are not there."""
    inputs = make_inputs(((2, (7,)), (1, ())))
    inputs["queries"][0] = 0
    got = check(inputs, 10, impl)
    assert got[0].tolist() == [0.0] * 7 + [-math.inf] * 3


@pytest.mark.parametrize("store_dtype", [torch.float32, FP8])
def test_stale_rows_are_not_used(impl, store_dtype):
    """NaN behind a block's valid rows, in blocks that the request does not list, and a table that names no block."""
    inputs = make_inputs(store_dtype=store_dtype, stale=NAN)
    assert int(inputs["store"].float().isnan().sum()) > 0
    assert not check(inputs, impl=impl).isnan().any()


def test_rows_of_no_request(impl):
    """Rows before the first request and behind the last, as a padded batch has them, are -inf; strides of queries."""
    inputs = make_inputs(((2, (9,)), (1, (16, 16))))
    expected = expect(inputs, 3)
    padded = torch.full((6, 96 + 4), NAN, device=DEVICE)
    padded[1:4, :96] = inputs["queries"]
    inputs |= {"queries": padded[:, :96], "cu_num_logits": inputs["cu_num_logits"] + 1}
    got = visual_relevance(**inputs, top_n=3, impl=impl).cpu().double()
    torch.testing.assert_close(got[1:4], expected, rtol=0, atol=2e-6)
    assert got[[0, 4, 5]].isneginf().all()


def test_nothing_to_do(impl):
    """No requests, no rows, no video in the batch, bounds of 0."""
    inputs = make_inputs(((1, ()), (2, ())))
    assert check(inputs, impl=impl).isneginf().all()
    inputs = make_inputs(((0, (5,)),))
    assert check(inputs, impl=impl).shape == (0, 5)
    none = {"rows": inputs["rows"][:0], "cu_num_logits": inputs["cu_num_logits"][:1]}
    assert visual_relevance(**(inputs | none), top_n=5, impl=impl).shape == (0, 5)
