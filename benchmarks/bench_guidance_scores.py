"""Measure guidance_scores against materialised attention, in time and memory, beside the floor of the device.

python benchmarks/bench_guidance_scores.py [--shapes 8x2x64,28x4x128] [--keys 128,25000] [--threads 1,2] [--csv FILE]

One row is one layer of one request: `num_queries` text queries at the end of `num_keys` cached keys. The floor is, on a
GPU, the larger of K read twice at the copy bandwidth and two products; on a CPU, one product (the strips compute each
logit once). Rates of copy and product are measured in the same run. Memory of MKL's own buffers is not counted.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_bench
import torch

from vidspec_kernels import guidance_scores

BLOCK_SIZE = 32


def materialised(
    query: torch.Tensor, key_cache: torch.Tensor, block_table: torch.Tensor, query_pos: torch.Tensor,
    out: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """Add softmax(Q K^T) summed over queries and heads, all weights held at once: what the kernel avoids."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    keys = key_cache[block_table[0]].flatten(0, 1)[: out.shape[1]].permute(1, 2, 0)  # [num_kv_heads, D, keys]
    rows = query.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    pos = query_pos.repeat_interleave(num_heads // num_kv_heads)
    hidden = torch.arange(out.shape[1], device=out.device) > pos[:, None]  # [rows, keys]
    logits = torch.matmul(rows, keys).float() * scale  # [num_kv_heads, rows, keys]
    out[0] += logits.masked_fill_(hidden, float("-inf")).softmax(dim=-1).sum(dim=(0, 1))


def case(
    num_keys: int, num_queries: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, Callable[[], Any]]:
    """Return both calls, bound to a cache in the layout and dtype of this device's engine."""
    device = kernel_bench.device()
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator().manual_seed(0)
    max_blocks = -(-num_keys // BLOCK_SIZE)
    num_blocks = max_blocks + 8
    if on_gpu:
        cache = torch.randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    else:
        # The CPU engine's: a block holds K as [head_dim, block_size], then V.
        cache = torch.randn(num_blocks, num_kv_heads, 2, head_dim, BLOCK_SIZE, generator=generator)
        cache = cache[:, :, 0].permute(0, 3, 1, 2)
    query = torch.randn(num_queries, num_heads, head_dim, generator=generator).to(device, dtype)
    table = torch.randperm(num_blocks, generator=generator)[None, :max_blocks].int().to(device)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=device)
    pos = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int32, device=device)
    out = torch.zeros(1, num_keys, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    size = torch.full((1,), num_keys, dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    return {
        "guidance_scores": lambda: guidance_scores(query, cache, table, starts, pos, out, row, size, scale),
        "materialised": lambda: materialised(query, cache, table, pos, out, scale),
    }


def floor(num_keys: int, num_queries: int, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return (bytes, flops) that this device's path cannot avoid."""
    num_heads, num_kv_heads, head_dim = shape
    passes, item_bytes = (2, 2) if torch.cuda.is_available() else (1, 4)
    return (
        passes * num_keys * num_kv_heads * head_dim * item_bytes,
        passes * 2 * num_queries * num_heads * num_keys * head_dim,
    )


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = parser().parse_args(argv)
    where = kernel_bench.provenance()
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    sizes = list(itertools.product(arguments.shapes.split(","), numbers(arguments.keys), numbers(arguments.queries)))
    initial_threads = torch.get_num_threads()
    rows = []
    for num_threads in numbers(arguments.threads):
        torch.set_num_threads(num_threads)
        bandwidth = kernel_bench.bandwidth_bytes_per_us()
        for shape, num_keys, num_queries in sizes:
            heads, kv_heads, head_dim = (int(part) for part in shape.split("x"))
            # A shared machine's rate changes by the minute: measured beside every case.
            rate = kernel_bench.product_flops_per_us(dtype)
            num_bytes, flops = floor(num_keys, num_queries, (heads, kv_heads, head_dim))
            calls = case(num_keys, num_queries, heads, kv_heads, head_dim)
            times = kernel_bench.measure_interleaved_us(calls, arguments.rounds)
            for impl, (median, p20, p80) in times.items():
                rows.append(
                    {
                        "kernel": "guidance_scores",
                        "impl": impl,
                        "shape": shape,
                        "num_keys": num_keys,
                        "num_queries": num_queries,
                        "num_threads": num_threads,
                        "median": round(median, 3),
                        "p20": round(p20, 3),
                        "p80": round(p80, 3),
                        "floor": round(max(num_bytes / bandwidth, flops / rate), 3),
                        "unit": "us",
                        "peak_bytes": kernel_bench.peak_bytes(calls[impl]),
                        "bytes": num_bytes,
                        "flops": flops,
                        "bandwidth_gb_per_s": round(bandwidth / 1e3, 1),
                        "product_gflop_per_s": round(rate / 1e3, 1),
                        **where,
                    }
                )
    torch.set_num_threads(initial_threads)
    kernel_bench.write(arguments, rows)
    if not arguments.json:
        print(f"guidance_scores on {where['device']}: milliseconds a layer (peak MB)")
        for row in rows:
            print(
                f"{row['shape']:>9} {row['num_keys']:>6} keys {row['num_queries']:>3} queries"
                f" {row['num_threads']} threads {row['impl']:>15}:"
                f" median {row['median'] / 1e3:8.2f} p20 {row['p20'] / 1e3:8.2f} p80 {row['p80'] / 1e3:8.2f}"
                f" floor {row['floor'] / 1e3:7.2f} ({row['peak_bytes'] / 1e6:.1f})"
            )
    return rows


def numbers(text: str) -> list[int]:
    """Return the comma-separated integers."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shapes", default="8x2x64,28x4x128", help="heads x KV heads x head_dim, comma-separated")
    arguments.add_argument("--keys", default="128,1024,8192,25000", help="cached keys, comma-separated")
    arguments.add_argument("--queries", default="16,64", help="guiding queries, comma-separated")
    arguments.add_argument("--threads", default="1", help="CPU threads, comma-separated")
    arguments.add_argument("--rounds", type=int, default=7, help="interleaved calls per measurement")
    arguments.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    return arguments


if __name__ == "__main__":
    main()
