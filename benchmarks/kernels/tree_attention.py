"""tree_attention: one layer, against FlashAttention with our nodes merged in, FlexAttention and torch's SDPA.

`num_reqs` requests have each a root, the last token of its context, and the nodes of one random tree. Peers without a
paged cache get K and V gathered densely beforehand, and their masks ready-made; neither is timed. `note` is why a peer
cannot run. The floor counts K and V of context and nodes read once, q read and out written, and the two products. Of
large trees it is the products: 65 nodes of 7 heads on a KV head are 455 rows for every key.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.kernels.timing import DEVICE, ON_GPU, Case
from vidspec_kernels import TreeAttentionScratch, tree_attention

# Heads, KV heads, head size; KV entries; requests; nodes.
AXES: dict[str, list[Any]] = {"shape": ["40x8x128"], "context": [25_000], "num_reqs": [1, 8], "nodes": [25, 64]}
TINY = {"shape": ["4x2x32"], "context": [40, 100], "num_reqs": [2], "nodes": [5]}
ROUNDS = 21
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
        self.dtype = torch.bfloat16 if ON_GPU else torch.float32
        self.context, self.batch, self.num_rows = context, batch, num_nodes + 1
        self.num_kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        self.scale = head_size**-0.5
        self.scratch = TreeAttentionScratch(head_size, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=self.dtype)

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
        blocks = torch.randperm(num_blocks, generator=generator, device=DEVICE)
        self.block_table = blocks.view(batch, max_blocks).int()
        # [batch, length, num_kv_heads, D]
        self.dense_keys, self.dense_values = (
            pool[blocks].reshape(batch, -1, num_kv_heads, head_size)[:, :length].contiguous()
            for pool in (self.keys, self.values)
        )
        self.query = normal(batch * self.num_rows, num_heads, head_size)
        self.words = torch.tensor(tree_words(num_nodes), device=DEVICE)  # [rows]
        # [rows, length], the same for all requests
        in_tree = (self.words[:, None] >> torch.arange(num_nodes, device=DEVICE)) & 1 != 0
        self.seen = torch.cat([in_tree.new_ones(self.num_rows, context), in_tree], dim=1)

    def folded(self) -> torch.Tensor:
        """Return the queries as [batch, num_kv_heads, group * rows, D]."""
        query = self.query.view(self.batch, self.num_rows, self.num_kv_heads, self.group, -1)
        return query.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()

    def unfolded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `folded` rows [batch, num_kv_heads, group * rows, n] as [batch * rows, num_heads, n]."""
        rows = rows.unflatten(2, (self.group, self.num_rows))
        return rows.permute(0, 3, 1, 2, 4).reshape(*self.query.shape[:2], -1)


def ours(inputs: Inputs) -> Bound:
    attend, out = _bind(inputs)
    return attend, lambda _: out


def _bind(inputs: Inputs) -> tuple[Callable[..., None], torch.Tensor]:
    """Return a call of tree_attention, which takes a `prefix`, and what it writes."""
    index, out = torch.arange(inputs.batch, device=DEVICE), torch.empty_like(inputs.query)
    starts, counts, lens = (
        torch.as_tensor(values, device=DEVICE).int().expand(inputs.batch).contiguous()
        for values in (index * inputs.num_rows, inputs.num_rows, inputs.context)
    )
    masks = inputs.words.repeat(inputs.batch, 1)
    call = functools.partial(
        tree_attention, inputs.query, inputs.keys, inputs.values, inputs.block_table, index, starts, counts, lens,
        masks, out, scale=inputs.scale, max_queries=inputs.num_rows, scratch=inputs.scratch,
    )  # fmt: skip
    return call, out


def flash_and_nodes(inputs: Inputs) -> Bound:
    """Bind FlashAttention over the prefix, then our kernel over the nodes, which merges both by log-sum-exp.

    On a GPU vLLM's FlashAttention reads the paged cache; on a CPU torch's own reads dense K and V.
    """
    attend, out = _bind(inputs)
    prefix = _paged_prefix(inputs) if ON_GPU else _dense_prefix(inputs)
    return lambda: attend(prefix=prefix()), lambda _: out


