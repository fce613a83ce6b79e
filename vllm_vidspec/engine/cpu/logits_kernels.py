"""Numpy twins of vLLM's kernels that change logits before a token is drawn: see `batch_kernels`. CPU engine only."""

import numpy as np


def temperature(grid, logits, logits_stride, expanded_idx_mapping, temperature, vocab_size, BLOCK_SIZE) -> None:
    """Twin of `vllm.v1.worker.gpu.sample.gumbel._temperature_kernel`; logits [n, vocab_size] float32, in place."""
    heat = temperature[expanded_idx_mapping[: grid[0]]]
    rows = np.flatnonzero((heat != 0.0) & (heat != 1.0))
    logits[rows] /= heat[rows, None]


def min_p(grid, logits, logits_stride, expanded_idx_mapping, min_p, vocab_size, BLOCK_SIZE) -> None:
    """Twin of `vllm.v1.worker.gpu.sample.min_p._min_p_kernel`; logits [n, vocab_size] float32, in place."""
    share = min_p[expanded_idx_mapping[: grid[0]]]
    rows = np.flatnonzero(share != 0.0)
    values = logits[rows]
    values[values < values.max(axis=1, keepdims=True) + np.log(share[rows, None])] = -np.inf
    logits[rows] = values


def bias(
    grid,
    logits,  # [n, vocab_size] float32, in place
    logits_stride,
    vocab_size,
    expanded_idx_mapping,
    num_allowed_token_ids,  # [max_num_reqs], as each `num_*`, `min_lens` and `restore_when_all_masked`
    allowed_token_ids,  # [max_num_reqs, most]
    allowed_token_ids_stride,
    num_logit_bias,
    bias_token_ids,  # [max_num_reqs, most]
    bias_token_ids_stride,
    bias,
    bias_stride,
    pos,  # [n]
    min_lens,
    num_stop_token_ids,
    restore_when_all_masked,
    stop_token_ids,  # [max_num_reqs, most]
    stop_token_ids_stride,
    BLOCK_SIZE,
    LOGITS_BLOCK_SIZE,
    CHECK_ALL_MASKED_ROWS,
) -> bool:
    """Twin of `vllm.v1.worker.gpu.sample.logit_bias._bias_kernel`; rows are looked at one by one where asked for."""
    if CHECK_ALL_MASKED_ROWS:
        return False
    reqs = expanded_idx_mapping[: grid[0]]
    for row in np.flatnonzero(num_allowed_token_ids[reqs]):
        allowed = allowed_token_ids[reqs[row], : num_allowed_token_ids[reqs[row]]]
        kept = logits[row, allowed]
        logits[row] = -np.inf
        logits[row, allowed] = kept
    for row in np.flatnonzero(num_logit_bias[reqs]):
        count = num_logit_bias[reqs[row]]
        logits[row, bias_token_ids[reqs[row], :count]] += bias[reqs[row], :count]
    for row in np.flatnonzero((num_stop_token_ids[reqs] > 0) & (pos[: grid[0]] + 1 < min_lens[reqs])):
        logits[row, stop_token_ids[reqs[row], : num_stop_token_ids[reqs[row]]]] = -np.inf
    return True
