"""tree_place: one level of static draft trees, in one launch; one program a request."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import Tensors, check_contiguous
from vidspec_kernels.dispatch import Impl, launcher, on_host, use_triton
from vidspec_kernels.draft_tree.tables import TreeTables

_BLOCK = 64  # the most nodes of a tree


@dataclass(frozen=True)
class PlacedLevel(Tensors):
    sources: Tensor  # int64 [m], of the frontier's candidates (flat, F * C) those that become nodes
    nodes: Tensor  # int64 [m], the nodes that they become
    fed_sources: Tensor  # int64 [F'], those whose nodes the next level feeds; empty on the last level
    fed_tokens: Tensor  # Out, int64 [max_num_reqs, F'], their tokens


@triton.jit(do_not_specialize=["num_offered", "num_placed", "num_fed"])
def _tree_place_kernel(
    token_ids_ptr,  # [R, num_offered]
    tree_tokens_ptr,  # [R, num_cols]
    sources_ptr, nodes_ptr,  # [num_placed]
    fed_sources_ptr,  # [num_fed]
    fed_tokens_ptr,  # [R, num_fed]
    num_cols, num_offered, num_placed, num_fed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    req_idx = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    token_ids_ptr += req_idx * num_offered
    source = tl.load(sources_ptr + i, mask=i < num_placed, other=0)
    node = tl.load(nodes_ptr + i, mask=i < num_placed, other=0)
    token = tl.load(token_ids_ptr + source, mask=i < num_placed, other=0)
    tl.store(tree_tokens_ptr + req_idx * num_cols + node, token, mask=i < num_placed)
    source = tl.load(fed_sources_ptr + i, mask=i < num_fed, other=0)
    token = tl.load(token_ids_ptr + source, mask=i < num_fed, other=0)
    tl.store(fed_tokens_ptr + req_idx * num_fed + i, token, mask=i < num_fed)


def tree_place(tree: TreeTables, level: PlacedLevel, num_reqs: int, token_ids: Tensor, *, impl: Impl = "auto") -> None:
    """Enter the tokens of one level of a topology into the trees of batch rows 0 to num_reqs - 1.

    Args:
        tree: Out: `tokens`.
        level: What becomes a node, and what is fed next; its `fed_tokens` are written.
        num_reqs: R.
        token_ids: int64 [R * F, C], candidates of each frontier node.
    """
    assert 0 <= num_reqs <= len(tree.num_nodes), f"{num_reqs} requests, {len(tree.num_nodes)} fit"
    shape = token_ids.shape
    check_contiguous(tree.device, token_ids=(token_ids, torch.int64, 0, 0))
    assert shape[0] % max(num_reqs, 1) == 0, f"token_ids: {shape[0]} rows of {num_reqs} requests"
    if num_reqs == 0:
        return
    if not use_triton(impl, tree.device):
        on_host(impl, tree.device, "tree_place")(tree.arrays[0], token_ids, *level.arrays, num_reqs)
        return
    launcher(_tree_place_kernel, (num_reqs,), tree.device)(
        token_ids, tree.tokens, *level.tensors, tree.num_cols, token_ids.numel() // num_reqs, len(level.sources),
        len(level.fed_sources), BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
