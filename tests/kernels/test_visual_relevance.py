"""visual_relevance: both paths against plain float64 loops, what may not be read, shards, storage, compilation."""

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vidspec_kernels import merge_relevance, storage_scale, store_states, visual_relevance

# The package exports a function of the module's name.
module = importlib.import_module("vidspec_kernels.visual_relevance")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IMPLS = ["triton", "torch"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
FP8 = torch.float8_e4m3fn
# (rows, fills of the blocks) of each request: text only, no rows, partly filled and empty blocks in the middle.
REQUESTS = ((3, (16, 5, 0, 16, 1)), (2, ()), (0, (16, 16)), (1, (7,)), (2, (16, 3, 16, 16, 16, 2)))


def unit(rows):
    """Rows over their norms, one at a time; zeros stay zeros."""
    return torch.stack([row / row.norm() if row.norm() > 0 else row for row in rows])


def encode(rows, dtype):
    """Unit rows as a store of this dtype holds them."""
    return (rows * (math.sqrt(rows.shape[-1]) if dtype == FP8 else 1.0)).float().to(dtype)


def make_inputs(
    requests=REQUESTS, hidden=96, block_rows=16, query_dtype=torch.float32, store_dtype=torch.float32, seed=0,
    stale=None, normal=None,
):  # fmt: skip
    """Random inputs; stale rows and unlisted blocks are parallel to a query of a request, so they would be its best.

    Persistent rows and blocks are shuffled, and the table names blocks that do not exist behind each request's own.
    """
    generator = torch.Generator().manual_seed(seed)
    if normal is None:

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

    counts = [count for count, _ in requests]
    queries = (normal(sum(counts), hidden) * 7).to(query_dtype)
    num_reqs, max_reqs = len(requests), len(requests) + 2
    max_blocks = max(len(fills) for _, fills in requests)
    free = torch.randperm(num_reqs * max_blocks + 3, generator=generator).tolist()
    num_store_blocks = len(free)
    poison = unit(queries.double())[0] if len(queries) else torch.zeros(hidden, dtype=torch.float64)
    filler = poison if stale is None else torch.full_like(poison, stale)
    store = filler.expand(num_store_blocks, block_rows, hidden).clone()
    # A block that nobody lists claims to be full.
    block_fill = torch.full((num_store_blocks,), block_rows, dtype=torch.int32)
    table = torch.full((max_reqs, max_blocks + 1), 10**9, dtype=torch.int32)
    num_blocks = torch.full((max_reqs,), 10**6, dtype=torch.int32)
    rows = torch.randperm(max_reqs, generator=generator)[:num_reqs]
    for row, (_, fills) in zip(rows.tolist(), requests, strict=True):
        num_blocks[row] = len(fills)
        for column, fill in enumerate(fills):
            table[row, column] = block = free.pop()
            block_fill[block] = fill
            if fill:
                store[block, :fill] = unit(normal(fill, hidden))
    return {
        "queries": queries.to(DEVICE),
        "cu_num_logits": torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE),
        "rows": rows.to(DEVICE),
        "store": encode(store, store_dtype).to(DEVICE),
        "block_fill": block_fill.to(DEVICE),
        "block_table": table.to(DEVICE),
        "num_blocks": num_blocks.to(DEVICE),
        "max_queries": max(counts),
        "max_blocks": max_blocks,
    }


def stored_rows(inputs, req_idx):
    """The unit rows of one request as they are stored, float64 [m, d]."""
    row = int(inputs["rows"][req_idx])
    scale = math.sqrt(inputs["store"].shape[2]) if inputs["store"].dtype == FP8 else 1.0
    blocks = inputs["block_table"][row, : int(inputs["num_blocks"][row])].tolist()
    parts = [inputs["store"].cpu()[block].double()[: int(inputs["block_fill"][block])] / scale for block in blocks]
    return torch.cat(parts) if parts else torch.zeros(0, inputs["store"].shape[2], dtype=torch.float64)


def expect(inputs, top_n):
    """One request and one row at a time, in float64."""
    queries = inputs["queries"].cpu().double()
    expected = torch.full((len(queries), top_n), -math.inf, dtype=torch.float64)
    bounds = inputs["cu_num_logits"].tolist()
    for req_idx, (start, end) in enumerate(itertools.pairwise(bounds)):
        keys = stored_rows(inputs, req_idx)
        for index in range(start, end):
            norm = float(queries[index].norm())
            cosines = [float(key @ queries[index]) / norm if norm else 0.0 for key in keys]
            largest = sorted(cosines, reverse=True)[:top_n]
            expected[index, : len(largest)] = torch.tensor(largest, dtype=torch.float64)
    return expected


