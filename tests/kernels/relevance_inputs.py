"""Inputs of `visual_relevance`, and plain float64 loops that say what it must return."""

import itertools
import math

import torch

from vidspec_kernels import visual_relevance

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
    stale=None, normal=None, device=DEVICE,
):  # fmt: skip
    """Random inputs, rows and blocks shuffled; stale rows and unlisted blocks would be the best of a query."""
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
        "queries": queries.to(device),
        "cu_num_logits": torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        "rows": rows.to(device), "store": encode(store, store_dtype).to(device), "block_fill": block_fill.to(device),
        "block_table": table.to(device), "num_blocks": num_blocks.to(device), "max_queries": max(counts),
        "max_blocks": max_blocks,
    }  # fmt: skip


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


def check(inputs, top_n=5, impl="torch"):
    got = visual_relevance(**inputs, top_n=top_n, impl=impl)
    assert got.dtype == torch.float32 and got.shape == (len(inputs["queries"]), top_n)
    torch.testing.assert_close(got.cpu().double(), expect(inputs, top_n), rtol=0, atol=2e-6)
    return got
