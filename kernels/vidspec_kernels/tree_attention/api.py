"""tree_attention: attention of draft-tree rows over a paged KV cache: a shared prefix, then nodes chosen by bit words.

On the GPU as many programs as it holds at a time share the work equally, whatever the requests' lengths (stream-K:
Osama et al., 2023; LeanAttention: Sanovar et al., 2024). Where a share ends within a row tile, a second launch
merges the tile's parts by log-sum-exp in an order that the lengths alone fix: equal inputs give equal bits. But where
shares end depends on the whole batch, and so do the last bits of a result. That is the price of equal shares in
bounded memory: splits of a fixed length would need partial results of every split of every request.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from vidspec_kernels.arrays import as_meta, check
from vidspec_kernels.dispatch import Impl, launch, use_triton
from vidspec_kernels.float8 import FP8, NO_SCALES, Scales, check_scales, readable, widens
from vidspec_kernels.limits import device_limits
from vidspec_kernels.tree_attention.reference import tree_attention_reference
from vidspec_kernels.tree_attention.tiles import _MAX_BLOCK_ROWS, _padded, tile_shape
from vidspec_kernels.tree_attention.triton import _merge_parts_kernel, _tree_attention_kernel

# Requests that a program looks at at once to find its share: a warp's lanes, as sums over more wait for other warps.
_BLOCK_REQS = 32
# A share of fewer tiles of keys writes about as much of its partial results as it reads of K and V.
MIN_UNITS = 4
# Rows that a program merges, a part of every tile's, and parts of them that are under way.
_MERGE_ROWS = 8
_MERGE_PARTS = 4
_LOG2E = 1.4426950408889634
# Of both kernels.
_SHARED_CONSTANTS = (
    *("GROUP", "HEAD_SIZE", "BLOCK_DIM", "BLOCK_ROWS", "BLOCK_KEYS", "BLOCK_REQS", "MIN_UNITS", "IS_OVERLAPPED"),
)
# Compute capability from which on a launch can begin before the one ahead of it has ended.
_OVERLAPS_FROM = 90
# Shapes of calls that are remembered as checked: most are of a few batch sizes.
_MAX_PLANS = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)


class TreeAttentionScratch:
    """Memory of a model's `tree_attention` calls, for parts of results, made once.

    All layers share it: calls that do must follow each other on a stream. It has room for two tiles of partial results
    of every program that a device holds, whatever the batch: for each multiprocessor 256 rows of a padded head and of
    one sum, in float32 (17 MB for heads of 128 and 132 multiprocessors).

    Args:
        head_size: The largest of the model's layers.
        device: Where its caches live.
    """

    def __init__(self, head_size: int, device: torch.device):
        self.head_size = head_size
        self.num_sms = device_limits(device).num_sms
        num_rows = 2 * _MAX_BLOCK_ROWS * self.num_sms
        self.part_out = torch.empty(num_rows * _padded(head_size), dtype=torch.float32, device=device)
        self.part_lse = torch.empty(num_rows, dtype=torch.float32, device=device)
        self.plans: dict[tuple[Any, ...], Callable[..., None]] = {}  # checked launches, by `_signature`
        self.variants: dict[Any, Any] = {}  # see `dispatch.launch`

    def as_meta(self) -> "TreeAttentionScratch":
        """Return what a launch is prepared with: the same, without memory."""
        other = copy.copy(self)
        other.part_out, other.part_lse = as_meta(self.part_out), as_meta(self.part_lse)
        other.plans, other.variants = {}, {}
        return other


def tree_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
    num_queries: Tensor, prefix_lens: Tensor, masks: Tensor, out: Tensor, *, scale: float, max_queries: int,
    scratch: TreeAttentionScratch, prefix: tuple[Tensor, Tensor] | None = None, lse: Tensor | None = None,
    scales: Scales = NO_SCALES, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Attend from the rows of each request to its prefix and to the nodes behind it that each row's mask word names.

    KV entry e of request r lies in block block_table[rows[r], e // block_size] at offset e % block_size. Query row
    query_start[r] + i attends to entries 0..prefix_lens[r] - 1 and to every entry prefix_lens[r] + j whose bit j of
    masks[r, i] is set (bit 63 is the sign). Entries past the table count as not attended to. Of entries that no row of
    the request attends to nothing is used, whatever they hold. A row that attends to nothing yields zeros and an LSE of
    -inf. Rows of `out` and `lse` that belong to no request are left alone: padding has no rows, and its tables may hold
    anything. Softmax and sums are float32.

    A launch depends on shapes, strides and `max_queries` alone, allocates nothing and reads nothing back from the
    device, so that it can be captured: every length is read when it runs.

    Args:
        query: float32, bfloat16, float16 or float8_e4m3fn [num_tokens, num_heads, head_size], unit stride in head_size.
        key_cache: One of these [num_blocks, block_size, num_kv_heads, head_size], any strides (a permuted view is
            fine).
        value_cache: The same shape, strides of its own.
        block_table: int32 [num_table_rows, max_blocks], unit stride in its rows; max_blocks >= 1.
        rows: int64 [R], row of `block_table` of each request.
        query_start: int32 [>= R], first row of each request in `query` and `out`; requests may not overlap.
        num_queries: int32 [>= R], rows of each request, 0..max_queries.
        prefix_lens: int32 [>= R], entries that all rows of the request attend to; less than none counts as none.
        masks: int64 [>= R, >= max_queries], unit stride in its rows.
        out: Out, like `query` in shape and dtype (of float8 queries any other), unit stride in head_size.
        scale: Factor of the logits.
        max_queries: Host-known bound of `num_queries`.
        scratch: Memory of the model's calls, on the same device; the reference uses none of it.
        prefix: The prefix part where something else has computed it (FlashAttention, not causal), merged by LSE: its
            output, like `out` in shape and dtype, unit stride in head_size, and its natural LSE, float32 [num_heads,
            num_tokens] of any strides, where either infinity says that the row has no prefix (its output is not used).
            Then only the nodes are computed here; `prefix_lens` still says where they lie. Both may be `out`, `lse`.
        lse: Out, float32 [num_heads, num_tokens] of any strides: natural log-sum-exp of each written row's logits.
        scales: What queries, keys and values are to be multiplied by, a float32 [num_kv_heads] of any stride each; None
            is 1. Read when it runs.
        impl: The kernel never synchronises with the host; the reference does.
    """
    arguments = (query, key_cache, value_cache, block_table, rows, query_start, num_queries, prefix_lens, masks, out)
    signature = _signature(max_queries, *arguments, lse, *(prefix or (None, None)), *scales)
    plan = scratch.plans.get(signature)
    if plan is None:
        _check(*arguments, max_queries, scratch, prefix, lse, scales)
        if len(scratch.plans) >= _MAX_PLANS:
            scratch.plans.clear()
        plan = scratch.plans[signature] = _plan(*arguments, scratch, max_queries, prefix, lse, scales)
    if rows.shape[0] == 0 or max_queries == 0 or query.shape[0] == 0:
        return
    if use_triton(impl, query.device):
        plan(arguments, scale, prefix, lse, scales)
    else:
        tree_attention_reference(
            *arguments, scale=scale, max_queries=max_queries, prefix=prefix, lse=lse, scales=scales
        )