def check(inputs, top_n=5, impl="torch", run=visual_relevance, tolerance=2e-6):
    got = run(**inputs, top_n=top_n, impl=impl)
    assert got.dtype == torch.float32 and got.shape == (len(inputs["queries"]), top_n)
    torch.testing.assert_close(got.cpu().double(), expect(inputs, top_n), rtol=0, atol=tolerance)
    return got


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
@pytest.mark.parametrize("hidden", [1, 32, 33, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_sizes(impl, hidden, dtype):
    """Around the chunks of both kinds of product. Catches: the last chunk read into the next row."""
    assert (module._BLOCK_DIM_WIDE, module._BLOCK_DIM) == (32, 128)
    requests = ((1, (16, 9)), (1, (3,)))
    check(make_inputs(requests, hidden=hidden, query_dtype=dtype, store_dtype=dtype), 3, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 129])
@pytest.mark.parametrize("block_rows", [1, 256])
def test_numbers_of_video_tokens(impl, num_tokens, block_rows):
    """Around tiles of 64 rows, in blocks much smaller and larger than a tile."""
    assert module._BLOCK_KEYS_SHORT == 64
    fills = (1,) * num_tokens if block_rows == 1 else (num_tokens,)
    got = check(make_inputs(((1, fills),), hidden=16, block_rows=block_rows), 4, impl)
    assert int(got.isfinite().sum()) == min(num_tokens, 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_queries", [16, 17, 65])
def test_numbers_of_queries(impl, num_queries, monkeypatch):
    """Around the least tile of queries, and the largest tree with its root."""
    monkeypatch.setattr(module, "_MERGE_ENTRIES_SHORT", 16)
    check(make_inputs(((num_queries, (16, 8)), (1, (5,))), hidden=16), 2, impl)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 100])
@pytest.mark.parametrize("top_n", [3, 100])
def test_splits_with_ties(monkeypatch, num_slots, top_n):
    """Programs of several tiles, of one tile and without any; four distinct rows, so nearly every cosine is a tie.

    Catches: duplicates within a tile or across splits counted once; a split that starts a tile late.
    """
    monkeypatch.setattr(module, "_num_slots", lambda device: num_slots)
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(4, 16, generator=generator, dtype=torch.float64)

    def normal(rows, hidden):
        return distinct[torch.randint(4, (rows,), generator=generator)]

    inputs = make_inputs(((1, (64, 50, 1, 64, 33)), (1, (9,))), hidden=16, block_rows=64, normal=normal)
    check(inputs, top_n, "triton")


def test_many_splits_are_merged_in_chunks(monkeypatch):
    """Catches: only the first chunk of a row's partial results read."""
    monkeypatch.setattr(module, "_MERGE_ENTRIES_SHORT", 8)
    monkeypatch.setattr(module, "_MERGE_ENTRIES", 16)
    # 64-row tiles in 11 splits of 4 entries; a descending walk through the tiles finds something in each.
    inputs = make_inputs(((1, (64,) * 11), (2, (64,) * 3)), hidden=16, block_rows=64)
    check(inputs, 4, "triton")


@pytest.mark.parametrize("entries", [1, 2 * 6 * 16 * 96])
def test_strips_of_the_torch_path(monkeypatch, entries):
    """One request at a time, and two with a shorter last strip."""
    monkeypatch.setattr(module, "_STRIP_ENTRIES", entries)
    inputs = make_inputs()
    assert len(inputs["rows"]) % 2 == 1 and inputs["max_blocks"] == 6
    check(inputs, 10)


@pytest.mark.parametrize("num_slots", [1, 4])
def test_tiles_of_128(monkeypatch, num_slots):
    """A long video takes the taller tiles: the same cosines."""
    monkeypatch.setattr(module, "_num_slots", lambda device: num_slots)
    inputs = make_inputs(((2, (64, 64, 3, 64, 64, 64, 64, 64, 10)),), hidden=32, block_rows=64)
    short, _ = module._tile(torch.float32, torch.float32, 2, 3, 64 * 9, 264, False)
    tall, _ = module._tile(torch.float32, torch.float32, 2, 3, 64 * 9, num_slots, False)
    assert (short["LOG_KEYS"], tall["LOG_KEYS"]) == (6, 7)
    check(inputs, 5, "triton")


@pytest.mark.parametrize(
    ("num_reqs", "num_tiles", "expected"),
    [(1, 1000, 264), (1, 5, 5), (1, 0, 1), (8, 1000, 264), (64, 1000, 33), (10**4, 9, 1)],
)
def test_number_of_splits(num_reqs, num_tiles, expected):
    assert module._num_splits(num_reqs, num_tiles, 264) == expected


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


# ---- shards --------------------------------------------------------------------------------------------------------


