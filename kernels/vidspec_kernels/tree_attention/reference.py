"""tree_attention_reference: what `tree_attention` does, in plain torch, and the CPU engine's path."""

import functools
import math
import operator

import torch
import triton
from torch import Tensor

from vidspec_kernels.float8 import NO_SCALES, Scales

# Bits of a mask word: KV entries after the prefix.
_NODES = 64
_BITS = torch.ones(_NODES, dtype=torch.int64, device="cpu") << torch.arange(_NODES, device="cpu")
# float32 logits that the reference holds at once: they stay near the core.
_STRIP_ENTRIES = 2**20
_LOG2E = 1.4426950408889634


def tree_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
    num_queries: Tensor, prefix_lens: Tensor, masks: Tensor, out: Tensor, *, scale: float, max_queries: int,
    prefix: tuple[Tensor, Tensor] | None = None, lse: Tensor | None = None, scales: Scales = NO_SCALES,
) -> None:  # fmt: skip
    """Do what `tree_attention` does, in plain torch without a loop over requests or rows: the specification.

    Same arguments. Requests are padded to max_queries rows, and to the longest prefix and the nodes.
    """
    num_reqs, (num_tokens, num_heads, head_size) = rows.shape[0], query.shape
    num_kv_heads = key_cache.shape[2]
    row = torch.arange(max_queries, device=query.device)
    valid = row < num_queries[:num_reqs, None]  # [R, Q]
    token = (query_start[:num_reqs, None] + row).clamp_(max=num_tokens - 1).flatten()  # [R * Q]
    blocks, bias = _blocks_and_bias(
        block_table, rows, (prefix_lens[:num_reqs].clamp(min=0) * valid[:, 0])[:, None].to(torch.int64),
        masks[:num_reqs, :max_queries].masked_fill(~valid, 0), key_cache.shape[:2], reads_prefix=prefix is None,
    )  # fmt: skip
    # Logits in base 2, whose exponential is the faster one; [R, num_kv_heads, group, Q, D].
    queries = query.index_select(0, token).to(torch.float32) * (scale * _LOG2E)
    queries = queries.view(num_reqs, max_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    for factor in scales[:2]:
        queries = queries if factor is None else queries * factor[:, None, None, None]
    step = max(1, _STRIP_ENTRIES // (num_heads * bias[0].numel()))
    parts = [
        _attend(queries[i : i + step], key_cache, value_cache, blocks[i : i + step], bias[i : i + step])
        for i in range(0, num_reqs, step)
    ]
    result, top, total = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    result = result if scales[2] is None else result * scales[2][:, None, None, None]
    kept = valid.flatten().nonzero().squeeze(1)
    token = token.index_select(0, kept)
    # Only rows that belong to a request: [n, num_heads, D], [n, num_heads].
    result = result.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_size).index_select(0, kept)
    if prefix is not None or lse is not None:
        result_lse = (top + total.log2()).permute(0, 3, 1, 2, 4).reshape(-1, num_heads).index_select(0, kept) / _LOG2E
        if prefix is not None:
            result, result_lse = _merge(result, result_lse, prefix[0][token], prefix[1].T[token])
        if lse is not None:
            lse.T[token] = result_lse
    out.index_copy_(0, token, result.to(out.dtype))


def _blocks_and_bias(
    block_table: Tensor, rows: Tensor, prefix_lens: Tensor, masks: Tensor, pool_shape: torch.Size, reads_prefix: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return blocks [R, n] that hold each request's first L entries, and what to add to the logits [R, Q, L].

    0 where a row attends to an entry, else -inf. `prefix_lens` is [R, 1]. Without `reads_prefix`, of the nodes only:
    L entries from the beginning of the first node's block on.
    """
    num_blocks, block_size = pool_shape
    max_blocks = block_table.shape[1]
    # Up to the last node that any row attends to: seldom all 64.
    union = functools.reduce(operator.or_, masks.flatten().tolist())
    num_nodes = max(1, (union & (2**_NODES - 1)).bit_length())
    if not reads_prefix:
        length = block_size - 1 + num_nodes
        first = prefix_lens // block_size  # [R, 1], column of the table that holds the first node
        first_node, prefix_end = prefix_lens - first * block_size, torch.zeros_like(first)
    else:
        length = int(prefix_lens.max()) + num_nodes
        first = torch.zeros_like(prefix_lens)
        first_node = prefix_end = prefix_lens
    entry = torch.arange(length, device=rows.device)
    # Columns that hold no entry attended to may hold anything.
    column = (first + entry[: triton.cdiv(length, block_size)]).clamp_(max=max_blocks - 1)
    blocks = block_table.index_select(0, rows).gather(1, column).clamp_(0, num_blocks - 1)
    bias = torch.where(entry < prefix_end, 0.0, float("-inf"))[:, None].expand(-1, masks.shape[1], -1).contiguous()
    seen = (masks[:, :, None] & _BITS[:num_nodes].to(rows.device)) != 0  # [R, Q, num_nodes]
    node = (first_node + entry[:num_nodes])[:, None].expand(seen.shape)
    bias.scatter_(2, node, torch.where(seen, 0.0, float("-inf")))
    if not reads_prefix or length > max_blocks * block_size:
        bias.masked_fill_((first * block_size + entry >= max_blocks * block_size)[:, None], float("-inf"))
    return blocks, bias


def _attend(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output [R, num_kv_heads, group, Q, D], and maximum and sum of exponentials of each row [..., 1].

    Args:
        queries: float32 [R, num_kv_heads, group, Q, D], scaled for logits in base 2.
        key_cache: As in `tree_attention`.
        value_cache: As in `tree_attention`.
        blocks: [R, n].
        bias: float32 [R, Q, L], 0 or -inf.
    """
    rows = queries.flatten(2, 3).flatten(0, 1)  # [R * num_kv_heads, group * Q, D]
    keys = _gather(key_cache, blocks, bias.shape[2])
    logits = torch.bmm(rows, keys.transpose(1, 2)).view(*queries.shape[:4], -1)
    bias = bias[:, None, None]
    logits += bias
    top = logits.amax(dim=-1, keepdim=True)
    # Adding -inf is the fast way to hide an entry, but one that holds NaN or infinity still shows: then by selection.
    if math.isnan(top.sum().item()):
        logits.masked_fill_(bias == float("-inf"), float("-inf"))
        top = logits.amax(dim=-1, keepdim=True)
    # Rows that attend to nothing keep -inf; the shift only has to be finite for them.
    weights = logits.sub_(top.clamp(min=torch.finfo(torch.float32).min)).exp2_()
    # The largest weight of a row is 1.
    total = weights.sum(dim=-1, keepdim=True).clamp_(min=1.0)
    values = _gather(value_cache, blocks, bias.shape[-1])
    result = torch.bmm(weights.view(*rows.shape[:2], -1), values)
    # 0 * NaN is NaN.
    if not math.isfinite(result.sum().item()):
        unseen = (bias == float("-inf")).all(dim=3).transpose(2, 3)  # [R, 1, L, 1]
        values = values.unflatten(0, queries.shape[:2]).masked_fill(unseen, 0.0)
        result = torch.bmm(weights.view(*rows.shape[:2], -1), values.flatten(0, 1))
    return result.view(queries.shape) / total, top, total


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` entries of some blocks as float32 [R * num_kv_heads, length, head_size]."""
    num_reqs, num_columns = blocks.shape
    _, block_size, num_kv_heads, head_size = cache.shape
    # Whole blocks in the cache's own order first: the CPU engine keeps a block of keys as [head_size, block_size].
    slots_adjacent = cache.stride(1) < cache.stride(3)
    chosen = cache.permute(0, 2, 3, 1) if slots_adjacent else cache.permute(0, 2, 1, 3)
    chosen = chosen.index_select(0, blocks.flatten()).to(torch.float32)
    chosen = chosen.view(num_reqs, num_columns, *chosen.shape[1:])
    if slots_adjacent:
        entries = chosen.permute(0, 2, 3, 1, 4).reshape(num_reqs * num_kv_heads, head_size, -1).transpose(1, 2)
    else:
        entries = chosen.transpose(1, 2).reshape(num_reqs * num_kv_heads, num_columns * block_size, head_size)
    return entries[:, :length]


def _merge(out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [..., D] and natural LSE [...] of two parts together."""
    prefix_lse = prefix_lse.masked_fill(prefix_lse == float("inf"), float("-inf"))
    total = torch.logaddexp(lse, prefix_lse)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    weight, prefix_weight = torch.exp(lse - shift)[..., None], torch.exp(prefix_lse - shift)[..., None]
    prefix_out = prefix_out.to(torch.float32).masked_fill(prefix_weight == 0, 0.0)
    return out * weight + prefix_out * prefix_weight, total