def _signature(max_queries: int, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Return what checks and launch depend on, beside the device, which is the scratch's."""
    found: list[Any] = [max_queries]
    for tensor in tensors:
        found += (None,) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
    return tuple(found)


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
    num_queries: Tensor, prefix_lens: Tensor, masks: Tensor, out: Tensor, max_queries: int,
    scratch: TreeAttentionScratch, prefix: tuple[Tensor, Tensor] | None, lse: Tensor | None, scales: Scales,
) -> None:  # fmt: skip
    device, num_reqs = query.device, rows.shape[0]
    num_tokens, num_heads, head_size = query.shape
    assert query.dtype in _DTYPES and key_cache.dtype in _DTYPES, f"query {query.dtype}, key_cache {key_cache.dtype}"
    assert key_cache.ndim == 4 and key_cache.shape[3] == head_size, f"key_cache: {list(key_cache.shape)}"
    assert num_heads % key_cache.shape[2] == 0, f"key_cache: {key_cache.shape[2]} KV heads for {num_heads} heads"
    assert value_cache.shape == key_cache.shape, f"value_cache: {list(value_cache.shape)}"
    assert value_cache.dtype == key_cache.dtype, f"value_cache: expected {key_cache.dtype}, got {value_cache.dtype}"
    assert key_cache.device == value_cache.device == device, f"caches: expected device {device}"
    check(
        device, block_table=(block_table, torch.int32, 0, 1), rows=(rows, torch.int64, 0),
        query_start=(query_start, torch.int32, num_reqs), num_queries=(num_queries, torch.int32, num_reqs),
        prefix_lens=(prefix_lens, torch.int32, num_reqs), masks=(masks, torch.int64, num_reqs, max_queries),
    )  # fmt: skip
    assert max_queries >= 0, f"max_queries {max_queries}"
    assert scratch.part_out.device == device and scratch.head_size >= head_size, f"scratch for heads of {head_size}"
    check_scales(device, scales, key_cache.shape[2])
    like_query, dtype = {"query": query, "out": out}, query.dtype if query.dtype != FP8 else out.dtype
    like_lse = {} if lse is None else {"lse": lse}
    if prefix is not None:
        like_query["prefix output"], like_lse["prefix LSE"] = prefix
    for name, tensor in like_query.items():
        assert tensor.shape == query.shape and tensor.device == device, f"{name}: {list(tensor.shape)}"
        assert tensor.dtype in (dtype, query.dtype), f"{name}: expected {dtype}, got {tensor.dtype}"
        assert tensor.stride(2) == 1, f"{name}: expected unit stride in head_size"
    for name, tensor in like_lse.items():
        assert tensor.dtype == torch.float32 and tensor.device == device, f"{name}: {tensor.dtype}"
        assert tensor.shape == (num_heads, num_tokens), f"{name}: {list(tensor.shape)}"


