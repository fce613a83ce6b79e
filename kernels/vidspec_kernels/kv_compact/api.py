"""kv_compact: moves the KV entries of an accepted tree path behind its root, all layers in one launch."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import arrays_of, as_meta, check
from vidspec_kernels.dispatch import Impl, known, launch, on_host, use_triton

# Entries that a program holds at once; more are moved in turns.
_BLOCK_MOVES = 16
# Arguments of a launch that the caches do not settle; the strides of tables and paths do not change with them.
_CHANGING = ("block_table_ptr", "rows_ptr", "starts_ptr", "path_ptr", "num_accepted_ptr", "path_rows_ptr")
# Entries are moved as integers of their size: every bit pattern survives, and no dtype needs a kernel of its own.
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CacheGroup:
    """Views of one shape, stride and dtype, and their addresses on the device, int64 [num_views]."""

    views: tuple[Tensor, ...]
    addresses: Tensor
    is_aligned: bool  # every address divides by 16

    @functools.cached_property
    def plans(self) -> dict[Any, Any]:
        """Of launches that move these (see `dispatch.launch`)."""
        return {}

    def grid(self, num_reqs: int) -> tuple[int, int, int]:
        """Return the programs that move entries of so many requests."""
        return num_reqs, len(self.views), self.views[0].shape[2]

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The views as integers, for the loop: numpy knows no bfloat16."""
        return arrays_of(view.view(_INTS[view.element_size()]) for view in self.views)


class CacheList:
    """Every layer's keys and values, built once; keeps them alive, for the kernel knows them by address.

    Views of equal shape, strides and dtype form a group, which one launch moves: one where keys and values are halves
    of the same cache, two where keys are transposed inside a block. A cache that several layers share counts once.

    Args:
        layers: (keys, values) of each layer, at least one, each `[num_blocks, block_size, num_kv_heads, head_size]` of
            any strides, all of one device and block size.
    """

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor]]):
        views = [view for layer in layers for view in layer]
        assert views, "layers: none"
        self.device = views[0].device
        self.block_size = views[0].shape[1]
        groups: dict[tuple, dict[int, Tensor]] = {}
        for view in views:
            assert view.ndim == 4, f"view: expected four dimensions, got shape {list(view.shape)}"
            assert view.device == self.device, f"view: expected device {self.device}, got {view.device}"
            assert view.shape[1] == self.block_size, f"view: block size {view.shape[1]}, another's {self.block_size}"
            groups.setdefault((view.shape, view.stride(), view.dtype), {}).setdefault(view.data_ptr(), view)
        self.groups = [
            CacheGroup(
                tuple(group.values()),
                torch.tensor(list(group), dtype=torch.int64, device=self.device),
                all(address % 16 == 0 for address in group),
            )
            for group in groups.values()
        ]

    def as_meta(self) -> "CacheList":
        """Return the same groups without memory, of one layer each, for `warm_up`."""
        return CacheList((as_meta(group.views[0]), as_meta(group.views[-1])) for group in self.groups)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "starts_ptr", "num_accepted_ptr", "path_rows_ptr"])