def shards(inputs, num_shards, requests):
    """The inputs of each rank: row i of a request's video tokens goes to rank i % num_shards."""
    block_rows = inputs["store"].shape[1]
    parts = []
    for rank in range(num_shards):
        dealt = [(count, range(rank, sum(fills), num_shards)) for count, fills in requests]
        plan = [
            (count, tuple(len(mine[at : at + block_rows]) for at in range(0, len(mine), block_rows)))
            for count, mine in dealt
        ]
        part = make_inputs(plan, hidden=inputs["store"].shape[2], block_rows=block_rows, seed=rank)
        part["queries"] = inputs["queries"]
        for req_idx, (_, mine) in enumerate(dealt):
            keys = stored_rows(inputs, req_idx).float().to(DEVICE)[list(mine)]
            row = part["rows"][req_idx]
            for column, chunk in enumerate(keys.split(block_rows) if len(keys) else ()):
                part["store"][part["block_table"][row, column], : len(chunk)] = chunk
        parts.append(part)
    return parts


def exact(rows, hidden, generator=torch.Generator().manual_seed(5)):
    """Rows of four entries of 1/2: their norm is 1, their products are quarters, without any rounding."""
    out = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in out:
        row[torch.randperm(hidden, generator=generator)[:4]] = 0.5
    return out


def check_shards(inputs, num_shards, requests, top_n, impl, equal, merge=merge_relevance):
    whole = merge_relevance(visual_relevance(**inputs, top_n=top_n, impl=impl)[None])
    partials = [visual_relevance(**part, top_n=top_n, impl=impl) for part in shards(inputs, num_shards, requests)]
    got = merge(torch.stack(partials))
    torch.testing.assert_close(got, whole, rtol=0, atol=0 if equal else 1e-6)
    for index, row in enumerate(expect(inputs, top_n)):
        finite = [value for value in row.tolist() if value > -math.inf]
        assert got[index].item() == pytest.approx(sum(finite) / max(1, len(finite)), abs=2e-6)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("normal", [None, exact])
@pytest.mark.parametrize("impl", IMPLS)
def test_shards_merge_to_the_whole(impl, normal, num_shards):
    """Bit for bit where the cosines are; a shard without any token of a request, and a request without any.

    Catches: the sum in the order of the shards.
    """
    requests = ((2, (16, 5, 16)), (1, ()), (1, (1,)))
    inputs = make_inputs(requests, normal=normal)
    check_shards(inputs, num_shards, requests, 10, impl, equal=normal is exact)


def test_mutation_mean_of_shard_means():
    """Mutation: each rank averages its own Top-N and the ranks' means are averaged."""
    requests = ((2, (16, 5, 16)),)
    inputs = make_inputs(requests)

    def mean_of_means(partials):
        return torch.stack([merge_relevance(part[None]) for part in partials]).mean(0)

    check_shards(inputs, 2, requests, 5, "torch", equal=False)
    with pytest.raises(AssertionError):
        check_shards(inputs, 2, requests, 5, "torch", equal=False, merge=mean_of_means)


def test_merge_by_hand():
    inf = math.inf
    partials = torch.tensor(
        [[[0.9, 0.5], [0.25, -inf], [-inf, -inf]], [[0.7, 0.6], [-inf, -inf], [-inf, -inf]]], device=DEVICE
    )
    assert merge_relevance(partials).tolist() == pytest.approx([0.8, 0.25, 0.0])
    assert merge_relevance(partials[:1]).tolist() == pytest.approx([0.7, 0.25, 0.0])
    assert merge_relevance(partials[:, :0]).shape == (0,)
    unmeasured = torch.stack((partials[0], torch.full_like(partials[1], NAN)))  # one shard could not
    assert merge_relevance(unmeasured).isnan().all() and merge_relevance(unmeasured[1:]).isnan().all()