def _plan(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
    num_queries: Tensor, prefix_lens: Tensor, masks: Tensor, out: Tensor, scratch: TreeAttentionScratch,
    max_queries: int, prefix: tuple[Tensor, Tensor] | None, lse: Tensor | None, scales: Scales,
) -> Callable[..., None]:  # fmt: skip
    """Return what launches the kernel for arguments that look like these: tensors, scale, prefix and `lse`."""
    # The kernel counts a request's rows, and units of work, in 32 bits.
    assert max_queries * max(query.stride(0), out.stride(0)) < 2**31, f"strides {query.stride(0)}, {out.stride(0)}"
    device, num_reqs, (_, num_heads, head_size) = query.device, rows.shape[0], query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    widen, limits = widens(query, key_cache), device_limits(device)
    tile = tile_shape(max_queries * group, head_size, widen, prefix is None, limits)
    is_overlapped = device.type != "cpu" and limits.capability >= _OVERLAPS_FROM
    num_row_tiles = triton.cdiv(max_queries * group, tile.block_rows)
    most_units = num_reqs * num_kv_heads * num_row_tiles * (block_table.shape[1] * block_size // tile.block_keys + 2)
    assert most_units < 2**31, f"{most_units} units of work"
    table_strides, mask_strides = (block_table.stride(0),), (masks.stride(0),)
    per_tensor = (query, key_cache, value_cache, *(prefix or (None, None)), out, lse)
    strides = [_strides(tensor) for tensor in per_tensor]
    # A key's dimensions may lie anywhere, those of queries and outputs are side by side.
    query_strides, keys, values, prefix_out, prefix_lse, outs, lses = (
        found if i in (1, 2) else found[:2] for i, found in enumerate(strides)
    )
    numbers = (num_reqs, num_kv_heads, block_table.shape[1] * block_size, max_queries, num_row_tiles)
    num_programs = tile.programs_per_sm * scratch.num_sms
    merge_grid = (num_row_tiles * tile.block_rows // _MERGE_ROWS, num_kv_heads, num_reqs)
    constants = {
        "GROUP": group, "HEAD_SIZE": head_size, "BLOCK_SIZE": block_size, "BLOCK_DIM": _padded(head_size),
        "BLOCK_ROWS": tile.block_rows, "BLOCK_KEYS": tile.block_keys, "BLOCK_NODES": tile.block_nodes,
        "BLOCK_REQS": _BLOCK_REQS, "MIN_UNITS": MIN_UNITS, "IS_OVERLAPPED": is_overlapped,
        "WIDEN": widen,
    }  # fmt: skip
    merge_constants = {name: constants[name] for name in _SHARED_CONSTANTS}
    merge_constants |= {"MERGE_ROWS": _MERGE_ROWS, "MERGE_PARTS": _MERGE_PARTS}
    options = {"num_stages": tile.num_stages, "num_warps": tile.num_warps}
    merge_options = {"launch_pdl": True} if is_overlapped else None
    scale_strides = [0 if scale is None else scale.stride(0) for scale in scales]
    dtypes = (query.dtype, key_cache.dtype, out.dtype, *(scale is None for scale in scales))
    variant = (*dtypes, prefix is None, lse is None, num_kv_heads, *strides, *table_strides, tile)

    def launch_one(
        arguments: tuple[Tensor, ...], scale: float, prefix: tuple[Tensor, Tensor] | None, lse: Tensor | None,
        scales: Scales,
    ) -> None:  # fmt: skip
        query, key_cache, value_cache, block_table, *vectors, masks, out = arguments
        before, before_lse = prefix or (None, None)
        query, key_cache, value_cache = readable(query), readable(key_cache), readable(value_cache)
        parts = scratch.part_out, scratch.part_lse
        args = (
            query, *query_strides, key_cache, *keys, value_cache, *values, block_table, *table_strides, *vectors,
            masks, *mask_strides, before, *prefix_out, before_lse, *prefix_lse, out, *outs, lse, *lses, *parts,
            *itertools.chain(*zip(scales, scale_strides, strict=True)), scale * _LOG2E, *numbers,
        )  # fmt: skip
        aligned = (query, key_cache, value_cache, block_table, before, before_lse, out, lse)
        key = (variant, *(tensor is not None and tensor.data_ptr() % 16 for tensor in aligned))
        launch(_tree_attention_kernel, (num_programs,), device, args, constants, scratch.variants, key, options)
        if prefix is None:
            args = (*vectors[1:], out, *outs, lse, *lses, *parts, *numbers, num_programs)
            launch(_merge_parts_kernel, merge_grid, device, args, merge_constants, scratch.variants, key, merge_options)

    return launch_one


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()
