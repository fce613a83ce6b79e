"""path_penalties: vLLM's repetition, frequency and presence penalties of tree nodes along their own paths; one launch.

A node's logits are penalised for the committed text, as vLLM counts it, and for the drafts from below the root to the
node itself. The arithmetic is vLLM's own, operation by operation, so that a node has the bits that a chain of its
path's tokens would have.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launch, on_host, use_triton

# Tokens of a program, and of a turn of its loop. As many as a program of vLLM's: each reads a request's penalties over
# the bus, where vLLM keeps them.
_SHARE, _BLOCK = 8192, 2048


class PenaltyTables(NamedTuple):
    """vLLM's tables, by persistent row."""

    repetition: Tensor  # float32 [max_reqs]; 1: none
    frequency: Tensor  # float32 [max_reqs]; 0: none
    presence: Tensor  # float32 [max_reqs]; 0: none
    prompt_bits: Tensor  # int32 [max_reqs, num_words], bit v: the prompt has token v
    output_counts: Tensor  # int32 [max_reqs, vocab_size], how often each token was committed behind the prompt


# Vectors that may be slices of others: no variant for each alignment.
@triton.jit(do_not_specialize_on_alignment=["req_rows_ptr", "nodes_ptr", "tokens_ptr"])
def _path_penalties_kernel(
    logits_ptr, logits_stride,  # [N, vocab_size]
    req_rows_ptr, nodes_ptr, tokens_ptr,  # [N] each
    parents_ptr, parents_stride,  # [>= max_reqs, >= K + 1]
    repetition_ptr, frequency_ptr, presence_ptr,  # [max_reqs] each
    prompt_bits_ptr, prompt_stride,  # [max_reqs, num_words]
    counts_ptr, counts_stride,  # [max_reqs, vocab_size]
    vocab_size,
    SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    req_row = tl.load(req_rows_ptr + row)
    rep_penalty = tl.load(repetition_ptr + req_row)
    freq_penalty = tl.load(frequency_ptr + req_row)
    pres_penalty = tl.load(presence_ptr + req_row)
    use_rep_penalty = rep_penalty != 1.0
    use_penalty = use_rep_penalty or freq_penalty != 0.0 or pres_penalty != 0.0
    if not use_penalty:
        return
    own_node = tl.load(nodes_ptr + row)
    first = row - own_node  # the root's row
    logits_ptr += row * logits_stride
    counts_ptr += req_row * counts_stride
    prompt_bits_ptr += req_row * prompt_stride
    parents_ptr += req_row * parents_stride
    begin = tl.program_id(1) * SHARE
    for start in range(begin, tl.minimum(begin + SHARE, vocab_size), BLOCK):
        block = start + tl.arange(0, BLOCK)
        mask = block < vocab_size
        logits = tl.load(logits_ptr + block, mask=mask)
        counts = tl.load(counts_ptr + block, mask=mask, other=0)
        node = own_node
        while node > 0:
            token = tl.load(tokens_ptr + first + node)
            counts += (block == token).to(tl.int32)
            # A parent comes before its child; the walk ends even if a table violates that.
            node = tl.minimum(tl.load(parents_ptr + node), node - 1)
        is_seen = counts > 0
        # From here on in vLLM's words, branch and order of operations included (`_penalties_kernel`).
        if use_rep_penalty:
            word = tl.load(prompt_bits_ptr + block // 32, mask=mask, other=0)
            in_prompt = ((word >> (block % 32)) & 1).to(tl.int1)
            scale = tl.where(in_prompt | is_seen, rep_penalty, 1.0)
            logits *= tl.where(logits > 0, 1.0 / scale, scale)
        logits -= freq_penalty * counts
        logits -= pres_penalty * is_seen
        tl.store(logits_ptr + block, logits, mask=mask)


def path_penalties(
    logits: Tensor, req_rows: Tensor, nodes: Tensor, tokens: Tensor, parents: Tensor, tables: PenaltyTables,
    plans: dict[Any, Any] | None = None, *, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Penalise the logits of tree nodes in place; rows of requests without penalties stay as they are.

    Args:
        logits: float32 [N, vocab_size], unit stride in its rows; of a request its root's row and its nodes', in order.
        req_rows: int64 [N], persistent row of each logits row's request.
        nodes: int32 [N], each logits row's node; 0 is the root, whose token is committed.
        tokens: int32 [N], each row's input token; -1 is none.
        parents: int32 [>= max_reqs, >= K + 1], parent of each node by persistent row, before its child; of chains too.
        tables: vLLM's, by persistent row.
        plans: Of the caller's launches, whose tables' shapes stay (see `dispatch.launch`).
    """
    device, (num_rows, vocab_size), max_reqs = logits.device, logits.shape, len(tables.repetition)
    check(
        device, logits=(logits, torch.float32, 0, 0), req_rows=(req_rows, torch.int64, num_rows),
        nodes=(nodes, torch.int32, num_rows), tokens=(tokens, torch.int32, num_rows),
        parents=(parents, torch.int32, max_reqs, 1), repetition=(tables.repetition, torch.float32, 0),
        frequency=(tables.frequency, torch.float32, max_reqs), presence=(tables.presence, torch.float32, max_reqs),
        prompt_bits=(tables.prompt_bits, torch.int32, max_reqs, -(-vocab_size // 32)),
        output_counts=(tables.output_counts, torch.int32, max_reqs, vocab_size),
    )  # fmt: skip
    if num_rows == 0:
        return
    if not use_triton(impl, device):
        on_host(impl, device, "path_penalties")(logits, req_rows, nodes, tokens, parents, *tables)
        return
    bits, counts = tables.prompt_bits, tables.output_counts
    args = (
        logits, logits.stride(0), req_rows, nodes, tokens, parents, parents.stride(0), *tables[:3],
        bits, bits.stride(0), counts, counts.stride(0), vocab_size,
    )  # fmt: skip
    grid = (num_rows, triton.cdiv(vocab_size, _SHARE))
    key = (logits.stride(0), logits.data_ptr() % 16)
    constants = {"SHARE": _SHARE, "BLOCK": _BLOCK}
    launch(_path_penalties_kernel, grid, device, args, constants, {} if plans is None else plans, key)
