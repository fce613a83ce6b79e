"""visual_relevance: both paths against plain float64 loops, what may not be read, planted mistakes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.impls import branch
from tests.kernels.relevance_inputs import DEVICE, FP8, NAN, check, expect, make_inputs
from tests.kernels.relevance_inputs import IMPLS_AND_LOOP as IMPLS
from vidspec_kernels import merge_relevance, visual_relevance
from vidspec_kernels.limits import DeviceLimits
from vidspec_kernels.visual_relevance import api as module
from vidspec_kernels.visual_relevance import cpu, reference, tiles

# ---- both paths against the loops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("query_dtype", "store_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, FP8),
        (torch.float32, FP8),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_dtypes(impl, query_dtype, store_dtype):
    """Ragged batch, shuffled rows and blocks; against the stored values, so that only the products may round.

    Catches: products or results in half precision; the float8 scale left in.
    """
    inputs = make_inputs(query_dtype=query_dtype, store_dtype=store_dtype)
    got = check(inputs, impl=impl)
    assert got.isfinite().any() and got.isinf().any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("top_n", [1, 2, 10, 16, 17, 100, 128])
def test_top_n(impl, top_n):
    """Powers of two and their neighbours; a request with fewer, exactly as many and more video tokens than N."""
    requests = ((2, (64, 64, 30)), (1, (top_n // 2,)), (1, (64,) * (top_n // 64) + (top_n % 64,)))
    got = check(make_inputs(requests, hidden=32, block_rows=64), top_n, impl)
    assert got[:2].isfinite().all() and got[3].isfinite().all()
    assert int(got[2].isfinite().sum()) == top_n // 2


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hidden", [1, 32, 33, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_sizes(impl, hidden, dtype):
    """Around the chunks of both kinds of product. Catches: the last chunk read into the next row."""
    assert (tiles._BLOCK_DIM_WIDE, tiles._BLOCK_DIM) == (32, 64)
    requests = ((1, (16, 9)), (1, (3,)))
    check(make_inputs(requests, hidden=hidden, query_dtype=dtype, store_dtype=dtype), 3, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("block_rows", [1, 256])
def test_numbers_of_video_tokens(impl, num_tokens, block_rows, monkeypatch):
    """Around shares of 64 rows and tiles of 128, in blocks much smaller and larger than a tile."""
    assert (tiles._LEAST_SHARE, tiles._BLOCK_KEYS) == (64, 128)
    if num_tokens > 65:
        monkeypatch.setattr(tiles, "_MAX_SPLITS", 1)
    fills = (1,) * num_tokens if block_rows == 1 else (num_tokens,)
    got = check(make_inputs(((1, fills),), hidden=16, block_rows=block_rows), 4, impl)
    assert int(got.isfinite().sum()) == min(num_tokens, 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("num_queries", "top_n"), [(16, 2), (17, 2), (48, 2), (65, 2), (81, 2), (33, 33)])
def test_numbers_of_queries(impl, num_queries, top_n, monkeypatch):
    """Around the least tile of queries; two tiles of different sizes, as the largest tree has; groups of queries."""
    monkeypatch.setattr(module, "_MERGE_ENTRIES", 64)
    check(make_inputs(((num_queries, (16, 8)), (1, (5,))), hidden=16), top_n, impl)


@pytest.mark.parametrize(
    ("num_queries", "expected"),
    [(0, (4, None)), (1, (4, None)), (17, (5, None)), (33, (5, 4)), (49, (6, None)), (65, (6, 4)), (80, (6, 4))],
)
def test_queries_are_padded_to_16(num_queries, expected):
    """Catches: the next power of two, which loads and multiplies up to twice the rows."""
    log_queries, log_more = tiles._query_blocks(num_queries)
    assert (log_queries, log_more) == expected
    padded = 2**log_queries + (2**log_more if log_more is not None else 0)
    assert padded == max(16, -(-num_queries // 16) * 16)


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
    """Programs of several tiles, of one tile and without any; four distinct rows, so nearly every cosine is a tie.

    Catches: duplicates within a tile or across splits counted once; a split that starts a tile late.
    """
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


@pytest.mark.parametrize(
    ("capability", "num_splits"),
    [(80, 4), (90, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((80, 1), (90, 4)))],
)
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
    ("num_reqs", "num_rows", "expected"),
    [(1, 64_000, 256), (1, 300, 5), (1, 0, 1), (8, 64_000, 256), (64, 64_000, 33), (10**4, 600, 1)],
)
def test_number_of_splits(num_reqs, num_rows, expected):
    assert tiles._num_splits(num_reqs, num_rows, 264) == expected


@pytest.mark.parametrize("num_rows", [25_000, 100_000])
@pytest.mark.parametrize("num_slots", [132, 216, 264, 296])
def test_one_wave_and_one_pass_of_the_merge(num_rows, num_slots):
    """A long video fills the multiprocessors once, no share is a row longer than it must be, and the largest values of
    all shares are ordered at once.

    Catches: tiles dealt whole, of which some programs get two and others one; more entries than a pass takes.
    """
    num_splits = tiles._num_splits(1, num_rows, num_slots)
    assert min(num_slots, 256) == num_splits <= num_slots
    assert -(-num_rows // num_splits) <= num_rows / num_splits + 1
    default_top_n = 16  # 10, as a power of two
    assert num_splits * default_top_n <= module._MERGE_ENTRIES


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_query(impl):
    """Cosines 0 for each video token, not NaN, and -inf for those that are not there."""
    inputs = make_inputs(((2, (7,)), (1, ())))
    inputs["queries"][0] = 0
    got = check(inputs, 10, impl)
    assert got[0].tolist() == [0.0] * 7 + [-math.inf] * 3


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    """Cosines 1, 0.6, 0, -0.6 of two blocks, the query of length 5."""
    store = torch.tensor([[[-0.6, 0.8], [9.0, 9.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.8], [9.0, 9.0]]], device=DEVICE)
    got = visual_relevance(
        torch.tensor([[5.0, 0.0]], device=DEVICE),
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        torch.tensor([1], device=DEVICE),
        store,
        torch.tensor([1, 2, 1], dtype=torch.int32, device=DEVICE),
        torch.tensor([[0, 0, 0], [2, 1, 0]], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, 3], dtype=torch.int32, device=DEVICE),
        top_n=3, max_queries=1, max_blocks=3, impl=impl,
    )  # fmt: skip
    assert got[0].tolist() == pytest.approx([1.0, 0.6, 0.0], abs=1e-6)
    assert merge_relevance(got[None]).tolist() == pytest.approx([1.6 / 3])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("store_dtype", [torch.float32, FP8])
def test_stale_rows_are_not_used(impl, store_dtype):
    """NaN behind a block's valid rows, in blocks that the request does not list, and a table that names no block."""
    inputs = make_inputs(store_dtype=store_dtype, stale=NAN)
    assert int(inputs["store"].float().isnan().sum()) > 0
    assert not check(inputs, impl=impl).isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
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


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_do(impl):
    """No requests, no rows, no video in the batch, bounds of 0."""
    inputs = make_inputs(((1, ()), (2, ())))
    assert check(inputs, impl=impl).isneginf().all()
    inputs = make_inputs(((0, (5,)),))
    assert check(inputs, impl=impl).shape == (0, 5)
    none = {"rows": inputs["rows"][:0], "cu_num_logits": inputs["cu_num_logits"][:1]}
    assert visual_relevance(**(inputs | none), top_n=5, impl=impl).shape == (0, 5)


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_bits_twice(impl):
    inputs = make_inputs()
    first, second = (visual_relevance(**inputs, top_n=10, impl=impl) for _ in range(2))
    assert torch.equal(first, second)


