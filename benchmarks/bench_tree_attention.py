"""Measure tree_attention against FlexAttention, xformers' tree attention and SDPA, beside the floor of the device.

python benchmarks/bench_tree_attention.py [--shapes 28x4x128] [--contexts 1000,8000] [--batches 1,8] [--nodes 8,64]
    [--graphs] [--csv FILE]

One row is one layer: `batch` requests, each with a root, the last token of its context, and `nodes` drafts of one
random tree. On a GPU "triton" is the kernel, on a CPU "torch" is the reference. The peers get their masks ready-made,
and K and V gathered densely beforehand, which is not timed: only tree_attention reads the paged cache. A peer that
cannot run says why in `note`. The floor is the larger of two times: `traffic`, K and V of context and nodes read once,
q read and out written, at the copy bandwidth; and `product`, the two products at the rate of a square one. Of large
trees it is the product: 65 nodes of 7 heads on a KV head are 455 rows for every key. Both rates are measured beside
each case.
`--graphs` replays each call from a CUDA graph, so that the host's time does not count.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_bench
import torch

from vidspec_kernels.tree_attention import tree_attention

ON_GPU = torch.cuda.is_available()
BLOCK_SIZE = 16 if ON_GPU else 128
# A call, and how its result becomes [batch * rows, heads, D].
Bound = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]


def tree_words(num_nodes: int) -> list[int]:
    """Return the mask words of the root and of the nodes of a random tree: node j is bit j, the root has no bit."""
    generator = torch.Generator().manual_seed(0)
    words = [0]
    for node in range(num_nodes):
        parent = int(torch.randint(0, node + 1, (1,), generator=generator))
        words.append(words[parent] | 1 << node)
    return [word - 2**64 if word >> 63 else word for word in words]


class Inputs:
    """One layer's tensors: paged as this device's engine keeps them, and dense for the peers."""

    def __init__(self, context: int, batch: int, num_nodes: int, num_heads: int, num_kv_heads: int, head_size: int):
        self.device = kernel_bench.device()
        self.dtype = torch.bfloat16 if ON_GPU else torch.float32
        self.context, self.batch, self.num_rows = context, batch, num_nodes + 1
        self.num_kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        self.scale = head_size**-0.5
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        length = context + num_nodes
        max_blocks = -(-length // BLOCK_SIZE)
        num_blocks = batch * max_blocks
        if ON_GPU:
            cache = normal(num_blocks, 2, BLOCK_SIZE, num_kv_heads, head_size)
            self.keys, self.values = cache[:, 0], cache[:, 1]
        else:
            # The CPU engine's: of each head a block holds K as [head_size, block_size], then V.
            cache = normal(num_blocks, num_kv_heads, 2, BLOCK_SIZE * head_size)
            self.keys = cache[:, :, 0].unflatten(2, (head_size, BLOCK_SIZE)).permute(0, 3, 1, 2)
            self.values = cache[:, :, 1].unflatten(2, (BLOCK_SIZE, head_size)).transpose(1, 2)
        blocks = torch.randperm(num_blocks, generator=generator, device=self.device)
        self.block_table = blocks.view(batch, max_blocks).int()
        # [batch, length, num_kv_heads, D]
        self.dense_keys, self.dense_values = (
            pool[blocks].reshape(batch, -1, num_kv_heads, head_size)[:, :length].contiguous()
            for pool in (self.keys, self.values)
        )
        self.query = normal(batch * self.num_rows, num_heads, head_size)
        self.words = torch.tensor(tree_words(num_nodes), device=self.device)  # [rows]
        # [rows, length], the same for all requests
        in_tree = (self.words[:, None] >> torch.arange(num_nodes, device=self.device)) & 1 != 0
        self.seen = torch.cat([in_tree.new_ones(self.num_rows, context), in_tree], dim=1)

    def folded(self) -> torch.Tensor:
        """Return the queries as [batch, num_kv_heads, group * rows, D]."""
        query = self.query.view(self.batch, self.num_rows, self.num_kv_heads, self.group, -1)
        return query.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()


def ours(inputs: Inputs) -> Bound:
    """Bind tree_attention: the kernel on a GPU, the reference on a CPU."""

    def vector(value: int) -> torch.Tensor:
        return torch.full((inputs.batch,), value, dtype=torch.int32, device=inputs.device)

    index = torch.arange(inputs.batch, device=inputs.device)
    out = torch.empty_like(inputs.query)
    arguments = (
        inputs.query, inputs.keys, inputs.values, inputs.block_table, index, (index * inputs.num_rows).int(),
        vector(inputs.num_rows), vector(inputs.context), inputs.words.repeat(inputs.batch, 1), out,
    )  # fmt: skip
    bounds = {"scale": inputs.scale, "max_queries": inputs.num_rows, "max_prefix_len": inputs.context}
    return lambda: tree_attention(*arguments, **bounds), lambda _: out


def sdpa(inputs: Inputs) -> Bound:
    """Bind torch's fused attention with a dense mask; the heads of a group are further rows of their KV head."""
    query, seen = inputs.folded(), inputs.seen.repeat(inputs.group, 1)
    keys, values = inputs.dense_keys.transpose(1, 2), inputs.dense_values.transpose(1, 2)

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=inputs.scale)

    def tokens(result: torch.Tensor) -> torch.Tensor:
        result = result.unflatten(2, (inputs.group, inputs.num_rows))
        return result.permute(0, 3, 1, 2, 4).reshape(inputs.query.shape)

    return call, tokens


