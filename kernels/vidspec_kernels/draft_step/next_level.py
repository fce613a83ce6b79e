"""next_level: positions, sequence lengths and KV slots of one level of chains or trees, by batch row, in one launch."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launch, on_host, remember, use_triton
from vidspec_kernels.draft_step.buffers import LevelBuffers, StepBuffers

_BLOCK = 128


@triton.jit(
    do_not_specialize=[
        "nodes_stride", "tokens_stride", "ancestors_stride", "masks_stride", "num_places", "frontier", "padding_row",
        "level", "max_position",
    ],
    do_not_specialize_on_alignment=["fed_ptr", "nodes_ptr", "tokens_ptr", "ancestors_ptr", "level_ptr"],
)  # fmt: skip
def _next_level_kernel(
    rows_ptr, root_slot_ptr, root_pos_ptr, pos_delta_ptr,  # [M]
    batch_table_ptr, batch_table_stride, max_blocks,  # [M, max_blocks]
    fed_ptr,  # [max_reqs + 1]
    nodes_ptr, nodes_stride, tokens_ptr, tokens_stride,  # [B, F]; None for chains
    ancestors_ptr, ancestors_stride,  # [B, K + 1]
    positions_ptr, positions_axis_stride, positions_stride,  # [NUM_POS_AXES, B * F]
    logical_pos_ptr, slot_mapping_ptr,  # [B * F]
    seq_lens_ptr,  # [B]
    input_ids_ptr,  # [B * F]
    masks_ptr, masks_stride,  # [B, F]
    level_ptr,  # [1]; None: `level` is the number
    num_places, frontier, padding_row, level, block_size, max_position,
    NUM_POS_AXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A place is one node of the level: request idx // F, place idx % F of its frontier.
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < num_places
    req_idx = idx if nodes_ptr is None else idx // frontier
    if level_ptr is not None:
        level = tl.load(level_ptr)
    row = tl.load(rows_ptr + req_idx, mask=mask, other=padding_row)
    is_real = row != padding_row

    logical_pos = tl.load(root_pos_ptr + req_idx, mask=is_real, other=0) + level
    pos = logical_pos + tl.load(pos_delta_ptr + req_idx, mask=is_real, other=0)
    pos = tl.where(is_real, tl.minimum(pos, max_position), 0)
    tl.store(logical_pos_ptr + idx, tl.where(is_real, logical_pos, 0), mask=mask)
    for axis in tl.static_range(NUM_POS_AXES):
        tl.store(positions_ptr + axis * positions_axis_stride + idx * positions_stride, pos, mask=mask)

    root = tl.load(root_slot_ptr + req_idx, mask=is_real, other=0)
    if nodes_ptr is None:
        slot = root + level
        is_node = is_real
        tl.store(seq_lens_ptr + req_idx, tl.where(is_real, slot + 1, 0), mask=mask)
        bit = tl.full([BLOCK], 1, tl.int64) << (level - 1).to(tl.int64)
    else:
        place = idx % frontier
        batch_row = req_idx.to(tl.int64)
        node = tl.load(nodes_ptr + batch_row * nodes_stride + place, mask=is_real, other=0)
        is_node = node > 0
        slot = root + node
        tl.store(seq_lens_ptr + req_idx, tl.where(is_real, root + 1, 0), mask=mask & (place == 0))
        token = tl.load(tokens_ptr + batch_row * tokens_stride + place, mask=is_node, other=0)
        tl.store(input_ids_ptr + idx, token.to(tl.int32), mask=mask)
        word = tl.load(ancestors_ptr + batch_row * ancestors_stride + node, mask=is_node, other=0)
        tl.store(masks_ptr + batch_row * masks_stride + place, word, mask=mask)
        bit = tl.full([BLOCK], 1, tl.int64) << tl.where(is_node, node - 1, 0)
    # A request's nodes may lie in several programs; in whatever order they come, the bits are the same.
    tl.atomic_or(fed_ptr + row, bit, mask=is_node, sem="relaxed")

    block_idx = slot // block_size
    in_table = is_node & (block_idx < max_blocks)
    # int64 before the product: a large table's row offset, or a large pool's slot, passes 2**31.
    block_ptr = batch_table_ptr + req_idx.to(tl.int64) * batch_table_stride + block_idx
    block = tl.load(block_ptr, mask=in_table, other=0).to(tl.int64)
    physical = tl.where(in_table, block * block_size + slot % block_size, -1)
    if nodes_ptr is not None:
        physical = tl.where(is_real & (node == 0), 0, physical)
    tl.store(slot_mapping_ptr + idx, physical, mask=mask)


def next_level(
    step: StepBuffers, out: LevelBuffers, fed: Tensor, nodes: Tensor | None = None, tokens: Tensor | None = None,
    ancestors: Tensor | None = None, *, size: int, level: int | Tensor, block_size: int, max_position: int,
    impl: Impl = "auto",
) -> None:  # fmt: skip
    """Write the inputs of one level behind the roots, and note in `fed` which nodes get KV entries.

    A chain has one place a request (F = 1), whose node is the level. Every node of the level has logical position
    root_pos + level; node i goes to KV entry root_slot + i. Outputs may be longer than size * F (or size): the rest is
    left alone.

    Padding has slots -1, sequence length 0, positions 0, token 0, mask 0, and feeds nothing. A place of a tree without
    a node has slot 0, in the null block, token 0 and mask 0.

    Args:
        step: The step, as `begin_step` left it.
        out: Written; trees need its input_ids and masks, which chains leave alone.
        fed: In and out, int64 [max_reqs + 1]: bit j - 1 of a request is set for node j. `step.rows` is max_reqs where
            there is padding.
        nodes: int64 [size, F], tree node fed at each place, at most once a step, unit stride in its rows; 0 = no node
            here. None: chains.
        tokens: int64 [size, F], the nodes' tokens, strides as `nodes`; None: chains.
        ancestors: int64 [>= size, K + 1], masks of the nodes of each batch row's tree, unit stride in its rows; None:
            chains.
        size: Batch rows, padding included.
        level: Depth of these nodes, >= 1; or int32 [1] on the device.
        block_size: Tokens per KV block.
        max_position: Highest rope position; higher ones are written as this.
    """
    tensors, depth = (fed, nodes, tokens, ancestors), id(level) if isinstance(level, Tensor) else level
    call = (size, depth, block_size, max_position, impl, id(step), *map(id, tensors))
    known = out.ready.get(call) or remember(
        out.ready, call, _bind(step, out, *tensors, size, level, block_size, max_position, impl),
        (step, level, *tensors),
    )  # fmt: skip
    known[0]()


def _bind(
    step: StepBuffers, out: LevelBuffers, fed: Tensor, nodes: Tensor | None, tokens: Tensor | None,
    ancestors: Tensor | None, size: int, level: int | Tensor, block_size: int, max_position: int, impl: Impl,
) -> Callable[[], None]:  # fmt: skip
    """Check a call, and return what runs it."""
    device, width = step.device, 1
    assert size <= step.max_batch and size <= out.seq_lens.shape[0], f"size {size}"
    is_tree = nodes is not None
    assert (tokens is not None) == (ancestors is not None) == is_tree, "nodes, tokens, ancestors: all or none"
    assert out.masks is not None or not is_tree, "out: buffers of chains"
    if nodes is not None and out.masks is not None:
        width = nodes.shape[1]
        assert 1 <= width <= out.masks.shape[1], f"nodes: F {width}"
    check(
        device, fed=(fed, torch.int64, 1), nodes=(nodes, torch.int64, size, 1),
        tokens=(tokens, torch.int64, size, [width]), ancestors=(ancestors, torch.int64, size, 0),
    )  # fmt: skip
    level_ptr, level_value = (level, 0) if isinstance(level, Tensor) else (None, level)
    check(device, level=(level_ptr, torch.int32, 1))
    assert level_ptr is not None or level_value >= 1, f"level {level}"
    assert size * width <= out.logical_pos.shape[0], f"out: no room for {size} x {width} places"
    if size == 0:
        return lambda: None
    if not use_triton(impl, device):
        run = on_host(impl, device, "next_level").bind(
            step.rows, step.root_slot, step.root_pos, step.pos_delta, step.batch_table, fed, nodes, tokens,
            ancestors, *out.arrays, block_size, max_position, size,
        )  # fmt: skip
        if level_ptr is None:
            return functools.partial(run, level)
        of_step = level_ptr.numpy()
        return lambda: run(of_step[0])
    args = (
        step.rows, step.root_slot, step.root_pos, step.pos_delta, step.batch_table, step.batch_table.stride(0),
        step.batch_table.shape[1], fed, nodes, 0 if nodes is None else nodes.stride(0), tokens,
        0 if tokens is None else tokens.stride(0), ancestors, 0 if ancestors is None else ancestors.stride(0),
        out.positions, out.positions.stride(0), out.positions.stride(1), out.logical_pos, out.slot_mapping,
        out.seq_lens, out.input_ids, out.masks, 0 if out.masks is None else out.masks.stride(0), level_ptr,
        size * width, width, fed.shape[0] - 1, level_value, block_size, max_position,
    )  # fmt: skip
    constants = {"NUM_POS_AXES": out.positions.shape[0], "BLOCK": _BLOCK}
    key = (step, nodes is None, level_ptr is None, block_size)
    grid = (triton.cdiv(size * width, _BLOCK),)
    return lambda: launch(_next_level_kernel, grid, device, args, constants, out.plans, key)