BATCHES = st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(requests=BATCHES, top_n=st.integers(1, 20), hidden=st.integers(1, 9), seed=st.integers(0, 99))
def test_any_batch(requests, top_n, hidden, seed):
    check(make_inputs(requests, hidden=hidden, block_rows=4, seed=seed), top_n, "torch")


@settings(max_examples=5, deadline=None)
@given(requests=BATCHES, top_n=st.integers(1, 20), hidden=st.integers(1, 9), seed=st.integers(0, 99))
def test_any_batch_in_the_kernel(requests, top_n, hidden, seed):
    check(make_inputs(requests, hidden=hidden, block_rows=4, seed=seed), top_n, "triton")


# ---- mutations: each against the check that both paths pass ----------------------------------------------------------


def queries_not_normalised(**inputs):
    """Mutation: products instead of cosines."""
    norms = inputs["queries"].float().norm(dim=1, keepdim=True)
    return visual_relevance(**inputs) * norms


def stored_rows_not_normalised(**inputs):
    """Mutation: the store holds rows of their own lengths."""
    lengths = torch.linspace(0.5, 2, inputs["store"].shape[1], device=DEVICE)[:, None]
    return visual_relevance(**(inputs | {"store": inputs["store"] * lengths}))


def block_fill_ignored(**inputs):
    """Mutation: every row of a listed block counts."""
    full = torch.full_like(inputs["block_fill"], inputs["store"].shape[1])
    return visual_relevance(**(inputs | {"block_fill": full}))


