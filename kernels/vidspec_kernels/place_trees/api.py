"""place_trees: where the trees of a target's forward lie, their masks and their positions, in one launch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import Tensors, check, check_contiguous
from vidspec_kernels.dispatch import Impl, known, launch, on_host, use_triton

# Tokens that a program copies at a time, past the first nodes.
_BLOCK_TOKENS = 1024
# Arguments of a launch that tables and places do not settle.
_CHANGING = (
    *("idx_mapping_ptr", "num_reqs", "query_start_loc_ptr", "seq_lens_ptr"),
    *("positions_ptr", "positions_stride", "out_positions_ptr", "out_positions_stride"),
)


@dataclass(frozen=True)
class TreePlaces(Tensors):
    """Where the trees of a forward lie, by batch row: memory whose addresses stay, so that a CUDA graph may read it.

    A row of no request, or of one with more queries than a tree has nodes, has no queries here.
    """

    query_start: Tensor  # int32 [max_reqs], its first query row
    num_queries: Tensor  # int32 [max_reqs], its query rows
    prefix_lens: Tensor  # int32 [max_reqs], KV entries that all of them attend to, the root's included
    roots: Tensor  # int32 [max_reqs], KV entry of its first query, of any request
    masks: Tensor  # int64 [max_reqs, K + 1]; bit j: the query row attends to entry prefix_lens + j (tree node j + 1)

    def __post_init__(self) -> None:
        rows = [self.query_start.shape[0]]
        check(
            self.query_start.device, query_start=(self.query_start, torch.int32, 0),
            num_queries=(self.num_queries, torch.int32, rows), prefix_lens=(self.prefix_lens, torch.int32, rows),
            roots=(self.roots, torch.int32, rows),
        )  # fmt: skip
        check_contiguous(self.query_start.device, masks=(self.masks, torch.int64, rows, 0))

    @classmethod
    def empty(cls, max_reqs: int, num_cols: int, device: torch.device | str) -> "TreePlaces":
        """Return the places of no trees, with room for `max_reqs` of `num_cols` nodes, the root counted."""
        start, queries, lens, roots = torch.zeros(4, max_reqs, dtype=torch.int32, device=device)
        return cls(start, queries, lens, roots, torch.zeros(max_reqs, num_cols, dtype=torch.int64, device=device))


@triton.jit(
    do_not_specialize=[name for name in _CHANGING if not name.endswith("_ptr")],
    do_not_specialize_on_alignment=[name for name in _CHANGING if name.endswith("_ptr")],
)
def _place_trees_kernel(
    idx_mapping_ptr,  # [num_reqs]
    num_reqs,
    query_start_loc_ptr,  # [>= num_reqs + 1]
    seq_lens_ptr,  # [>= num_reqs]
    depths_ptr, ancestors_ptr,  # [max_rows, num_cols]
    num_cols,
    positions_ptr, positions_stride,  # [NUM_AXES, N]
    out_positions_ptr, out_positions_stride,  # [NUM_AXES, >= N]; None: in place
    query_start_ptr, num_queries_ptr, prefix_lens_ptr, roots_ptr,  # [>= size]
    masks_ptr,  # [>= size, num_cols]
    NUM_AXES: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One request; programs from `num_reqs` on are padding."""
    req_idx = tl.program_id(0)
    is_real = req_idx < num_reqs
    start = tl.load(query_start_loc_ptr + req_idx, mask=is_real, other=0)
    end = tl.load(query_start_loc_ptr + req_idx + 1, mask=is_real, other=0)
    num_tokens = end - start
    root = tl.load(seq_lens_ptr + req_idx, mask=is_real, other=0) - num_tokens
    is_tree = is_real & (num_tokens <= num_cols)
    num_queries = tl.where(is_tree, num_tokens, 0)
    tl.store(query_start_ptr + req_idx, tl.where(is_tree, start, 0))
    tl.store(num_queries_ptr + req_idx, num_queries)
    tl.store(prefix_lens_ptr + req_idx, tl.where(is_tree, root + 1, 0))
    tl.store(roots_ptr + req_idx, root)

    req_state_idx = tl.load(idx_mapping_ptr + req_idx, mask=is_real, other=0)
    node = tl.arange(0, BLOCK_COLS)
    is_node = node < num_queries
    word = tl.load(ancestors_ptr + req_state_idx * num_cols + node, mask=is_node, other=0)
    tl.store(masks_ptr + req_idx.to(tl.int64) * num_cols + node, word, mask=node < num_cols)

    depth = tl.load(depths_ptr + req_state_idx * num_cols + node, mask=is_node, other=0)
    # A chain's node is at its own depth: its positions are right, and those of media in a prompt are no chain's.
    is_moved = is_node & (depth != node)
    for axis in tl.static_range(NUM_AXES):
        first_ptr = positions_ptr + axis * positions_stride + start
        pos = tl.load(first_ptr, mask=is_real, other=0) + depth
        if out_positions_ptr is None:
            tl.store(first_ptr + node, pos, mask=is_moved)
        else:
            out_ptr = out_positions_ptr + axis * out_positions_stride + start
            is_token = node < num_tokens
            old_pos = tl.load(first_ptr + node, mask=is_token, other=0)
            tl.store(out_ptr + node, tl.where(is_moved, pos, old_pos), mask=is_token)
            for first_token in range(BLOCK_COLS, num_tokens, BLOCK_TOKENS):
                token = first_token + tl.arange(0, BLOCK_TOKENS)
                is_more = token < num_tokens
                tl.store(out_ptr + token, tl.load(first_ptr + token, mask=is_more, other=0), mask=is_more)


