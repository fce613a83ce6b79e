"""step: positions, sequence lengths and KV slots of one draft level of chains or trees, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, array_module, as_array, at_most, check_vector, launcher, use_triton

_BLOCK = 128


@triton.jit(do_not_specialize=["nodes_stride", "num_places", "frontier", "level", "max_position"])
def _step_kernel(
    # [R]
    rows_ptr,
    # [max_reqs]
    num_slots_ptr,
    # [max_reqs]
    num_tokens_ptr,
    # [max_reqs]
    pos_delta_ptr,
    # [max_reqs, max_blocks]
    block_table_ptr,
    block_table_stride,
    max_blocks,
    # [R, F]; None for chains
    nodes_ptr,
    nodes_stride,
    # [NUM_POS_AXES, R * F]
    positions_ptr,
    positions_axis_stride,
    positions_stride,
    # [R * F]
    logical_pos_ptr,
    # [R]
    seq_lens_ptr,
    # [R * F]
    slot_mapping_ptr,
    num_places,
    frontier,
    level,
    block_size,
    max_position,
    NUM_POS_AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A place is one node of the level: request idx // F, place idx % F of its frontier.
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = idx < num_places
    req_idx = idx if nodes_ptr is None else idx // frontier
    req_state_idx = tl.load(rows_ptr + req_idx, mask=mask, other=0)

    num_tokens = tl.load(num_tokens_ptr + req_state_idx, mask=mask, other=0).to(tl.int64)
    logical_pos = num_tokens - 1 + level
    tl.store(logical_pos_ptr + idx, logical_pos, mask=mask)
    pos = logical_pos + tl.load(pos_delta_ptr + req_state_idx, mask=mask, other=0)
    pos = tl.minimum(pos, max_position)
    for axis in tl.static_range(NUM_POS_AXES):
        tl.store(positions_ptr + axis * positions_axis_stride + idx * positions_stride, pos, mask=mask)

    root = tl.load(num_slots_ptr + req_state_idx, mask=mask, other=0)
    if nodes_ptr is None:
        slot = root + level
        tl.store(seq_lens_ptr + req_idx, slot + 1, mask=mask)
    else:
        place = idx % frontier
        node = tl.load(nodes_ptr + req_idx.to(tl.int64) * nodes_stride + place, mask=mask, other=0)
        slot = root + node
        tl.store(seq_lens_ptr + req_idx, root + 1, mask=mask & (place == 0))
    block_idx = slot // block_size
    in_table = mask & (block_idx < max_blocks)
    # int64 before the product: a large table's row offset, or a large pool's slot, passes 2**31.
    block_ptr = block_table_ptr + req_state_idx * block_table_stride + block_idx
    block = tl.load(block_ptr, mask=in_table, other=0).to(tl.int64)
    physical = tl.where(in_table, block * block_size + slot % block_size, -1)
    if nodes_ptr is not None:
        physical = tl.where(node == 0, 0, physical)
    tl.store(slot_mapping_ptr + idx, physical, mask=mask)


def step(
    rows: Tensor,
    num_slots: Tensor,
    num_tokens: Tensor,
    pos_delta: Tensor,
    block_table: Tensor,
    nodes: Tensor | None = None,
    *,
    block_size: int,
    level: int,
    max_position: int,
    positions: Tensor,
    logical_pos: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    impl: Impl = "auto",
) -> None:
    """Write the inputs of one draft level into persistent buffers.

    A chain has one place a request (F = 1), whose node is the level. Place f of request r is entry r * F + f of the
    outputs. Every node of the level has logical position num_tokens - 1 + level; node i goes to KV entry num_slots + i.
    Outputs may be longer than R * F (or R): the rest is left alone.

    Args:
        rows: int64 [R], persistent row (`req_state_idx`) of each batch row.
        num_slots: int32 [max_reqs], draft KV entries before the root, the last committed token.
        num_tokens: int32 [max_reqs], logical length of the committed text, the root included.
        pos_delta: int64 [max_reqs], rope position minus logical position.
        block_table: int32 [max_reqs, max_blocks], unit stride in its rows.
        nodes: int64 [R, F], tree node fed at each place, unit stride in its rows; 0 = no node here. None: chains.
        block_size: Tokens per KV block.
        level: Depth of these nodes; >= 0 of chains (0 = the root), >= 1 of trees.
        max_position: Highest rope position; higher ones are written as this.
        positions: Out, int64 [num_pos_axes, >= R * F] of any strides, or [>= R * F]: rope positions, equal on every
            axis.
        logical_pos: Out, int64 [>= R * F]: logical position of the input token, which keys the sampling noise.
        seq_lens: Out, int32 [>= R]: KV entries that every place of the request attends to: of a chain all up to its
            token, of a tree all up to the root.
        slot_mapping: Out, int64 [>= R * F]: physical KV slot of the token; 0, in the null block, where a tree has no
            node; -1 where the row's block table is too short.
        impl: See `dispatch.use_triton`.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    if positions.ndim == 1:
        positions = positions[None]
    num_rows, frontier = rows.shape[0], 1
    device = rows.device
    check_vector("rows", rows, torch.int64, device)
    if nodes is not None:
        assert nodes.dtype == torch.int64 and nodes.device == device and nodes.ndim == 2, "nodes"
        assert nodes.shape[0] == num_rows, f"nodes: expected {num_rows} rows, got {nodes.shape[0]}"
        frontier = nodes.shape[1]
        assert frontier <= 1 or nodes.stride(1) == 1, "nodes: expected unit stride in a row"
        assert frontier >= 1 and level >= 1, f"F {frontier}, level {level}"
    num_places = num_rows * frontier
    max_reqs = block_table.shape[0]
    check_vector("num_slots", num_slots, torch.int32, device, max_reqs)
    check_vector("num_tokens", num_tokens, torch.int32, device, max_reqs)
    check_vector("pos_delta", pos_delta, torch.int64, device, max_reqs)
    check_vector("logical_pos", logical_pos, torch.int64, device, num_places)
    check_vector("seq_lens", seq_lens, torch.int32, device, num_rows)
    check_vector("slot_mapping", slot_mapping, torch.int64, device, num_places)
    assert block_table.dtype == torch.int32 and block_table.device == device and block_table.ndim == 2, "block_table"
    assert block_table.shape[1] <= 1 or block_table.stride(1) == 1, "block_table: expected unit stride in a row"
    assert positions.dtype == torch.int64 and positions.device == device and positions.ndim == 2, "positions"
    assert positions.shape[0] in (1, 3), f"positions: expected 1 or 3 axes, got {positions.shape[0]}"
    assert positions.shape[1] >= num_places, f"positions: expected at least {num_places} columns"
    assert level >= 0 and block_size >= 1, f"level {level}, block_size {block_size}"
    if num_rows == 0:
        return
    if not use_triton(impl, device):
        step_reference(
            rows, num_slots, num_tokens, pos_delta, block_table, nodes, block_size=block_size, level=level,
            max_position=max_position, positions=positions, logical_pos=logical_pos, seq_lens=seq_lens,
            slot_mapping=slot_mapping,
        )  # fmt: skip
        return
    launcher(_step_kernel, (triton.cdiv(num_places, _BLOCK),), device)(
        rows,
        num_slots,
        num_tokens,
        pos_delta,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        nodes,
        0 if nodes is None else nodes.stride(0),
        positions,
        positions.stride(0),
        positions.stride(1),
        logical_pos,
        seq_lens,
        slot_mapping,
        num_places,
        frontier,
        level,
        block_size,
        max_position,
        NUM_POS_AXES=positions.shape[0],
        BLOCK=_BLOCK,
    )