def top_n_off_by_one(**inputs):
    """Mutation: the best is dropped, and one more taken."""
    return visual_relevance(**(inputs | {"top_n": inputs["top_n"] + 1}))[:, 1:]


def one_too_few(**inputs):
    """Mutation: N - 1 cosines."""
    return torch.nn.functional.pad(
        visual_relevance(**(inputs | {"top_n": inputs["top_n"] - 1})), (0, 1), value=-math.inf
    )


def neighbours_row(**inputs):
    """Mutation: the persistent row of the next request of the batch."""
    return visual_relevance(**(inputs | {"rows": inputs["rows"].roll(1)}))


def batch_row_for_persistent_row(**inputs):
    """Mutation: the table is read at the batch row."""
    return visual_relevance(**(inputs | {"rows": torch.arange(len(inputs["rows"]), device=DEVICE)}))


def last_block_missing(**inputs):
    """Mutation: a loop that ends a block early."""
    return visual_relevance(**(inputs | {"num_blocks": (inputs["num_blocks"] - 1).clamp(min=0)}))


@pytest.mark.parametrize(
    "mutation",
    [
        queries_not_normalised, stored_rows_not_normalised, block_fill_ignored, top_n_off_by_one, one_too_few,
        neighbours_row, batch_row_for_persistent_row, last_block_missing,
    ],
)  # fmt: skip
def test_mutations_are_caught(mutation):
    inputs = make_inputs(((2, (16, 5, 16, 2)), (3, (9, 0, 16, 7)), (1, (3, 16, 1, 12))))
    # Rows that a mutation may name have tables too.
    inputs["num_blocks"].clamp_(max=4)
    inputs["block_table"].clamp_(max=len(inputs["store"]) - 1)
    check(inputs, 5)
    with pytest.raises(AssertionError):
        check(inputs, 5, run=mutation)


# ---- dispatch, checks ----------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["auto", "triton", "numba", "torch"])
def test_dispatch(branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("visual_relevance")
    visual_relevance(**make_inputs(((1, (3,)),)), top_n=2, impl=impl)
    assert ran == [branch(impl, DEVICE)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("queries", lambda t: t.double()),
        ("queries", lambda t: t.T.contiguous().T),
        ("cu_num_logits", lambda t: t.long()),
        ("cu_num_logits", lambda t: t[:-1]),
        ("rows", lambda t: t.int()),
        ("store", lambda t: t.double()),
        ("store", lambda t: t[..., :8]),
        ("store", lambda t: t[:, :12].contiguous()),
        ("store", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        ("block_fill", lambda t: t.long()),
        ("block_fill", lambda t: t[:-1]),
        ("block_table", lambda t: t.long()),
        ("block_table", lambda t: t.T.contiguous().T),
        ("block_table", lambda t: t[:-1]),
        ("num_blocks", lambda t: t.long()),
        ("max_blocks", lambda value: value + 2),
        ("max_queries", lambda value: 129),
        ("top_n", lambda value: 0),
        ("top_n", lambda value: 129),
    ],
)
def test_wrapper_refuses(name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would read through a wrong pointer)."""
    arguments = make_inputs() | {"top_n": 5}
    arguments[name] = change(arguments[name])
    with pytest.raises(AssertionError, match=name):
        visual_relevance(**arguments)