def place_trees(
    idx_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, depths: Tensor, ancestors: Tensor,
    positions: Tensor, places: TreePlaces, *, size: int, out_positions: Tensor | None = None, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Write what the target's forward needs to know of its trees, by batch row, and put their nodes at their depths.

    Whatever has at most K + 1 query rows is a tree: a chain is one of width 1, and so is the end of a prompt. Node i of
    a tree has the rope position of its root plus its depth.

    Args:
        idx_mapping: int64 [num_reqs], persistent row (`req_state_idx`) of each request.
        query_start_loc: int32 [>= num_reqs + 1], where each request's query rows begin and the last one's end.
        seq_lens: int32 [>= num_reqs], KV entries of each request, its query rows included.
        depths: int32 [max_rows, K + 1], of each persistent row's nodes, contiguous; a chain's are 0 to K.
        ancestors: int64 [max_rows, K + 1], their masks (see `TreePlaces`), contiguous.
        positions: int64 [num_axes, N] or [N], of every query row, unit stride along N.
        places: Out; rows from `size` on are left alone.
        size: Batch rows to write, >= num_reqs; those past num_reqs are padding, and have no queries.
        out_positions: Out, int64, of as many axes as `positions` and as long at least, not overlapping it; None:
            `positions` itself. What belongs to no request is left alone.
    """
    positions = positions[None] if positions.ndim == 1 else positions
    if out_positions is not None and out_positions.ndim == 1:
        out_positions = out_positions[None]
    num_reqs, num_axes = idx_mapping.shape[0], positions.shape[0]
    stride, out_stride = positions.stride(0), 0 if out_positions is None else out_positions.stride(0)
    # Tables by their identity: the plan keeps them alive, so that no other can have it.
    key = (id(depths), id(ancestors), num_axes, out_positions is None)
    plan = known(places.plans, _place_trees_kernel, key)
    if plan is not None and num_reqs <= size <= places.roots.shape[0]:
        vectors = (idx_mapping, num_reqs, query_start_loc, seq_lens)
        plan((size,), *vectors, positions, stride, out_positions, out_stride)
        return
    num_cols = _check(idx_mapping, query_start_loc, seq_lens, depths, ancestors, positions, places, size, out_positions)
    if size == 0:
        return
    if not use_triton(impl, idx_mapping.device):
        loop, is_apart = on_host(impl, idx_mapping.device, "place_trees"), out_positions is not None
        to = out_positions if is_apart else positions
        loop(idx_mapping, query_start_loc, seq_lens, depths, ancestors, positions, to, is_apart, *places.arrays, size)
        return
    args = (
        idx_mapping, num_reqs, query_start_loc, seq_lens, depths, ancestors, num_cols,
        positions, stride, out_positions, out_stride, *places.tensors,
    )  # fmt: skip
    constants = {
        "NUM_AXES": num_axes, "BLOCK_COLS": triton.next_power_of_2(num_cols), "BLOCK_TOKENS": _BLOCK_TOKENS,
    }  # fmt: skip
    launch(
        _place_trees_kernel, (size,), idx_mapping.device, args, constants, places.plans, key, changing=_CHANGING
    )  # fmt: skip


def _check(
    idx_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, depths: Tensor, ancestors: Tensor,
    positions: Tensor, places: TreePlaces, size: int, out_positions: Tensor | None,
) -> int:  # fmt: skip
    device, num_reqs, num_cols = idx_mapping.device, idx_mapping.shape[0], depths.shape[1]
    assert num_reqs <= size <= places.roots.shape[0], f"size {size}: {num_reqs} requests, {places.roots.shape[0]} rows"
    assert places.masks.shape[1] == num_cols and places.masks.device == device, f"masks: {list(places.masks.shape)}"
    shape = ([positions.shape[0]], positions.shape[1])
    check(
        device, idx_mapping=(idx_mapping, torch.int64, 0), seq_lens=(seq_lens, torch.int32, num_reqs),
        query_start_loc=(query_start_loc, torch.int32, num_reqs + 1), positions=(positions, torch.int64, *shape),
        out_positions=(out_positions, torch.int64, *shape),
    )  # fmt: skip
    check_contiguous(
        device, depths=(depths, torch.int32, 0, 0), ancestors=(ancestors, torch.int64, [depths.shape[0]], [num_cols])
    )
    return num_cols
