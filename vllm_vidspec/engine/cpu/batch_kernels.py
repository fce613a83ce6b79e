"""Numpy twins of vLLM's kernels that prepare a step's batch and take down what it gave: see `kernels`. CPU engine only.

Each takes all arguments of its kernel under the kernel's names (`*_ptr` without the ending), tensors as arrays, and
serves the whole grid. What this project never asks for, as context parallelism, is left to the kernel.
"""

import ctypes
from typing import Any

import numpy as np
import torch

from vllm_vidspec.engine.cpu.kernels import Twin


class WholeTwin(Twin):
    """A twin whose function takes every argument of the kernel, constants by name; where it returns False, and
    for bfloat16, which numpy does not know, the interpreted kernel runs.

    Args:
        run: Serves the whole grid.
        interpreted: The kernel.
    """

    def __init__(self, run: Any, interpreted: Any):
        super().__init__(run)
        self._interpreted = interpreted

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        constants.pop("num_warps", None)
        is_known = not any(isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16 for arg in args)
        arrays = [arg.numpy() if isinstance(arg, torch.Tensor) else arg for arg in args] if is_known else []
        if not is_known or self._run(grid, *arrays, **constants) is False:
            self._interpreted[grid](*args, **constants)


def _tokens(query_start_loc: np.ndarray, num_reqs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of a ragged batch: place, request and place in the request, [num_tokens] each."""
    starts = query_start_loc[: num_reqs + 1].astype(np.int64)
    place = np.arange(starts[0], starts[-1])
    owner = np.repeat(np.arange(num_reqs), np.diff(starts))
    return place, owner, place - starts[owner]


def _memory(address: np.uint64, size: int) -> np.ndarray:
    """Return `size` int32 that lie at an address."""
    return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_int32)), (size,))


def prepare_pos_seq_lens(
    grid, pos, seq_lens, idx_mapping, query_start_loc, num_computed_tokens, max_num_reqs, BLOCK_SIZE
) -> None:
    """Twin of `vllm.v1.worker.gpu.input_batch._prepare_pos_seq_lens_kernel`; pos [num_tokens], lengths [R]."""
    num_reqs = grid[0] - 1
    computed = num_computed_tokens[idx_mapping[:num_reqs]]
    place, owner, i = _tokens(query_start_loc, num_reqs)
    pos[place] = computed[owner] + i
    seq_lens[:num_reqs] = computed + np.diff(query_start_loc[: num_reqs + 1])
    seq_lens[num_reqs:max_num_reqs] = 0


def prepare_rope_positions(
    grid,
    positions,  # [NUM_DIMS, max_tokens], out
    positions_stride,
    prefill_positions,  # [max_num_reqs * NUM_DIMS, max_model_len]
    prefill_positions_stride0,
    prefill_positions_stride1,
    prefill_delta,  # [max_num_reqs]
    idx_mapping,
    query_start_loc,
    prefill_lens,
    num_computed_tokens,
    BLOCK_SIZE,
    NUM_DIMS,
) -> None:
    """Twin of `vllm.v1.worker.gpu.mm.rope._prepare_rope_positions_kernel`."""
    row = idx_mapping[: grid[0]].astype(np.int64)
    place, owner, i = _tokens(query_start_loc, grid[0])
    logical = num_computed_tokens[row][owner].astype(np.int64) + i
    is_prefill = (num_computed_tokens[row] < prefill_lens[row])[owner]
    text = logical + prefill_delta[row][owner]
    prompt = (row * prefill_positions_stride0)[owner] + logical
    for dim in range(NUM_DIMS):
        listed = prefill_positions.reshape(-1).take(prompt + dim * prefill_positions_stride1, mode="clip")
        positions[dim, place] = np.where(is_prefill, listed, text)


def combine_sampled_and_draft_tokens(
    grid,
    input_ids,  # [num_tokens], in place
    idx_mapping,
    last_sampled_tokens,  # [max_num_reqs, 1]
    query_start_loc,
    seq_lens,
    prefill_len,
    draft_tokens,  # [max_num_reqs, K]
    draft_tokens_stride,
    cu_num_logits,
    logits_indices,  # [num_logits], out
    BLOCK_SIZE,
    NUM_NEW_SAMPLED_TOKENS=1,
) -> bool:
    """Twin of `vllm.v1.worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel`."""
    if NUM_NEW_SAMPLED_TOKENS != 1:
        return False
    num_reqs = grid[0]
    row, (place, owner, i) = idx_mapping[:num_reqs], _tokens(cu_num_logits, num_reqs)
    num_logits = np.diff(cu_num_logits[: num_reqs + 1])
    first = query_start_loc[1 : num_reqs + 1] - num_logits
    logits_indices[place] = first[owner] + i
    is_decoding = seq_lens[:num_reqs] > prefill_len[row]
    takes_last = is_decoding & (seq_lens[:num_reqs] - num_logits >= prefill_len[row])
    input_ids[first[takes_last]] = last_sampled_tokens.reshape(-1)[row[takes_last]]
    is_draft = is_decoding[owner] & (i > 0)
    owner, i = owner[is_draft], i[is_draft]
    input_ids[first[owner] + i] = draft_tokens[row[owner], i - 1]
    return True


def expand_idx_mapping(grid, idx_mapping, expanded_idx_mapping, expanded_local_pos, cu_num_logits, BLOCK_SIZE) -> None:
    """Twin of `vllm.v1.worker.gpu.input_batch._expand_idx_mapping_kernel`: each row's request and place."""
    place, owner, i = _tokens(cu_num_logits, grid[0])
    expanded_idx_mapping[place], expanded_local_pos[place] = idx_mapping[owner], i


def gather_draft_sampled(
    grid,
    draft_sampled,  # [num_logits], out
    pos,  # [num_logits], out
    input_ids,
    positions,
    logits_indices,
    expanded_idx_mapping,
    expanded_local_pos,
    prefill_len,
    num_logits,
    BLOCK_SIZE,
) -> None:
    """Twin of `vllm.v1.worker.gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel`."""
    token, local = logits_indices[:num_logits], expanded_local_pos[:num_logits]
    pos[:num_logits] = positions[token]
    is_placeholder = (local > 0) & (positions[token] - local < prefill_len[expanded_idx_mapping[:num_logits]])
    draft_sampled[:num_logits] = np.where(is_placeholder, -1, input_ids[token])


def get_num_sampled_and_rejected(
    grid, num_sampled, num_rejected, seq_lens, cu_num_logits, idx_mapping, prefill_len
) -> None:
    """Twin of `vllm.v1.worker.gpu.input_batch._get_num_sampled_and_rejected_kernel`; [num_reqs] each."""
    num_reqs = grid[0]
    is_prefilling = seq_lens[:num_reqs] < prefill_len[idx_mapping[:num_reqs]]
    num_sampled[:num_reqs][is_prefilling] = 0
    rejected = np.diff(cu_num_logits[: num_reqs + 1]) - num_sampled[:num_reqs]
    num_rejected[:num_reqs] = np.where(is_prefilling, 0, rejected)


def post_update(
    grid,
    idx_mapping,
    num_computed_tokens,  # [max_num_reqs], in place, as what follows up to `sampled_tokens`
    last_sampled_tokens,  # [max_num_reqs, 1]
    output_bin_counts,  # [max_num_reqs, vocab_size], or None
    output_bin_counts_stride,
    sampled_tokens,  # [num_reqs, >= num_sampled]
    sampled_tokens_stride,
    num_sampled,
    num_rejected,
    query_start_loc,  # [num_reqs + 1], or None
    all_token_ids,  # [max_num_reqs, max_model_len], in place
    all_token_ids_stride,
    total_len,  # [max_num_reqs], in place
) -> None:
    """Twin of `vllm.v1.worker.gpu.input_batch._post_update_kernel`."""
    batch = np.flatnonzero(idx_mapping[: grid[0]] >= 0)
    row, gained = idx_mapping[batch].astype(np.int64), num_sampled[batch]
    req, i = np.nonzero(np.arange(sampled_tokens.shape[1]) < gained[:, None])
    tokens, owner = sampled_tokens[batch[req], i], row[req]
    # A text that is full goes on in the next row, as the kernel's does; the last one ends where the memory does.
    texts, places = all_token_ids.reshape(-1, copy=False), owner * all_token_ids_stride + total_len[owner] + i
    texts[places[places < len(texts)]] = tokens[places < len(texts)]
    if output_bin_counts is not None:
        np.add.at(output_bin_counts, (owner, tokens), 1)
    has_more = gained > 0
    last_sampled_tokens.reshape(-1, copy=False)[row[has_more]] = sampled_tokens[batch[has_more], gained[has_more] - 1]
    total_len[row] += gained
    lengths = 0 if query_start_loc is None else query_start_loc[batch + 1] - query_start_loc[batch]
    num_computed_tokens[row] += lengths - num_rejected[batch]


def apply_write(
    grid,
    output,  # [num_rows, ...], in place
    output_stride,
    write_indices,
    write_starts,
    write_contents,
    write_cu_lens,
    write_group_ids,
    BLOCK_SIZE,
    MULTI_GROUP,
) -> bool:
    """Twin of `vllm.v1.worker.gpu.buffer_utils._apply_write_kernel`: pieces of the contents into rows of the output."""
    if MULTI_GROUP:
        return False
    flat, begin = output.reshape(-1, copy=False), 0
    writes = (array[: grid[0]].tolist() for array in (write_indices, write_starts, write_cu_lens))
    for row, start, end in zip(*writes, strict=True):
        place = row * output_stride + start
        flat[place : place + end - begin] = write_contents[begin:end]
        begin = end
    return True


def gather_block_tables(
    grid,
    batch_idx_to_req_idx,
    src_block_table_ptrs,  # [num_groups] addresses of tables [max_num_reqs, stride]
    dst_block_table_ptrs,
    block_table_strides,
    num_blocks,  # [num_groups, max_num_reqs]
    num_blocks_stride,
    num_reqs,
    BLOCK_SIZE,
) -> None:
    """Twin of `vllm.v1.worker.gpu.block_table._gather_block_tables_kernel`: a batch's rows, zeros behind them."""
    num_groups, num_padded = grid
    rows = batch_idx_to_req_idx[:num_reqs].tolist()
    for group in range(num_groups):
        stride = int(block_table_strides[group])
        source = _memory(src_block_table_ptrs[group], (max(rows, default=0) + 1) * stride).reshape(-1, stride)
        target = _memory(dst_block_table_ptrs[group], num_padded * stride).reshape(-1, stride)
        for i, row in enumerate(rows):
            count = int(num_blocks[group, row])
            target[i, :count] = source[row, :count]
        target[num_reqs:] = 0


def compute_slot_mappings(
    grid,
    max_num_tokens,
    idx_mapping,
    query_start_loc,
    pos,
    block_table_ptrs,  # [num_groups] addresses of tables [max_num_reqs, stride]
    block_table_strides,
    block_sizes,
    slot_mapping_enabled,
    dcp_sharded,
    slot_mappings,  # [num_groups, max_num_tokens], out
    slot_mappings_stride,
    cp_rank,
    CP_SIZE,
    CP_INTERLEAVE,
    PAD_ID,
    TRITON_BLOCK_SIZE,
) -> bool:
    """Twin of `vllm.v1.worker.gpu.block_table._compute_slot_mappings_kernel`."""
    if CP_SIZE != 1:
        return False
    num_groups, num_reqs = grid[0], grid[1] - 1
    place, owner, _ = _tokens(query_start_loc, num_reqs)
    row, positions = idx_mapping[:num_reqs].astype(np.int64)[owner], pos[place]
    is_real = row >= 0
    for group in range(num_groups):
        size = int(block_sizes[group])
        slots = slot_mappings[group]
        slots[query_start_loc[num_reqs] : max_num_tokens] = PAD_ID
        slots[place] = PAD_ID
        if slot_mapping_enabled[group]:
            entry = row[is_real] * block_table_strides[group] + positions[is_real] // size
            table = _memory(block_table_ptrs[group], int(entry.max(initial=0)) + 1)
            slots[place[is_real]] = table[entry].astype(np.int64) * size + positions[is_real] % size
    return True