@pytest.mark.parametrize("num_shards", [2, 4, 7])
def test_merge_does_not_depend_on_the_dealing(num_shards):
    """Equal values give equal bits, however they are dealt. Catches: no order before the sum."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(50, 128, generator=generator).sort(dim=1, descending=True).values.to(DEVICE)
    dealt = torch.full((num_shards, 50, 128), -math.inf, device=DEVICE)
    for shard in range(num_shards):
        mine = values[:, shard::num_shards]
        dealt[shard, :, : mine.shape[1]] = mine
    assert torch.equal(merge_relevance(dealt), merge_relevance(values[None]))


# ---- storage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("states_dtype", [torch.float32, torch.bfloat16])
def test_store_states(dtype, states_dtype, monkeypatch):
    """Unit rows in the named slots and nothing anywhere else, in several chunks; zeros stay zeros.

    Catches: slots sorted; the norm in half precision; rows of another chunk's slots.
    """
    monkeypatch.setattr(module, "_CHUNK_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(20, 200, generator=generator) * torch.logspace(-3, 3, 20)[:, None]).to(states_dtype)
    states[4] = 0
    source, slots = torch.tensor([3, 19, 0, 4, 7, 3, 12]), torch.tensor([30, 2, 17, 8, 9, 31, 0])
    store = torch.full((4, 8, 200), 3.0).to(dtype).to(DEVICE)
    store_states(states.to(DEVICE), source.to(DEVICE), slots.to(DEVICE), store)
    got = store.cpu().double().view(32, 200) / storage_scale(dtype, 200)
    for index, slot in zip(source.tolist(), slots.tolist(), strict=True):
        expected = unit(states[index : index + 1].double())[0]
        bound = {torch.float32: 1e-6, FP8: 2**-4}.get(dtype, 2**-8)
        assert ((got[slot] - expected).abs() <= expected.abs() * bound + 1e-4 * (dtype == FP8)).all()
        assert float(got[slot].norm()) == pytest.approx(0.0 if index == 4 else 1.0, abs=bound / 4)
    others = [slot for slot in range(32) if slot not in slots.tolist()]
    assert (store.cpu().double().view(32, 200)[others] == 3).all()


def test_float8_cosines():
    """Rows of a real size keep each cosine within 4 % of a unit; without the scale they are mostly subnormal.

    Catches: no scale (elements below 2**-6 keep two bits or none)."""
    hidden = 3584
    assert storage_scale(FP8, hidden) == pytest.approx(math.sqrt(hidden))
    assert all(storage_scale(dtype, hidden) == 1.0 for dtype in (torch.float32, torch.bfloat16, torch.float16))
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, hidden, generator=generator)
    states = base + torch.randn(64, hidden, generator=generator) * torch.linspace(0, 4, 64)[:, None]
    store = torch.zeros(1, 64, hidden).to(FP8).to(DEVICE)
    order = torch.arange(64, device=DEVICE)
    store_states(states.to(DEVICE), order, order, store)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    got = visual_relevance(
        base.to(DEVICE), starts, order[:1], store, 64 * one, 0 * one[None], one, 64, 1, 1, impl="torch"
    )[0].cpu().double()  # fmt: skip
    expected = (unit(states.double()) @ unit(base.double())[0]).sort(descending=True).values
    assert expected[0] > 0.99 and expected[-1] < 0.3
    assert ((got - expected).abs() <= 0.04 * expected.abs()).all()
    # One element that holds all of a row's length is the largest that can be stored.
    peak = torch.zeros(1, hidden, device=DEVICE)
    peak[0, 5] = -1e3
    store_states(peak, order[:1], order[:1], store)
    assert float(store[0, 0, 5].float()) == pytest.approx(-math.sqrt(hidden), rel=2**-4)


def test_stored_states_end_to_end():
    """Raw states of all lengths in, cosines of the raw states out: what the engine relies on. Also its mutation: rows
    that are stored as they come."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 96, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, 40)[:, None]
    inputs = make_inputs(((2, (16, 16, 8)),))
    blocks = inputs["block_table"][int(inputs["rows"][0]), :3].tolist()
    slots = torch.tensor([blocks[i // 16] * 16 + i % 16 for i in range(40)], device=DEVICE)
    source = torch.arange(40, device=DEVICE)
    expected = unit(inputs["queries"].cpu().double()) @ unit(states).T

    def check_states(write):
        write(states.float().to(DEVICE), source, slots, inputs["store"])
        got = visual_relevance(**inputs, top_n=10, impl="torch").cpu().double()
        torch.testing.assert_close(got, expected.topk(10).values, rtol=0, atol=2e-6)

    def raw(states, source, slots, store):
        store.view(-1, 96)[slots] = states[source]

    check_states(store_states)
    with pytest.raises(AssertionError):
        check_states(raw)


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


# ---- dispatch, checks, compilation, benchmark ----------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("visual_relevance")
    visual_relevance(**make_inputs(((1, (3,)),)), top_n=2, impl=impl)
    automatic = "triton" if DEVICE.type == "cuda" else "torch"
    assert ran == [automatic if impl == "auto" else impl]


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


def test_storage_refuses():
    states, index = torch.ones(2, 8, device=DEVICE), torch.arange(2, device=DEVICE)
    store = torch.zeros(2, 4, 8, device=DEVICE)
    with pytest.raises(AssertionError, match="store"):
        store_states(states, index, index, store.transpose(0, 1))
    with pytest.raises(AssertionError, match="store"):
        store_states(states, index, index, store[..., :4].contiguous())
    with pytest.raises(AssertionError, match="slots"):
        store_states(states, index, index[:1], store)
    with pytest.raises(AssertionError, match="source"):
        store_states(states, index.int(), index, store)
    with pytest.raises(AssertionError, match="float64"):
        storage_scale(torch.float64, 8)
    with pytest.raises(AssertionError, match="hidden_size"):
        storage_scale(FP8, 2**18)
    with pytest.raises(AssertionError, match="partials"):
        merge_relevance(torch.zeros(2, 3, device=DEVICE))