def _paged_prefix(inputs: Inputs) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return a call that finds output [tokens, heads, D] and log-sum-exp [heads, tokens] of the prefix alone."""
    from vllm.v1.attention.backends import fa_utils

    starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=DEVICE) * inputs.num_rows
    lens = torch.full((inputs.batch,), inputs.context, dtype=torch.int32, device=DEVICE)
    version, schedule = fa_utils.get_flash_attn_version(), None
    if version == 3:  # made once, as all layers of a forward share it
        schedule = fa_utils.get_scheduler_metadata(
            inputs.batch, inputs.num_rows, inputs.context, inputs.query.shape[1], *inputs.keys.shape[2:], lens,
            qkv_dtype=inputs.dtype, cu_seqlens_q=starts, page_size=inputs.keys.shape[1],
        )  # fmt: skip
    return functools.partial(
        fa_utils.flash_attn_varlen_func, inputs.query, inputs.keys, inputs.values, inputs.num_rows, starts,
        inputs.context, seqused_k=lens, softmax_scale=inputs.scale, causal=False, block_table=inputs.block_table,
        return_softmax_lse=True, scheduler_metadata=schedule, fa_version=version,
    )  # fmt: skip


def _dense_prefix(inputs: Inputs) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return the same call over dense K and V."""
    query = inputs.folded()
    keys, values = (
        dense[:, : inputs.context].transpose(1, 2).contiguous() for dense in (inputs.dense_keys, inputs.dense_values)
    )

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=inputs.scale)
        return inputs.unfolded(out), inputs.unfolded(lse[..., None])[..., 0].T

    return call


def sdpa(inputs: Inputs) -> Bound:
    """Bind torch's fused attention with a dense mask; the heads of a group are further rows of their KV head."""
    query, seen = inputs.folded(), inputs.seen.repeat(inputs.group, 1)
    keys, values = inputs.dense_keys.transpose(1, 2), inputs.dense_values.transpose(1, 2)
    attend = functional.scaled_dot_product_attention
    return functools.partial(attend, query, keys, values, seen, scale=inputs.scale), inputs.unfolded


def flex(inputs: Inputs) -> Bound:
    """Bind FlexAttention with a block mask: compiled on a GPU, eager, which holds all weights at once, on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    words, context, length = inputs.words, inputs.context, inputs.seen.shape[1]

    def mask_mod(batch: Any, head: Any, row: Any, entry: Any) -> Any:
        node = entry - context
        return (node < 0) | (((words[row] >> node.clamp(min=0)) & 1) != 0)

    block_mask = create_block_mask(mask_mod, None, None, inputs.num_rows, length, device=DEVICE.type)
    if ON_GPU:
        torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False) if ON_GPU else flex_attention
    query = inputs.query.view(inputs.batch, inputs.num_rows, *inputs.query.shape[1:]).transpose(1, 2)
    keys, values = inputs.dense_keys.transpose(1, 2), inputs.dense_values.transpose(1, 2)
    call = functools.partial(attend, query, keys, values, block_mask=block_mask, scale=inputs.scale, enable_gqa=True)
    return call, lambda result: result.transpose(1, 2).reshape(inputs.query.shape)


PEERS: dict[str, Callable[[Inputs], Bound]] = {
    "triton" if ON_GPU else "torch": ours,
    "flash_and_nodes": flash_and_nodes,
    "sdpa": sdpa,
    "flex_attention" if ON_GPU else "flex_attention_eager": flex,
}


def bind(inputs: Inputs) -> tuple[dict[str, Bound], dict[str, str]]:
    """Return the peers that run here, ours first, and why the others do not."""
    bound: dict[str, Bound] = {}
    notes: dict[str, str] = {}
    for name, peer in PEERS.items():
        try:
            call, tokens = peer(inputs)
            tokens(call())
        except Exception as error:
            if peer is ours:
                raise
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        else:
            bound[name] = call, tokens
    return bound, notes


def case(shape: str, context: int, num_reqs: int, nodes: int) -> Case:
    num_heads, num_kv_heads, head_size = map(int, shape.split("x"))
    inputs = Inputs(context, num_reqs, nodes, num_heads, num_kv_heads, head_size)
    bound, notes = bind(inputs)
    return Case(
        {name: call for name, (call, _) in bound.items()},
        2 * (inputs.dense_keys.nbytes + inputs.query.nbytes),
        4 * inputs.query.numel() * inputs.seen.shape[1],
        inputs.dtype,
        {name: tokens for name, (_, tokens) in bound.items()},
        notes,
    )
