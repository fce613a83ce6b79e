"""begin_step: what a step of drafting reads, by batch row, and the inputs of its first forward, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, known, launch, on_host, use_triton
from vidspec_kernels.draft_step.buffers import StepBuffers, StepTables

_BLOCK = 1024
# Arguments of a launch that tables and buffers do not settle: the tensors of its own step, and its numbers.
_CHANGING = (
    *("batch_rows_ptr", "picked_ptr", "num_sampled_ptr", "is_verified_ptr", "temperature_ptr", "seeds_ptr"),
    *("num_reqs", "max_position", "max_drafts"),
)


@triton.jit
def _slot(batch_table_ptr, entry, block_size, max_blocks):
    """Return the physical slot of a KV entry, -1 where the table has none."""
    block_idx = entry // block_size
    in_table = (entry >= 0) & (block_idx < max_blocks)
    # int64 before the product: a large pool's slot passes 2**31.
    block = tl.load(batch_table_ptr + block_idx, mask=in_table, other=0).to(tl.int64)
    return tl.where(in_table, block * block_size + entry % block_size, -1)


@triton.jit(
    do_not_specialize=["num_reqs", "padding_row", "max_position", "max_drafts", "text_stride", "last_sampled_stride"],
    do_not_specialize_on_alignment=[name for name in _CHANGING if name.endswith("_ptr")],
)
def _begin_step_kernel(
    batch_rows_ptr,  # [n]
    picked_ptr,  # [m]; None: all
    num_sampled_ptr,  # [n]
    is_verified_ptr,  # [m]; None: of all
    temperature_ptr,  # [max_reqs]; None: 0
    seeds_ptr, num_tokens_ptr,  # [max_reqs]
    text_ptr, text_stride,  # [max_reqs, max_len]
    last_sampled_ptr, last_sampled_stride,  # [max_reqs, 1]
    num_dropped_ptr, pos_delta_ptr,  # [max_reqs]
    block_table_ptr, block_table_stride, max_blocks,  # [max_reqs, max_blocks]
    fed_ptr,  # [max_reqs + 1]; None: nothing is ever missing
    path_ptr, path_stride, num_cols,  # [max_reqs, num_cols]; None for chains
    # [M]
    out_rows_ptr, out_num_accepted_ptr, out_temperature_ptr, out_seeds_ptr, out_root_slot_ptr, out_root_pos_ptr,
    out_pos_delta_ptr, out_last_root_ptr,
    batch_table_ptr, batch_table_stride,  # [M, max_blocks]
    level_ptr,  # [1]
    input_ids_ptr,  # [2M]
    positions_ptr, positions_axis_stride, positions_stride,  # [NUM_POS_AXES, 2M]
    slot_mapping_ptr,  # [2M]
    seq_lens_ptr,  # [M]
    out_path_ptr, out_path_stride,  # [M, num_cols]
    num_reqs, padding_row, block_size, max_position, max_drafts,
    NUM_POS_AXES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    """One program a request and BLOCK columns of its block table; the first of a request does all else."""
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if b >= num_reqs:
        if chunk == 0:
            zero = tl.full([], 0, tl.int64)
            tl.store(out_rows_ptr + b, zero + padding_row)
            tl.store(out_num_accepted_ptr + b, -1)
            tl.store(out_temperature_ptr + b, 0.0)
            tl.store(out_seeds_ptr + b, zero)
            tl.store(out_root_slot_ptr + b, 0)
            tl.store(out_root_pos_ptr + b, zero)
            tl.store(out_pos_delta_ptr + b, zero)
            tl.store(out_last_root_ptr + b, 0)
            tl.store(seq_lens_ptr + b, 0)
            pair = 2 * b + tl.arange(0, 2)
            tl.store(slot_mapping_ptr + pair, tl.full([2], -1, tl.int64))
            tl.store(input_ids_ptr + pair, tl.full([2], 0, tl.int32))
            for axis in tl.static_range(NUM_POS_AXES):
                place = axis * positions_axis_stride + pair * positions_stride
                tl.store(positions_ptr + place, tl.full([2], 0, tl.int64))
            if b == 0:
                tl.store(level_ptr, 0)
        return

    i = b if picked_ptr is None else tl.load(picked_ptr + b)
    row = tl.load(batch_rows_ptr + i)
    num_tokens = tl.load(num_tokens_ptr + row)
    root = num_tokens - 1 - tl.load(num_dropped_ptr + row)
    block_table_ptr += row * block_table_stride
    col = chunk * BLOCK + tl.arange(0, BLOCK)
    needed = tl.minimum((root + max_drafts) // block_size + 1, max_blocks)
    blocks = tl.load(block_table_ptr + col, mask=col < needed, other=0)
    tl.store(batch_table_ptr + b * batch_table_stride + col, blocks, mask=col < needed)
    if chunk > 0:
        return
    if b == 0:
        tl.store(level_ptr, 0)

    sampled = tl.load(num_sampled_ptr + i)
    accepted = tl.maximum(sampled - 1, 0)
    verified = sampled - 1
    if is_verified_ptr is not None:
        verified = tl.where(tl.load(is_verified_ptr + b) != 0, verified, -1)
    delta = tl.load(pos_delta_ptr + row)
    root_pos = (num_tokens - 1).to(tl.int64)
    tl.store(out_rows_ptr + b, row)
    tl.store(out_num_accepted_ptr + b, verified)
    if temperature_ptr is None:
        tl.store(out_temperature_ptr + b, 0.0)
    else:
        tl.store(out_temperature_ptr + b, tl.load(temperature_ptr + row))
    tl.store(out_seeds_ptr + b, tl.load(seeds_ptr + row))
    tl.store(out_root_slot_ptr + b, root)
    tl.store(out_root_pos_ptr + b, root_pos)
    tl.store(out_pos_delta_ptr + b, delta)
    tl.store(out_last_root_ptr + b, root - tl.maximum(verified, 0) - 1)
    tl.store(seq_lens_ptr + b, root + 1)

    last = accepted
    if path_ptr is not None:
        path_ptr += row * path_stride
        path_col = tl.arange(0, BLOCK_PATH)
        nodes = tl.load(path_ptr + path_col, mask=path_col < num_cols, other=0)
        tl.store(out_path_ptr + b * out_path_stride + path_col, nodes, mask=path_col < num_cols)
        last = tl.load(path_ptr + tl.minimum(accepted, num_cols - 1))
    is_missing = accepted < 0  # never
    if fed_ptr is not None:
        fed = tl.load(fed_ptr + row)
        is_missing = (accepted > 0) & (((fed >> tl.maximum(last - 1, 0).to(tl.int64)) & 1) == 0)
        tl.store(fed_ptr + row, tl.full([], 0, tl.int64))

    # The two tokens: 0 the one before the root, 1 the root.
    which = tl.arange(0, 2)
    pair = 2 * b + which
    slot = _slot(block_table_ptr, root - 1 + which, block_size, max_blocks)
    tl.store(slot_mapping_ptr + pair, tl.where((which == 0) & (is_missing == 0), 0, slot))
    pos = tl.minimum(root_pos - 1 + which + delta, max_position)
    for axis in tl.static_range(NUM_POS_AXES):
        tl.store(positions_ptr + axis * positions_axis_stride + pair * positions_stride, pos)
    previous = tl.load(text_ptr + row * text_stride + tl.maximum(num_tokens - 2, 0))
    token = tl.load(last_sampled_ptr + row * last_sampled_stride).to(tl.int32)
    tl.store(input_ids_ptr + pair, tl.where(which == 0, previous, token))


def begin_step(
    batch_rows: Tensor, picked: Tensor | None, num_sampled: Tensor, is_verified: Tensor | None,
    temperature: Tensor | None, seeds: Tensor, tables: StepTables, out: StepBuffers, *, size: int, block_size: int,
    max_position: int, max_drafts: int, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Write a step's buffers: those of its m requests, then padding up to batch row `size`; later rows are left alone.

    The first forward feeds the committed text's last two tokens of each request. The first of them is there because its
    KV is missing exactly when it is a draft that was proposed but not fed (the end of a chain, a leaf of a tree);
    otherwise its KV is valid and this copy goes to slot 0, in the null block. `fed` is read for that, then set to 0;
    without it the KV of all committed text but the root is valid.

    Padding has row max_reqs, num_accepted -1, slots -1 and 0 everywhere else; its `batch_table` and `path` are left
    alone. Block tables are copied at least up to the entry of the last draft, root_slot + max_drafts.

    Args:
        batch_rows: int64 [n], persistent rows of the target's batch.
        picked: int64 [m], places of the requests that draft in it; None: all of them, m = n.
        num_sampled: int32 [n], accepted drafts and the target's own token.
        is_verified: bool [m], whether the target has verified drafts of this request; None: of all.
        temperature: float32 [max_reqs]; None: 0 everywhere, the draft is greedy.
        seeds: int64 [max_reqs].
        tables: Read by persistent row; `fed` of the m rows, if there is one, is set to 0.
        out: Written.
        size: Batch rows to write, in [m, M].
        block_size: Tokens per KV block.
        max_position: Highest rope position; higher ones are written as this.
        max_drafts: Most drafts of this step, K.
    """
    num_reqs = batch_rows.shape[0] if picked is None else picked.shape[0]
    assert num_reqs <= size <= out.max_batch, f"size {size}, {num_reqs} requests, room for {out.max_batch}"
    key = (tables, picked is None, is_verified is None, temperature is None, block_size)
    # A request's block table is copied by as many programs as its columns need.
    grid = (size, max(-(-tables.block_table.shape[1] // _BLOCK), 1))
    step = (batch_rows, picked, num_sampled, is_verified, temperature, seeds)
    numbers = (num_reqs, max_position, max_drafts)
    plan = known(out.plans, _begin_step_kernel, key)
    if plan is not None and size:
        plan(grid, *step, *numbers)
        return
    device = tables.device
    check(
        device, batch_rows=(batch_rows, torch.int64, 0), picked=(picked, torch.int64, 0),
        num_sampled=(num_sampled, torch.int32, batch_rows.shape[0]), is_verified=(is_verified, torch.bool, num_reqs),
        temperature=(temperature, torch.float32, tables.max_reqs), seeds=(seeds, torch.int64, tables.max_reqs),
    )  # fmt: skip
    assert out.device == device, f"out: expected device {device}, got {out.device}"
    assert out.batch_table.shape[1] == tables.block_table.shape[1], "batch_table, block_table: other widths"
    assert (out.path is None) == (tables.path is None), "path: in both or in neither"
    if size == 0:
        return
    if not use_triton(impl, device):
        loop = on_host(impl, device, "begin_step")
        loop(*step, *tables.arrays, *out.arrays, num_reqs, size, block_size, max_position, max_drafts)
        return
    max_blocks = tables.block_table.shape[1]
    path_stride, num_cols = (0, 0) if tables.path is None else (tables.path.stride(0), tables.path.shape[1])
    args = (
        *step, tables.num_tokens, tables.text, tables.text.stride(0), tables.last_sampled,
        tables.last_sampled.stride(0), tables.num_dropped, tables.pos_delta, tables.block_table,
        tables.block_table.stride(0), max_blocks, tables.fed, tables.path, path_stride, num_cols, out.rows,
        out.num_accepted, out.temperature, out.seeds, out.root_slot, out.root_pos, out.pos_delta, out.last_root,
        out.batch_table, out.batch_table.stride(0), out.level, out.input_ids, out.positions, out.positions.stride(0),
        out.positions.stride(1), out.slot_mapping, out.seq_lens, out.path,
        0 if out.path is None else out.path.stride(0), num_reqs, tables.max_reqs, block_size, max_position, max_drafts,
    )  # fmt: skip
    constants = {
        "NUM_POS_AXES": out.positions.shape[0], "BLOCK": _BLOCK, "BLOCK_PATH": triton.next_power_of_2(max(num_cols, 1)),
    }  # fmt: skip
    launch(_begin_step_kernel, grid, device, args, constants, out.plans, key, changing=_CHANGING)
