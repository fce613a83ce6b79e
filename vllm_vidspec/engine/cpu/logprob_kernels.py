"""Numpy twins of vLLM's kernels for log-probabilities: see `kernels`. CPU engine only."""

import numpy as np

# Tiles of vLLM's kernels: in what order a float32 sum is added up, and how far a row is padded.
_SUM_BLOCK = 1024
_RANK_BLOCK = 8192


def topk_log_softmax(
    _grid,
    log_probs,  # [num_tokens, n] float32, out
    logits,  # [num_tokens, vocab_size] float
    token_ids,  # [num_tokens, n] int64
) -> None:
    """Twin of `vllm.v1.worker.gpu.sample.logprob._topk_log_softmax_kernel`, all rows at once."""
    values = logits.float().numpy()
    top = values.max(axis=1, keepdims=True)
    total = np.zeros(len(values), np.float32)
    for first in range(0, values.shape[1], _SUM_BLOCK):
        part = values[:, first : first + _SUM_BLOCK]
        weights = np.zeros((len(values), _SUM_BLOCK), np.float32)
        np.exp(part - top, out=weights[:, : part.shape[1]])
        total += weights.sum(axis=1)
    log_probs.numpy()[:] = np.take_along_axis(values, token_ids.numpy(), axis=1) - top - np.log(total)[:, None]


def ranks(
    _grid,
    found,  # [num_tokens] int64, out
    logits,  # [num_tokens, vocab_size] float
    token_ids,  # [num_tokens] int64
) -> None:
    """Twin of `vllm.v1.worker.gpu.sample.logprob._ranks_kernel`, all rows at once."""
    values = logits.float().numpy()
    own = np.take_along_axis(values, token_ids.numpy()[:, None], axis=1)
    # A row is padded with -inf, which counts beside a token that has no less.
    padding = -values.shape[1] % _RANK_BLOCK
    found.numpy()[:] = (values >= own).sum(axis=1) + padding * (own[:, 0] == -np.inf)


def flatten_sampled(
    grid: tuple[int],  # requests
    flat,  # [num_logits], out: each request's tokens from its first row on
    sampled,  # [num_reqs, >= num_sampled]
    num_sampled,  # [num_reqs]
    cu_num_logits,  # [num_reqs + 1]
) -> None:
    """Twin of `vllm.v1.worker.gpu.spec_decode.rejection_sampler._flatten_sampled_kernel`, all requests at once."""
    given, tokens = num_sampled.numpy()[: grid[0]], sampled.numpy()
    req_idx, i = np.nonzero(np.arange(tokens.shape[1]) < given[:, None])
    flat.numpy()[cu_num_logits.numpy()[req_idx] + i] = tokens[req_idx, i]
