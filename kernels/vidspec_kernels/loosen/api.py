"""loosen: whether each draft may be accepted though it differs, and its score; one launch."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launch, on_host, use_triton

# Where the scores of a request come from, `LooseTables.sources`.
RELEVANCE = 1  # the caller's
CHANCE = 2  # a hash
_BLOCK = 64  # logits rows of a program


class LooseTables(NamedTuple):
    """What holds of requests, by persistent row."""

    protected: Tensor  # int32 [max_reqs, num_words], bit v: token v must neither be lost nor gained
    ends: Tensor  # int32, the same shape: the text ends with token v
    sources: Tensor  # int32 [max_reqs], RELEVANCE, CHANCE, or 0: no scores
    seeds: Tensor  # int64 [max_reqs]
    # Launches that were checked and compiled before (see `dispatch.launch`), of a caller whose tables are the same in
    # every step. None: each is checked anew.
    known: dict[Any, Any] | None = None


@triton.jit
def _has_token(table_ptr, table_row, token, mask):
    word = tl.load(table_ptr + table_row + token // 32, mask=mask, other=0)
    return ((word >> (token % 32).to(tl.int32)) & 1) != 0


# Vectors that may be slices of others: no variant for each alignment.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        *("target_tokens_ptr", "draft_tokens_ptr", "req_rows_ptr", "nodes_ptr", "pos_ptr", "logits_ptr"),
        "relevance_ptr",
    ],
)
def _loosen_kernel(
    target_tokens_ptr, draft_tokens_ptr, req_rows_ptr, nodes_ptr, pos_ptr,  # [N] each
    logits_ptr, logits_stride,  # [N, vocab_size]
    tables,  # Protected, ends, [max_reqs, num_words] each, their row stride; sources, seeds, [max_reqs] each
    parents,  # [max_reqs, >= K + 1], its row stride; None for chains
    relevance_ptr,  # [N]; None where nothing was measured
    scores_ptr, may_loosen_ptr,  # [N] each
    num_rows,
    IS_PREDICTING: tl.constexpr, RELEVANCE: tl.constexpr, CHANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    protected_ptr, ends_ptr, words_stride, sources_ptr, seeds_ptr = tables
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    node = tl.load(nodes_ptr + row, mask=mask, other=0)
    req_state_idx = tl.load(req_rows_ptr + row, mask=mask, other=0)
    if parents is not None:
        parents_ptr, parents_stride = parents
        parent = tl.load(parents_ptr + req_state_idx * parents_stride + node, mask=mask, other=0)
        parent_row = row - node + tl.maximum(parent, 0)
    else:
        parent_row = row - (node > 0).to(tl.int64)

    draft = tl.maximum(tl.load(draft_tokens_ptr + row, mask=mask, other=0), 0)
    fed = tl.maximum(tl.load(draft_tokens_ptr + parent_row, mask=mask, other=0), 0)
    expected = tl.maximum(tl.load(target_tokens_ptr + parent_row, mask=mask, other=0), 0)
    logit = tl.load(logits_ptr + parent_row * logits_stride + draft, mask=mask, other=0.0).to(tl.float32)
    may = tl.abs(logit) < float("inf")  # no parameter of the request forbids the draft; false of NaN
    table_row = req_state_idx * words_stride
    may = may & ~_has_token(protected_ptr, table_row, draft, mask)
    may = may & ~_has_token(protected_ptr, table_row, expected, mask)
    # After the end of the text there is nothing to gain.
    may = may & ~_has_token(ends_ptr, table_row, fed, mask)

    source = tl.load(sources_ptr + req_state_idx, mask=mask, other=0)
    score = tl.zeros([BLOCK], tl.float32)
    if relevance_ptr is not None:
        score = tl.load(relevance_ptr + (parent_row if IS_PREDICTING else row), mask=mask, other=0.0)
        # NaN: not measured; a request that is scored by it is verified strictly.
        may = may & ((score == score) | (source != RELEVANCE))
    word = tl.load(seeds_ptr + req_state_idx, mask=mask, other=0)
    # splitmix64's steps, modulo 2 ** 64, so that runs repeat.
    word += tl.load(pos_ptr + row, mask=mask, other=0) * 0x1E3779B97F4A7C15
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    word = word ^ ((word >> 31) & 0x1FFFFFFFF)
    chance = ((word >> 40) & 0xFFFFFF).to(tl.float32) / 16777216.0
    tl.store(scores_ptr + row, tl.where(source == CHANCE, chance, score), mask=mask)
    tl.store(may_loosen_ptr + row, may, mask=mask)


def loosen(
    target_tokens: Tensor, draft_tokens: Tensor, logits: Tensor, req_rows: Tensor, nodes: Tensor, pos: Tensor,
    tables: LooseTables, parents: Tensor | None = None, relevance: Tensor | None = None, *, is_predicting: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return whether each logits row's draft may be accepted though it differs, and its score (LVSpec eq. 8-9).

    It may unless a parameter of its request forbids it (its logit at its parent is not finite), it or the target's
    token in its place is protected, the text has ended before it, or it is judged by a relevance that is NaN.

    Args:
        target_tokens: int64 [N], the target's sample at each logits row.
        draft_tokens: int32 [N], input token of each logits row; -1 is no draft.
        logits: float [N, vocab_size] as sampled from, unit stride in its rows; -inf where a request forbids a token.
        req_rows: int64 [N], persistent row of each logits row's request.
        nodes: int32 [N], each logits row's node in its request's draft.
        pos: int64 [N], position of each row's token, of which the hash is made.
        tables: By persistent row.
        parents: int32 [max_reqs, >= K + 1], parent of each node by persistent row; None: all are chains.
        relevance: float32 [N], of each row's own state; NaN: not measured. None: of no request.
        is_predicting: Whether a draft's relevance is that of the row which predicts it, its parent's.

    Returns:
        scores: float32 [N]: the relevance, of requests scored by chance a hash in [0, 1); 0 where there is none.
        may_loosen: bool [N]; of roots ignored.
    """
    known, key = tables.known, (logits.dtype, logits.stride(0), parents is None, relevance is None, is_predicting)
    if known is None or key not in known:
        _check(target_tokens, draft_tokens, logits, req_rows, nodes, pos, tables, parents, relevance)
        if known is not None:
            known[key] = True
    device, num_rows = target_tokens.device, target_tokens.shape[0]
    scores = torch.empty(num_rows, dtype=torch.float32, device=device)
    may_loosen = torch.empty(num_rows, dtype=torch.bool, device=device)
    vectors, outs = (target_tokens, draft_tokens, req_rows, nodes, pos, logits), (scores, may_loosen)
    if not use_triton(impl, device):
        vectors = (*vectors[:5], logits.float())
        numbers = (is_predicting, RELEVANCE, CHANCE)
        on_host(impl, device, "loosen")(*vectors, *tables[:4], parents, relevance, *numbers, *outs)
        return outs
    if num_rows > 0:
        words = (tables.protected, tables.ends, tables.protected.stride(0), tables.sources, tables.seeds)
        by_node = None if parents is None else (parents, parents.stride(0))
        args = (*vectors, logits.stride(0), words, by_node, relevance, *outs, num_rows)
        constants = {"IS_PREDICTING": is_predicting, "RELEVANCE": RELEVANCE, "CHANCE": CHANCE, "BLOCK": _BLOCK}
        grid = (triton.cdiv(num_rows, _BLOCK),)
        launch(_loosen_kernel, grid, device, args, constants, {} if known is None else known, key)
    return outs