def _kv_compact_kernel(
    # [num_views], addresses of [num_blocks, block_size, num_kv_heads, HEAD_SIZE]
    addresses_ptr, block_stride, slot_stride, head_stride, dim_stride,
    block_table_ptr, block_table_stride, max_blocks,  # [max_table_rows, max_blocks]
    rows_ptr, starts_ptr,  # [R]
    path_ptr, path_stride, num_cols,  # [P, num_cols]
    num_accepted_ptr,  # [P]
    path_rows_ptr,  # [R]; None where P is R
    block_size,
    WORD: tl.constexpr, IS_ALIGNED: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_COLS: tl.constexpr, BLOCK_MOVES: tl.constexpr,
):  # fmt: skip
    req_idx = tl.program_id(0).to(tl.int64)
    path_row = req_idx
    if path_rows_ptr is not None:
        path_row = tl.load(path_rows_ptr + req_idx)
    path_ptr += path_row * path_stride
    num_accepted = tl.minimum(tl.load(num_accepted_ptr + path_row), num_cols - 1)
    col = tl.arange(0, BLOCK_COLS)
    node = tl.load(path_ptr + col, mask=col <= num_accepted, other=0)
    is_moved = (col >= 1) & (col <= num_accepted) & (node != col)
    first = tl.min(tl.where(is_moved, col, BLOCK_COLS), axis=0)
    if first > num_accepted:
        return

    cache_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    if IS_ALIGNED:
        cache_ptr = tl.multiple_of(cache_ptr, 16)
    cache_ptr += tl.program_id(2).to(tl.int64) * head_stride
    block_table_ptr += tl.load(rows_ptr + req_idx) * block_table_stride
    start = tl.load(starts_ptr + req_idx)
    dim = tl.arange(0, BLOCK_DIM)
    for first_move in range(first, num_accepted + 1, BLOCK_MOVES):
        j = first_move + tl.arange(0, BLOCK_MOVES)
        is_move = j <= num_accepted
        source = start + tl.load(path_ptr + j, mask=is_move, other=0)
        target = start + j
        is_move &= source // block_size < max_blocks
        # int64 before the product: a block's offset passes 2**31 in a large pool.
        source_block = tl.load(block_table_ptr + source // block_size, mask=is_move, other=0).to(tl.int64)
        target_block = tl.load(block_table_ptr + target // block_size, mask=is_move, other=0).to(tl.int64)
        source_offset = source_block * block_stride + (source % block_size).to(tl.int64) * slot_stride
        target_offset = target_block * block_stride + (target % block_size).to(tl.int64) * slot_stride
        mask = is_move[:, None] & (dim < HEAD_SIZE)[None, :]
        words = tl.load(cache_ptr + source_offset[:, None] + dim[None, :] * dim_stride, mask=mask)
        # A turn writes entries j, and path[j] >= j ascends. So an entry that it writes is read by no later turn; an
        # earlier turn has read it before its own barrier, and this turn before this one.
        tl.debug_barrier()
        tl.store(cache_ptr + target_offset[:, None] + dim[None, :] * dim_stride, words, mask=mask)


def kv_compact(
    caches: CacheList, block_table: Tensor, rows: Tensor, starts: Tensor, path: Tensor, num_accepted: Tensor,
    path_rows: Tensor | None = None, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Move the KV entries of each request's accepted path to where the entries of a chain would be.

    Entry starts[r] + path[p, j] becomes entry starts[r] + j, for j = 1..num_accepted[p] and p = path_rows[r], in every
    view of `caches`; each source is read as it was before the call. Entry e of a request lies in block
    block_table[rows[r], e // block_size] at offset e % block_size. A source beyond the block table is not moved.
    Requests share no block that a move touches.

    Args:
        caches: Keys and values of all layers.
        block_table: int32 [max_table_rows, max_blocks], unit stride in its rows.
        rows: int64 [R], row of each request in the block table.
        starts: int32 [R], entry of the root.
        path: int32 [P, K + 1], accepted node at each depth, unit stride in its rows: path[p, j] >= j, ascending.
            Column 0 and those past num_accepted[p] are not read.
        num_accepted: int32 [P], accepted drafts; below 1 = nothing to move.
        path_rows: int64 [R], row of each request in these two; None: p is r.
    """
    num_reqs = rows.shape[0]
    assert block_table.ndim == 2, f"block_table: expected two dimensions, got shape {list(block_table.shape)}"
    assert path.ndim == 2, f"path: expected two dimensions, got shape {list(path.shape)}"
    # Of what is not exempt from specialisation, that which no group settles.
    key = (
        *(block_table.stride(0), block_table.shape[1], block_table.data_ptr() % 16),
        *(path.stride(0), path.shape[1], path.data_ptr() % 16, path_rows is None),
    )
    plans = [known(group.plans, _kv_compact_kernel, key) for group in caches.groups]
    made = [plan for plan in plans if plan is not None]
    if num_reqs and len(made) == len(caches.groups):
        for group, plan in zip(caches.groups, made, strict=True):
            plan(group.grid(num_reqs), block_table, rows, starts, path, num_accepted, path_rows)
        return
    device = caches.device
    num_paths = path.shape[0] if path_rows is not None else num_reqs
    check(
        device, rows=(rows, torch.int64, 0), starts=(starts, torch.int32, [num_reqs]),
        block_table=(block_table, torch.int32, 0, 0), path=(path, torch.int32, [num_paths], 0),
        num_accepted=(num_accepted, torch.int32, [num_paths]), path_rows=(path_rows, torch.int64, [num_reqs]),
    )  # fmt: skip
    if num_reqs == 0 or path.shape[1] <= 1:
        return
    if not use_triton(impl, device):
        on_host(impl, device, "kv_compact")(caches, block_table, rows, starts, path, num_accepted, path_rows)
        return
    block_cols = triton.next_power_of_2(path.shape[1])
    tables = (block_table, block_table.stride(0), block_table.shape[1], rows, starts)
    paths = (path, path.stride(0), path.shape[1], num_accepted, path_rows, caches.block_size)
    for group in caches.groups:
        view = group.views[0]
        head_size = view.shape[3]
        constants = {
            "WORD": _WORDS[view.element_size()], "IS_ALIGNED": group.is_aligned, "HEAD_SIZE": head_size,
            "BLOCK_DIM": triton.next_power_of_2(head_size), "BLOCK_COLS": block_cols,
            "BLOCK_MOVES": min(block_cols, _BLOCK_MOVES),
        }  # fmt: skip
        grid, args = group.grid(num_reqs), (group.addresses, *view.stride(), *tables, *paths)
        launch(_kv_compact_kernel, grid, device, args, constants, group.plans, key, changing=_CHANGING)
