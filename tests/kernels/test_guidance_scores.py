"""guidance_scores: literal facts, both paths against the float64 reference, what may not be read, determinism."""

import itertools
import math

import pytest
import torch

from tests.kernels.agreement import make_cache
from vidspec_kernels import guidance_scores
from vidspec_kernels.guidance_scores import api as module
from vidspec_kernels.guidance_scores import reference

IMPLS = ["triton", "torch"]
SENTINEL = 3.0
NAN = float("nan")


def make_inputs(
    device, requests=((5, 70), (0, 10), (9, 130)), num_heads=4, num_kv_heads=2, head_dim=16, block_size=16,
    dtype=torch.float32, layout="flash", seed=0, spare_blocks=2,
):  # fmt: skip
    """Requests whose queries are the last of their sequence; blocks are shuffled, all behind a last query is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    num_reqs = len(requests)
    max_blocks = max(-(-length // block_size) for _, length in requests) + spare_blocks
    num_blocks = num_reqs * max_blocks + 3
    cache, _ = make_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, layout, device, poison=NAN)
    table = torch.randperm(num_blocks, generator=generator)[: num_reqs * max_blocks].view(num_reqs, max_blocks).int()
    for (_, length), row in zip(requests, table, strict=True):
        index = torch.arange(length)
        place = row[index // block_size].long().to(device), (index % block_size).to(device)
        cache[place] = 2 * normal(length, num_kv_heads, head_dim).to(device)
    counts = [num_queries for num_queries, _ in requests]
    positions = [torch.arange(length - num_queries, length) for num_queries, length in requests]
    # Empty requests' accumulator rows are out of range: they may not be read.
    rows = torch.randperm(num_reqs, generator=generator)
    return {
        "query": normal(sum(counts), num_heads, head_dim).to(device),
        "key_cache": cache,
        "block_table": table.to(device),
        "query_start_loc": torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        "query_pos": torch.cat(positions).int().to(device),
        "out_row": torch.where(torch.tensor(counts) > 0, rows, 10**9).to(device),
        "num_keys": torch.tensor([length for _, length in requests], dtype=torch.int32, device=device),
        "scale": head_dim**-0.5,
    }  # fmt: skip


def make_out(inputs, max_keys=None, fill=0.0):
    size = max_keys or max(1, int(inputs["num_keys"].max()))
    return torch.full((len(inputs["out_row"]), size), fill, device=inputs["query"].device)


def float64(inputs):
    """Scores, and the log-sum-exps [num_heads, num_queries] of the layer's own attention; every weight is held."""
    cache, scores, sums = inputs["key_cache"], make_out(inputs).double(), []
    num_heads, (_, block_size, num_kv_heads, _) = inputs["query"].shape[1], cache.shape
    for req_idx, (start, end) in enumerate(itertools.pairwise(inputs["query_start_loc"].tolist())):
        if start == end:
            continue
        pos = inputs["query_pos"][start:end]
        index = torch.arange(int(pos.max()) + 1, device=cache.device)
        keys = cache[inputs["block_table"][req_idx].long()[index // block_size], index % block_size].double()
        keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
        logits = torch.einsum("qhd,khd->hqk", inputs["query"][start:end].double(), keys) * inputs["scale"]
        logits = logits.masked_fill(index > pos[:, None], -math.inf)
        scores[inputs["out_row"][req_idx], : len(index)] += logits.softmax(dim=2).sum(dim=(0, 1))
        sums.append(logits.logsumexp(dim=2))
    return scores, torch.cat(sums, dim=1)


def run(inputs, impl, fill=0.0, max_keys=None, **more):
    out = make_out(inputs, max_keys, fill)
    guidance_scores(**inputs, out=out, impl=impl, **more)
    return out


def assert_close(got, expected, rtol=5e-6):
    """Relative to each score; exact zeros where nothing may be added."""
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=0)


def chosen(inputs, rows):
    """The same inputs with a slice of a single request's queries."""
    assert len(inputs["block_table"]) == 1
    query, pos = inputs["query"][rows], inputs["query_pos"][rows]
    return inputs | {
        "query": query,
        "query_pos": pos,
        "query_start_loc": torch.tensor([0, len(query)], dtype=torch.int32, device=query.device),
    }


F16, BF16 = torch.float16, torch.bfloat16
SIZES = {
    # Rows of one head around its tiles of 32, and of 64 where products are not widened.
    **{f"{n} rows": dict(requests=[(n, 70), (2, 67)], num_heads=1, num_kv_heads=1) for n in (0, 1, 31, 32, 33)},
    **{f"{n} rows of half": dict(requests=[(n, 80)], num_heads=1, num_kv_heads=1, dtype=F16) for n in (63, 64, 65)},
    **{f"{n} keys": dict(requests=[(1, n)]) for n in (1, 2, 63, 64, 65, 128, 200)},  # tiles of 64
    # GQA ratios 1, 2 and 7, the last not a power of two, on both engines' strides.
    **{f"groups_{heads}_{kv}_{layout}": dict(num_heads=heads, num_kv_heads=kv, layout=layout, block_size=32)
       for heads, kv in ((2, 2), (4, 2), (14, 2), (7, 1)) for layout in ("flash", "cpu")},
    **{f"d{dim} blocks of {size}": dict(requests=[(3, 100)], head_dim=dim, block_size=size)
       for dim, size in ((8, 128), (64, 32), (80, 16), (96, 24), (128, 64), (64, 1))},
    **{f"dtypes_{dtype}_{keys}": dict(dtype=dtype, keys=keys, head_dim=64)
       for dtype, keys in ((F16, F16), (BF16, BF16), (torch.float32, BF16), (F16, torch.float32))},
    "real_size": dict(requests=[(24, 2500)], head_dim=64, block_size=32),  # about the bundled model's video
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes(device, impl, name):
    """Catches: a missing mask, a wrong number of tiles, a power of two assumed, sums rounded to the inputs' dtype."""
    assert (module._BLOCK_ROWS_WIDE, module._BLOCK_ROWS, module._BLOCK_KEYS) == (32, 64, 64)
    sizes = dict(SIZES[name])
    keys = sizes.pop("keys", None)
    inputs = make_inputs(device, **sizes)
    inputs["key_cache"] = inputs["key_cache"].to(keys or inputs["key_cache"].dtype)
    assert name != "real_size" or inputs["block_table"].shape[1] * 32 > module._KEYS_PER_SPLIT
    got = run(inputs, impl)
    assert_close(got, float64(inputs)[0])
    num_queries, num_heads, _ = inputs["query"].shape
    assert got.double().sum().item() == pytest.approx(num_queries * num_heads, rel=1e-5)


def test_splits_of_the_keys(device, impl, monkeypatch):
    """Splits of one and two tiles, and empty ones. Catches: a split's own maximum, a split that starts elsewhere."""
    monkeypatch.setattr(module, "_KEYS_PER_SPLIT", 64)
    inputs = make_inputs(device, requests=[(3, 450), (2, 65), (1, 3)], spare_blocks=9)
    inputs["block_table"][1, :3] = inputs["block_table"][0, :3]  # a cached prefix, scored as if each had its own
    got = run(inputs, impl)
    assert_close(got, float64(inputs)[0])
    # An exact bound of queries and a loose one give the same bits: no atomic adds, no order that depends on the grid.
    assert all(torch.equal(run(inputs, impl, max_queries_per_req=bound), got) for bound in (3, 50))
    inputs["query"] = inputs["query"] * 1e3  # exp without the row's maximum overflows; a split without keys is no NaN
    got = run(inputs, impl)
    assert got.isfinite().all() and got.sum().item() == pytest.approx(6 * 4, rel=1e-5)


@pytest.mark.parametrize("entries", [1, 300])
def test_strips_of_the_torch_path(device, monkeypatch, entries):
    """Strips of one row, and a last strip that is shorter: each with its own mask."""
    monkeypatch.setattr(reference, "_STRIP_ENTRIES", entries)
    inputs = make_inputs(device, requests=[(5, 70), (7, 90)])
    assert_close(run(inputs, "torch"), float64(inputs)[0])


def test_non_contiguous_query(device, impl):
    """Queries as a slice of a fused projection, every second row of it, heads in reverse memory order."""
    inputs = make_inputs(device)
    num_queries, num_heads, head_dim = inputs["query"].shape
    fused = torch.full((2 * num_queries, num_heads + 4, head_dim + 3), NAN, device=device)
    fused[::2, 2 : 2 + num_heads, 1 : 1 + head_dim] = inputs["query"]
    view = fused[::2, 2 : 2 + num_heads, 1 : 1 + head_dim]
    transposed = inputs["query"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    expected = run(inputs, impl)
    for query in (view, transposed):
        assert not query.is_contiguous()
        assert torch.equal(run(inputs | {"query": query}, impl), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lse_of_the_layer(device, branches, impl, dtype):
    """Told the log-sum-exps, the scores are the reference's, within what float32 says of them, and one pass runs."""
    inputs = make_inputs(device, num_heads=14, head_dim=64, dtype=dtype)
    ran = branches("guidance_scores", ("_row_stats_kernel", "_guidance_scores_kernel"), "_guidance_scores_torch")
    expected, lse = float64(inputs)
    lse = lse.float().T
    assert not lse.is_contiguous()
    got = run(inputs, impl, lse=lse)
    assert_close(got, expected, rtol=1e-5)
    assert_close(got, run(inputs, impl).double(), rtol=1e-5)
    assert ran == ([impl] * 2 if impl == "torch" else [impl] * 3)
    for wrong in (lse * math.log2(math.e), lse.roll(1, 0), -lse):  # another base, the neighbour's rows, another sign
        with pytest.raises(AssertionError):
            assert_close(run(inputs, impl, lse=wrong), expected, rtol=1e-5)


@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_two_chunks_equal_one(device, impl, cut):
    """Queries of one prompt in two calls (chunked prefill): the same sums; the first may not read what follows."""
    inputs = make_inputs(device, requests=[(20, 100)])
    whole, parts = run(inputs, impl), make_out(inputs)
    later = inputs["key_cache"].clone()
    index = torch.arange(int(inputs["query_pos"][0]) + cut, 100, device=device)
    later[inputs["block_table"][0].long()[index // 16], index % 16] = NAN
    guidance_scores(**(chosen(inputs, slice(0, cut)) | {"key_cache": later}), out=parts, impl=impl)
    guidance_scores(**chosen(inputs, slice(cut, 20)), out=parts, impl=impl)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_keys", [0, 1, 64, 65, 99, 100])
def test_num_keys_cuts_what_is_written_only(device, impl, num_keys):
    """Fewer keys written, the same weights: softmax stays over all keys."""
    inputs = make_inputs(device, requests=[(6, 100)])
    whole = run(inputs, impl, SENTINEL)
    cut = inputs | {"num_keys": torch.tensor([num_keys], dtype=torch.int32, device=device)}
    got = run(cut, impl, SENTINEL, max_keys=100)
    torch.testing.assert_close(got[:, :num_keys], whole[:, :num_keys], rtol=1e-6, atol=0)
    assert (got[:, num_keys:] == SENTINEL).all()
    # num_keys past the accumulator's end, or past what the queries see, is no licence to write there.
    many = inputs | {"num_keys": torch.tensor([10**6], dtype=torch.int32, device=device)}
    short, long = run(many, impl, SENTINEL, max_keys=40), run(many, impl, SENTINEL, max_keys=300)
    torch.testing.assert_close(short, whole[:, :40], rtol=1e-6, atol=0)
    assert (long[:, 100:] == SENTINEL).all()


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("pos", [9, 62, 63, 64, 79])
def test_keys_behind_the_query_are_not_used(device, impl, poison, pos):
    """Anything behind a query changes no bit of its scores, within its last block and tile or after it."""
    inputs = chosen(make_inputs(device, requests=[(1, 200)]), slice(0, 1))
    inputs["query_pos"][:] = pos
    expected = run(inputs, impl)
    index = torch.arange(pos + 1, 200, device=device)
    inputs["key_cache"][inputs["block_table"][0].long()[index // 16], index % 16] = poison
    got = run(inputs, impl)
    assert torch.equal(got, expected)
    assert (got[0, : pos + 1] > 0).all() and (got[0, pos + 1 :] == 0).all()


def test_nothing_to_do(device, impl):
    """No queries at all, no requests, no columns: nothing changes, nothing fails."""
    inputs = make_inputs(device, requests=[(0, 10), (0, 20)])
    assert (run(inputs, impl, SENTINEL) == SENTINEL).all()
    inputs = make_inputs(device)
    guidance_scores(**inputs, out=torch.zeros(3, 0, device=device), impl=impl)
    none = {name: inputs[name][:0] for name in ("query", "block_table", "query_pos", "out_row", "num_keys")}
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    guidance_scores(**(inputs | none | {"query_start_loc": starts}), out=torch.zeros(1, 5, device=device), impl=impl)