def _check(
    target_tokens: Tensor, draft_tokens: Tensor, logits: Tensor, req_rows: Tensor, nodes: Tensor, pos: Tensor,
    tables: LooseTables, parents: Tensor | None, relevance: Tensor | None,
) -> None:  # fmt: skip
    device, num_rows, max_reqs = target_tokens.device, [target_tokens.shape[0]], tables.sources.shape[0]
    assert logits.is_floating_point() and logits.ndim == 2, f"logits: {logits.dtype} {list(logits.shape)}"
    words = (torch.int32, [max_reqs], -(-logits.shape[1] // 32))
    check(
        device, target_tokens=(target_tokens, torch.int64, num_rows),
        draft_tokens=(draft_tokens, torch.int32, num_rows), logits=(logits, logits.dtype, num_rows, 0),
        req_rows=(req_rows, torch.int64, num_rows), nodes=(nodes, torch.int32, num_rows),
        pos=(pos, torch.int64, num_rows), relevance=(relevance, torch.float32, num_rows),
        sources=(tables.sources, torch.int32, 0), seeds=(tables.seeds, torch.int64, [max_reqs]),
        protected=(tables.protected, *words),
        ends=(tables.ends, *words), parents=(parents, torch.int32, max_reqs, 0),
    )  # fmt: skip
    assert tables.ends.stride() == tables.protected.stride(), "ends: expected the strides of protected"
