"""Measure visual_relevance against a dense product with torch.topk, beside the floor of the device.

python benchmarks/bench_visual_relevance.py [--tokens 1024,8192,25000,100000] [--batches 1x11,8x11] [--hidden 3584,5120]
    [--stores bfloat16,float8_e4m3fn] [--top-n 10] [--csv FILE]

One row is one step: `batch` is requests x text rows of each, and every request has `num_tokens` video tokens of its
own. On a GPU "triton" is the kernel, on a CPU "torch" is the reference. The peer gets the stored rows densely, of
float8 stores in the queries' dtype, and unit queries: neither is timed. Both are called in turn. The floor is the
larger of two times: the stored rows read once, in the store's dtype, at the copy bandwidth, and the product at the rate
of a square one. Both rates are measured beside each case.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_bench
import torch

from vidspec_kernels import storage_scale, store_states, visual_relevance

ON_GPU = torch.cuda.is_available()
BLOCK_ROWS = 64
# A call for each implementation.
Calls = dict[str, Callable[[], torch.Tensor]]


def case(num_tokens: int, num_reqs: int, num_queries: int, hidden: int, dtype: torch.dtype, top_n: int) -> Calls:
    """Return both calls, bound to a store of shuffled blocks."""
    device = kernel_bench.device()
    query_dtype = torch.bfloat16 if ON_GPU else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    max_blocks = -(-num_tokens // BLOCK_ROWS)
    num_blocks = num_reqs * max_blocks
    blocks = torch.randperm(num_blocks, generator=generator, device=device).view(num_reqs, max_blocks)
    fill = torch.full((num_blocks,), BLOCK_ROWS, dtype=torch.int32, device=device)
    fill[blocks[:, -1]] = num_tokens - (max_blocks - 1) * BLOCK_ROWS
    # Rows beyond the last block's fill hold states too. By chunks: a float32 copy would be gigabytes.
    store = torch.empty(num_blocks, BLOCK_ROWS, hidden, dtype=dtype, device=device)
    for slots in torch.arange(num_blocks * BLOCK_ROWS, device=device).split(8192):
        states = torch.randn(len(slots), hidden, generator=generator, device=device)
        store_states(states, slots - slots[0], slots, store)
    queries = torch.randn(num_reqs * num_queries, hidden, generator=generator, device=device).to(query_dtype)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * num_queries
    rows = torch.arange(num_reqs, device=device)
    counts = torch.full((num_reqs,), max_blocks, dtype=torch.int32, device=device)
    arguments = (queries, starts, rows, store, fill, blocks.int(), counts, top_n, num_queries, max_blocks)

    scale = storage_scale(dtype, hidden)
    # Through bytes: float8 cannot be indexed everywhere.
    dense = store.view(torch.uint8)[blocks].view(dtype).flatten(1, 2)[:, :num_tokens]
    dense = dense.to(query_dtype).transpose(1, 2)  # [R, hidden, num_tokens]
    units = torch.nn.functional.normalize(queries.float(), dim=1).to(query_dtype)
    units = units.view(num_reqs, num_queries, hidden)
    return {
        "triton" if ON_GPU else "torch": lambda: visual_relevance(*arguments),
        "matmul_topk": lambda: (torch.bmm(units, dense) / scale).topk(top_n, dim=2).values.flatten(0, 1),
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = parser().parse_args(argv)
    where = kernel_bench.provenance()
    sizes = itertools.product(
        arguments.stores.split(","), numbers(arguments.hidden), arguments.batches.split(","), numbers(arguments.tokens)
    )
    rows = []
    for name, hidden, batch, num_tokens in sizes:
        dtype = getattr(torch, name)
        num_reqs, num_queries = (int(part) for part in batch.split("x"))
        # A shared machine's rate changes by the minute: measured beside every case.
        bandwidth = kernel_bench.bandwidth_bytes_per_us()
        rate = kernel_bench.product_flops_per_us(torch.bfloat16 if ON_GPU else torch.float32)
        num_bytes = num_reqs * num_tokens * hidden * dtype.itemsize
        flops = 2 * num_reqs * num_queries * num_tokens * hidden
        calls = case(num_tokens, num_reqs, num_queries, hidden, dtype, arguments.top_n)
        ours, peer = (call().float() for call in calls.values())
        for impl, (median, p20, p80) in kernel_bench.measure_interleaved_us(calls, arguments.rounds).items():
            rows.append(
                {
                    "kernel": "visual_relevance",
                    "impl": impl,
                    "num_tokens": num_tokens,
                    "batch": batch,
                    "hidden": hidden,
                    "store": name,
                    "top_n": arguments.top_n,
                    "median": round(median, 3),
                    "p20": round(p20, 3),
                    "p80": round(p80, 3),
                    "floor": round(max(num_bytes / bandwidth, flops / rate), 3),
                    "unit": "us",
                    "max_difference": float((ours - peer).abs().max()),
                    "bytes": num_bytes,
                    "flops": flops,
                    "bandwidth_gb_per_s": round(bandwidth / 1e3, 1),
                    **where,
                }
            )
    kernel_bench.write(arguments, rows)
    if not arguments.json:
        print(f"visual_relevance on {where['device']}: microseconds a step")
        for row in rows:
            print(
                f"{row['store']:>14} {row['hidden']:>5} {row['batch']:>5} {row['num_tokens']:>7} tokens"
                f" {row['impl']:>12}: median {row['median']:9.1f} p20 {row['p20']:9.1f} p80 {row['p80']:9.1f}"
                f" floor {row['floor']:8.1f} ({100 * row['floor'] / row['median']:.0f} %)"
            )
    return rows


def numbers(text: str) -> list[int]:
    """Return the comma-separated integers."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the command line; a CPU gets a small case."""
    arguments = argparse.ArgumentParser(description=__doc__)
    tokens, batches = ("1024,8192,25000,100000", "1x11,8x11") if ON_GPU else ("128,1024", "1x11")
    hidden, stores = ("3584,5120", "bfloat16,float8_e4m3fn") if ON_GPU else ("128", "float32")
    arguments.add_argument("--tokens", default=tokens, help="video tokens of a request, comma-separated")
    arguments.add_argument("--batches", default=batches, help="requests x text rows of each, comma-separated")
    arguments.add_argument("--hidden", default=hidden, help="hidden sizes, comma-separated")
    arguments.add_argument("--stores", default=stores, help="torch dtypes of the store, comma-separated")
    arguments.add_argument("--top-n", type=int, default=10, help="largest cosines of a row")
    arguments.add_argument("--rounds", type=int, default=30, help="interleaved calls per measurement")
    arguments.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    return arguments


if __name__ == "__main__":
    main()
