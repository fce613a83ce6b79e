"""chain_step: positions, sequence lengths and KV slots of one draft level of a chain, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.dispatch import Impl, array_module, as_array, at_most, check_vector, launcher, use_triton

_BLOCK = 128


@triton.jit(do_not_specialize=["num_rows", "level", "max_position"])
def _chain_step_kernel(
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
    # [NUM_POS_AXES, R]
    positions_ptr,
    positions_axis_stride,
    positions_stride,
    # [R]
    logical_pos_ptr,
    # [R]
    seq_lens_ptr,
    # [R]
    slot_mapping_ptr,
    num_rows,
    level,
    block_size,
    max_position,
    NUM_POS_AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req_idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = req_idx < num_rows
    req_state_idx = tl.load(rows_ptr + req_idx, mask=mask, other=0)

    num_tokens = tl.load(num_tokens_ptr + req_state_idx, mask=mask, other=0).to(tl.int64)
    logical_pos = num_tokens - 1 + level
    tl.store(logical_pos_ptr + req_idx, logical_pos, mask=mask)
    pos = logical_pos + tl.load(pos_delta_ptr + req_state_idx, mask=mask, other=0)
    pos = tl.minimum(pos, max_position)
    for axis in tl.static_range(NUM_POS_AXES):
        tl.store(positions_ptr + axis * positions_axis_stride + req_idx * positions_stride, pos, mask=mask)

    slot = tl.load(num_slots_ptr + req_state_idx, mask=mask, other=0) + level
    tl.store(seq_lens_ptr + req_idx, slot + 1, mask=mask)
    block_idx = slot // block_size
    in_table = mask & (block_idx < max_blocks)
    # int64 before the product: a large table's row offset, or a large pool's slot, passes 2**31.
    block_ptr = block_table_ptr + req_state_idx * block_table_stride + block_idx
    block = tl.load(block_ptr, mask=in_table, other=0).to(tl.int64)
    physical = tl.where(in_table, block * block_size + slot % block_size, -1)
    tl.store(slot_mapping_ptr + req_idx, physical, mask=mask)


def chain_step(
    rows: Tensor,
    num_slots: Tensor,
    num_tokens: Tensor,
    pos_delta: Tensor,
    block_table: Tensor,
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
    """Write the inputs of one draft level of a chain into persistent buffers.

    The token fed at `level` (0 = the root, the last committed token) has logical position num_tokens - 1 + level and
    goes to KV entry num_slots + level. Outputs may be longer than R: entries past R are left alone.

    Args:
        rows: int64 [R], persistent row (`req_state_idx`) of each batch row.
        num_slots: int32 [max_reqs], draft KV entries before the root.
        num_tokens: int32 [max_reqs], logical length of the committed text, the root included.
        pos_delta: int64 [max_reqs], rope position minus logical position.
        block_table: int32 [max_reqs, max_blocks], unit stride in its rows.
        block_size: Tokens per KV block.
        level: >= 0.
        max_position: Highest rope position; higher ones are written as this.
        positions: Out, int64 [num_pos_axes, >= R] of any strides, or [>= R]: rope positions, equal on every axis.
        logical_pos: Out, int64 [>= R]: logical position of the input token, which keys the sampling noise.
        seq_lens: Out, int32 [>= R]: KV entries that the token attends to, its own included.
        slot_mapping: Out, int64 [>= R]: physical KV slot of the token; -1 where the row's block table is too short.
        impl: See `dispatch.use_triton`.

    Raises:
        AssertionError: A dtype, device, shape or stride is not as above.
    """
    if positions.ndim == 1:
        positions = positions[None]
    num_rows = rows.shape[0]
    device = rows.device
    check_vector("rows", rows, torch.int64, device)
    max_reqs = block_table.shape[0]
    check_vector("num_slots", num_slots, torch.int32, device, max_reqs)
    check_vector("num_tokens", num_tokens, torch.int32, device, max_reqs)
    check_vector("pos_delta", pos_delta, torch.int64, device, max_reqs)
    check_vector("logical_pos", logical_pos, torch.int64, device, num_rows)
    check_vector("seq_lens", seq_lens, torch.int32, device, num_rows)
    check_vector("slot_mapping", slot_mapping, torch.int64, device, num_rows)
    assert block_table.dtype == torch.int32 and block_table.device == device and block_table.ndim == 2, "block_table"
    assert block_table.shape[1] <= 1 or block_table.stride(1) == 1, "block_table: expected unit stride in a row"
    assert positions.dtype == torch.int64 and positions.device == device and positions.ndim == 2, "positions"
    assert positions.shape[0] in (1, 3), f"positions: expected 1 or 3 axes, got {positions.shape[0]}"
    assert positions.shape[1] >= num_rows, f"positions: expected at least {num_rows} columns"
    assert level >= 0 and block_size >= 1, f"level {level}, block_size {block_size}"
    if num_rows == 0:
        return
    if not use_triton(impl, device):
        chain_step_reference(
            rows, num_slots, num_tokens, pos_delta, block_table, block_size=block_size, level=level,
            max_position=max_position, positions=positions, logical_pos=logical_pos, seq_lens=seq_lens,
            slot_mapping=slot_mapping,
        )  # fmt: skip
        return
    launcher(_chain_step_kernel, (triton.cdiv(num_rows, _BLOCK),), device)(
        rows,
        num_slots,
        num_tokens,
        pos_delta,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        positions,
        positions.stride(0),
        positions.stride(1),
        logical_pos,
        seq_lens,
        slot_mapping,
        num_rows,
        level,
        block_size,
        max_position,
        NUM_POS_AXES=positions.shape[0],
        BLOCK=_BLOCK,
    )


def chain_step_reference(
    rows: Tensor,
    num_slots: Tensor,
    num_tokens: Tensor,
    pos_delta: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    level: int,
    max_position: int,
    positions: Tensor,
    logical_pos: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Do what `chain_step` does, in numpy or torch: the specification. `positions` has two dimensions."""
    xp = array_module(rows.device)
    num_rows, state_row = rows.shape[0], as_array(rows)
    logical = xp.asarray(as_array(num_tokens)[state_row], dtype=xp.int64) + (level - 1)  # [R]
    as_array(logical_pos)[:num_rows] = logical
    as_array(positions)[:, :num_rows] = at_most(logical + as_array(pos_delta)[state_row], max_position)

    slot = xp.asarray(as_array(num_slots)[state_row], dtype=xp.int64) + level  # [R]
    as_array(seq_lens)[:num_rows] = slot + 1
    max_blocks = block_table.shape[1]
    if max_blocks == 0:
        slot_mapping[:num_rows] = -1
        return
    block_idx = slot // block_size  # [R]
    block = as_array(block_table)[state_row, at_most(block_idx, max_blocks - 1)]
    physical = xp.asarray(block, dtype=xp.int64) * block_size + slot % block_size
    as_array(slot_mapping)[:num_rows] = xp.where(block_idx < max_blocks, physical, -1)