def flex(inputs: Inputs) -> Bound:
    """Bind compiled FlexAttention with a block mask."""
    if not ON_GPU:
        raise NotImplementedError("needs a GPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    words, context, length = inputs.words, inputs.context, inputs.seen.shape[1]

    def mask_mod(batch: Any, head: Any, row: Any, entry: Any) -> Any:
        node = entry - context
        return (node < 0) | (((words[row] >> node.clamp(min=0)) & 1) != 0)

    block_mask = create_block_mask(mask_mod, None, None, inputs.num_rows, length, device=inputs.device.type)
    attend = torch.compile(flex_attention, dynamic=False)
    query = inputs.query.view(inputs.batch, inputs.num_rows, *inputs.query.shape[1:]).transpose(1, 2)
    keys, values = inputs.dense_keys.transpose(1, 2), inputs.dense_values.transpose(1, 2)

    def call() -> Any:
        return attend(query, keys, values, block_mask=block_mask, scale=inputs.scale, enable_gqa=True)

    return call, lambda result: result.transpose(1, 2).reshape(inputs.query.shape)


def xformers(inputs: Inputs) -> Bound:
    """Bind xformers' tree attention: split-K over the context but its last token, a dense bias over root and nodes."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention as xformers_tree_attention

    if not ON_GPU:
        raise NotImplementedError("needs a GPU")
    batch, num_rows, length = inputs.batch, inputs.num_rows, inputs.seen.shape[1]
    query = inputs.query.view(batch, num_rows, inputs.num_kv_heads, inputs.group, -1)
    keys, values = (
        dense[:, :, :, None].expand(-1, -1, -1, inputs.group, -1) for dense in (inputs.dense_keys, inputs.dense_values)
    )
    # The bias's rows must be aligned.
    bias = inputs.query.new_full((num_rows, -(-num_rows // 16) * 16), float("-inf"))[:, :num_rows]
    bias.masked_fill_(inputs.seen[:, -num_rows:], 0.0)
    prefix_bias = BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[num_rows] * batch, kv_seqlen=[length - num_rows] * batch, kv_padding=length
    )
    new = slice(length - num_rows, length)

    def call() -> Any:
        return xformers_tree_attention(query, keys[:, new], values[:, new], keys, values, bias, prefix_bias)

    return call, lambda result: result.reshape(inputs.query.shape)


PEERS: dict[str, Callable[[Inputs], Bound]] = {
    "triton" if ON_GPU else "torch": ours,
    "sdpa": sdpa,
    "flex_attention": flex,
    "xformers": xformers,
}


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bind(inputs: Inputs, graphs: bool) -> tuple[dict[str, Callable[[], Any]], dict[str, float], dict[str, str]]:
    """Return the calls that run here, how far each result is from the first one's, and why the others do not run."""
    calls: dict[str, Callable[[], Any]] = {}
    differences: dict[str, float] = {}
    notes: dict[str, str] = {}
    expected = None
    for impl, peer in PEERS.items():
        try:
            call, tokens = peer(inputs)
            result = tokens(call()).float()
            expected = result.clone() if expected is None else expected
            differences[impl] = float((result - expected).abs().max())
            calls[impl] = graphed(call) if graphs else call
        except Exception as error:
            if peer is ours:
                raise
            notes[impl] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return calls, differences, notes


def measure(
    arguments: argparse.Namespace, shape: str, context: int, batch: int, num_nodes: int
) -> list[dict[str, Any]]:
    """Return the rows of one size, one for each implementation."""
    num_heads, num_kv_heads, head_size = (int(part) for part in shape.split("x"))
    inputs = Inputs(context, batch, num_nodes, num_heads, num_kv_heads, head_size)
    calls, differences, notes = bind(inputs, arguments.graphs)
    # A shared machine's rates change by the minute: measured beside every case.
    bandwidth, rate = kernel_bench.bandwidth_bytes_per_us(), kernel_bench.product_flops_per_us(inputs.dtype)
    num_bytes = 2 * (inputs.dense_keys.nbytes + inputs.query.nbytes)
    flops = 4 * inputs.query.numel() * inputs.seen.shape[1]
    times = kernel_bench.measure_interleaved_us(calls, arguments.rounds)
    rows = []
    for impl in PEERS:
        median, p20, p80 = (round(time, 3) for time in times[impl]) if impl in times else (None, None, None)
        rows.append(
            {
                "kernel": "tree_attention",
                "impl": impl,
                "shape": shape,
                "dtype": str(inputs.dtype).removeprefix("torch."),
                "context": context,
                "batch": batch,
                "nodes": num_nodes,
                "median": median,
                "p20": p20,
                "p80": p80,
                "floor": round(max(num_bytes / bandwidth, flops / rate), 3),
                "traffic": round(num_bytes / bandwidth, 3),
                "product": round(flops / rate, 3),
                "unit": "us",
                "max_difference": differences.get(impl),
                "note": notes.get(impl, ""),
                "graphs": arguments.graphs,
                "num_threads": torch.get_num_threads(),
                "bytes": num_bytes,
                "flops": flops,
                "bandwidth_gb_per_s": round(bandwidth / 1e3, 1),
                "product_gflop_per_s": round(rate / 1e3, 1),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    arguments = parser().parse_args(argv)
    where = kernel_bench.provenance()
    initial_threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    sizes = itertools.product(
        arguments.shapes.split(","), numbers(arguments.contexts), numbers(arguments.batches), numbers(arguments.nodes)
    )
    rows = [row | where for size in sizes for row in measure(arguments, *size)]
    torch.set_num_threads(initial_threads)
    kernel_bench.write(arguments, rows)
    if not arguments.json:
        print(f"tree_attention on {where['device']}: microseconds a layer")
        for row in rows:
            result = row["note"] or "median {median:>10} p20 {p20:>10} p80 {p80:>10}".format(**row)
            print(
                "{shape:>9} context {context:>6} batch {batch:>2} nodes {nodes:>2} {impl:>14}:".format(**row),
                result, "floor {floor} (traffic {traffic}, product {product})".format(**row),
            )  # fmt: skip
    return rows


def numbers(text: str) -> list[int]:
    """Return the comma-separated integers."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the command line; its default sizes are this device's."""
    shapes, contexts, batches, nodes = ("4x2x32", "400,1500", "1,8", "8,25")
    if ON_GPU:
        shapes, contexts, batches, nodes = ("28x4x128", "1000,8000,25000,100000", "1,4,16,32", "8,25,64")
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shapes", default=shapes, help="heads x KV heads x head size, comma-separated")
    arguments.add_argument("--contexts", default=contexts, help="KV entries before the nodes, comma-separated")
    arguments.add_argument("--batches", default=batches, help="requests, comma-separated")
    arguments.add_argument("--nodes", default=nodes, help="drafts of a request (at most 64), comma-separated")
    arguments.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments.add_argument("--rounds", type=int, default=21, help="interleaved calls per measurement")
    arguments.add_argument("--graphs", action="store_true", help="replay CUDA graphs (GPU only)")
    arguments.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    return arguments


if __name__ == "__main__":
    main()