def step_reference(
    rows: Tensor,
    num_slots: Tensor,
    num_tokens: Tensor,
    pos_delta: Tensor,
    block_table: Tensor,
    nodes: Tensor | None = None,
    *,
    block_size: int,
    level: int,
    max_position: int,
    positions: Tensor,
    logical_pos: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Do what `step` does, in numpy or torch: the specification. `positions` has two dimensions."""
    xp = array_module(rows.device)
    num_rows, state_row = rows.shape[0], as_array(rows)
    logical = xp.asarray(as_array(num_tokens)[state_row], dtype=xp.int64) + (level - 1)  # [R]
    pos = at_most(logical + as_array(pos_delta)[state_row], max_position)
    root = xp.asarray(as_array(num_slots)[state_row], dtype=xp.int64)  # [R]
    if nodes is None:
        node, shape = level, (num_rows,)
        as_array(seq_lens)[:num_rows] = root + (level + 1)
    else:
        node, shape = as_array(nodes), nodes.shape
        as_array(seq_lens)[:num_rows] = root + 1
        pos = (pos[:, None] + xp.zeros_like(node)).reshape(-1)
        logical, root, state_row = logical[:, None], root[:, None], state_row[:, None]  # [R, 1]: of all its places
    num_places = pos.shape[0]
    as_array(positions)[:, :num_places] = pos
    as_array(logical_pos)[:num_places].reshape(shape)[:] = logical
    slots, max_blocks = as_array(slot_mapping)[:num_places].reshape(shape), block_table.shape[1]
    if max_blocks == 0:
        slots[:] = -1
    else:
        entry = root + node  # [R, F], of chains [R]
        block_idx = entry // block_size
        block = as_array(block_table)[state_row, at_most(block_idx, max_blocks - 1)]
        physical = xp.asarray(block, dtype=xp.int64) * block_size + entry % block_size
        slots[:] = xp.where(block_idx < max_blocks, physical, -1)
    if nodes is not None:
        slots[node == 0] = 0
