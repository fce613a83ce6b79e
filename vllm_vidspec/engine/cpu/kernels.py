"""Vectorised numpy twins of vLLM's Triton kernels for logits, and its noise. CPU engine only.

Triton's interpreter runs one program at a time, some milliseconds each. Each twin is bit-equal to the interpreted
kernel (tests compare them), so it changes the CPU engine's speed and nothing else: the interpreter computes with numpy,
too. `penalties` here is the twin of vLLM's `_penalties_kernel`, and so on; rows are `[num_tokens]`, tables
`[max_num_reqs]`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_F32 = np.float32
_U32 = np.uint32
DRAFT_NOISE_SALT = 1 << 30
# Tiles of vLLM's kernels: in what order a float32 sum is added up, and how far a row is padded.
_SUM_BLOCK, _RANK_BLOCK = 1024, 8192


class Twin:
    """Stands in for a Triton kernel: `kernel[grid](...)` calls a function once, for the whole grid.

    It takes the grid and the kernel's arguments that it names (`*_ptr` without the ending): arrays for tensors, or the
    tensor where it is annotated as one. Where it returns False, and for bfloat16, which numpy does not know, the
    interpreted kernel runs.
    """

    def __init__(self, run: Callable[..., bool | None], interpreted: Any):
        self._run, self._interpreted = run, interpreted
        wanted = list(inspect.signature(run).parameters.values())[1:]
        self._is_tensor = {it.name: it.annotation is torch.Tensor for it in wanted}
        names = inspect.signature(interpreted.fn).parameters
        self._names = [name if name in self._is_tensor else name.removesuffix("_ptr") for name in names]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher for a grid."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        given = dict(zip(self._names, args, strict=False)) | constants
        taken: dict[str, Any] = {}
        for name, as_tensor in self._is_tensor.items():
            value = given.get(name)
            if isinstance(value, torch.Tensor) and not as_tensor:
                if value.dtype == torch.bfloat16:
                    break
                value = value.numpy()
            taken[name] = value
        if len(taken) < len(self._is_tensor) or self._run(grid, **taken) is False:
            self._interpreted[grid](*args, **constants)


def gumbel_sample(
    grid,
    local_argmax,
    local_max,
    logits_cache,
    logits: torch.Tensor,
    expanded_idx_mapping,
    seeds,
    pos,
    temp,
    vocab_size,
    BLOCK_SIZE,
    IS_DRAFTING,
    APPLY_TEMPERATURE,
    USE_FP64,
) -> bool:
    """Find the best noised token of each block of each row: `local_argmax`, `local_max` `[num_tokens, num_blocks]`."""
    if logits_cache is not None or USE_FP64 or APPLY_TEMPERATURE:  # this project never asks for it
        return False
    rows, values = expanded_idx_mapping, logits.float().numpy().copy()  # [num_tokens, vocab_size]
    noisy = (rows >= 0) & (temp[rows] != 0.0)
    if noisy.any():
        positions = pos[noisy] + (DRAFT_NOISE_SALT if IS_DRAFTING else 0)
        values[noisy] += gumbel_noise(seeds[rows[noisy]], positions, np.arange(vocab_size, dtype=_U32))
    for block in range(local_argmax.shape[1]):
        part = values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        best = part.argmax(axis=1)
        local_argmax[:, block] = block * BLOCK_SIZE + best
        local_max[:, block] = np.take_along_axis(part, best[:, None], axis=1)[:, 0]
    return True


def temperature(grid, logits, expanded_idx_mapping, temperature) -> None:
    heat = temperature[expanded_idx_mapping[: grid[0]]]
    rows = np.flatnonzero((heat != 0.0) & (heat != 1.0))
    logits[rows] /= heat[rows, None]


def min_p(grid, logits, expanded_idx_mapping, min_p) -> None:
    share = min_p[expanded_idx_mapping[: grid[0]]]
    rows = np.flatnonzero(share != 0.0)
    values = logits[rows]
    values[values < values.max(axis=1, keepdims=True) + np.log(share[rows, None])] = -np.inf
    logits[rows] = values


def bias(
    grid,
    logits,
    expanded_idx_mapping,
    num_allowed_token_ids,
    allowed_token_ids,
    num_logit_bias,
    bias_token_ids,
    bias,
    pos,
    min_lens,
    num_stop_token_ids,
    stop_token_ids,
    CHECK_ALL_MASKED_ROWS,
) -> bool:
    """Allow, bias and ban tokens, listed `[max_num_reqs, most]`; rows are looked at one by one where asked for."""
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


def penalties(
    grid,
    logits,
    expanded_idx_mapping,
    token_ids,
    expanded_local_pos,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    prompt_bin_mask,
    output_bin_counts,
) -> None:
    """Penalise all rows at once: trees verify some thirty a request. `prompt_bin_mask` `[max_num_reqs,
    ceil(vocab_size / 32)]` int32, `output_bin_counts` `[max_num_reqs, vocab_size]` int32.
    """
    reqs, vocab_size = expanded_idx_mapping, logits.shape[1]
    asked = (repetition_penalty, frequency_penalty, presence_penalty)
    repetition, frequency, presence = (penalty[reqs].astype(_F32) for penalty in asked)
    rows = np.flatnonzero((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0))
    if not len(rows):
        return
    reqs, repetition = reqs[rows], repetition[rows, None]
    frequency, presence = frequency[rows, None], presence[rows, None]
    counts = output_bin_counts[reqs].copy()  # [n, vocab_size]
    local_pos = expanded_local_pos[rows]
    owner = np.repeat(np.arange(len(rows)), local_pos)
    before = np.arange(len(owner)) - np.repeat(np.cumsum(local_pos) - local_pos, local_pos)
    drafted = token_ids[np.repeat(rows - local_pos, local_pos) + before + 1]
    known = (drafted >= 0) & (drafted < vocab_size)
    np.add.at(counts, (owner[known], drafted[known]), 1)
    seen = counts > 0
    values = logits[rows].astype(_F32)
    bits = (prompt_bin_mask[reqs][:, :, None] >> np.arange(32, dtype=np.int32)) & 1
    in_prompt = bits.reshape(len(rows), -1)[:, :vocab_size].astype(bool)
    scale = np.where(in_prompt | seen, repetition, _F32(1.0))
    scaled = values * np.where(values > 0, _F32(1.0) / scale, scale)
    values = np.where(repetition != 1.0, scaled, values)
    values = values - frequency * counts.astype(_F32)
    logits[rows] = values - presence * seen.astype(_F32)


def bad_words(
    grid,
    logits,
    expanded_idx_mapping,
    bad_word_token_ids,
    bad_word_offsets,
    num_bad_words,
    all_token_ids,
    prompt_len,
    total_len,
    input_ids,
    expanded_local_pos,
) -> None:
    """Ban the last token of each word whose beginning a row's text ends with. The grid: rows, most words of a request;
    `bad_word_offsets` `[max_num_reqs, most words + 1]`.
    """
    reqs, local_pos, ids = expanded_idx_mapping, expanded_local_pos, bad_word_token_ids
    first_row = np.arange(len(reqs)) - local_pos  # of the request
    prompt = prompt_len[reqs]
    num_output = total_len[reqs] - prompt  # [num_tokens] committed output tokens
    length = num_output + local_pos
    for word in range(grid[1]):
        start, end = bad_word_offsets[reqs, word], bad_word_offsets[reqs, word + 1]
        prefix = end - start - 1
        match = (word < num_bad_words[reqs]) & (prefix <= length)
        for i in range(int(prefix[match].max(initial=0))):
            rows = np.flatnonzero(match & (i < prefix))
            place = (length - prefix + i)[rows]  # in the output
            drafted = place - num_output[rows]
            is_drafted = drafted >= 0
            # Each place is looked up in one of the two texts only: in the other it may lie past the end.
            actual = np.empty(len(rows), dtype=np.int64)
            there, here = rows[~is_drafted], rows[is_drafted]
            actual[~is_drafted] = all_token_ids[reqs[there], prompt[there] + place[~is_drafted]]
            actual[is_drafted] = input_ids[first_row[here] + drafted[is_drafted] + 1]
            match[rows] &= ids[reqs[rows], start[rows] + i] == actual
        rows = np.flatnonzero(match)
        logits[rows, ids[reqs[rows], end[rows] - 1]] = -np.inf


def topk_log_softmax(grid, output, logits: torch.Tensor, topk_ids) -> None:
    """Write the log-probabilities of `[num_tokens, n]` tokens."""
    values = logits.float().numpy()
    top = values.max(axis=1, keepdims=True)
    total = np.zeros(len(values), _F32)
    for first in range(0, values.shape[1], _SUM_BLOCK):
        part = values[:, first : first + _SUM_BLOCK]
        weights = np.zeros((len(values), _SUM_BLOCK), _F32)
        np.exp(part - top, out=weights[:, : part.shape[1]])
        total += weights.sum(axis=1)
    output[:] = np.take_along_axis(values, topk_ids, axis=1) - top - np.log(total)[:, None]


def ranks(grid, output, logits: torch.Tensor, token_ids) -> None:
    values = logits.float().numpy()
    own = np.take_along_axis(values, token_ids[:, None], axis=1)
    # A row is padded with -inf, which counts beside a token that has no less.
    padding = -values.shape[1] % _RANK_BLOCK
    output[:] = (values >= own).sum(axis=1) + padding * (own[:, 0] == -np.inf)


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray, use_fp64: bool = False) -> np.ndarray:
    """Return vLLM's stateless Gumbel noise `[n, vocab_size]` float32, or float64 of 53 random bits, by `[n]` int64
    request seeds and positions of the input tokens, and `[vocab_size]` uint32 token ids.
    """
    if use_fp64:
        words = [_murmur3(seeds, positions, keys, domain).astype(np.uint64) for domain in (_U32(0x9E3779B9), _U32(0))]
        random53 = ((words[0] << np.uint64(32)) | words[1]) >> np.uint64(11)
        wide = (random53.astype(np.float64) + 0.5) * 1.1102230246251565e-16
        # The largest midpoint rounds to 1.
        return -np.log(-np.log(np.where(wide == 1.0, wide - 1.1102230246251565e-16, wide)))
    random32 = _murmur3(seeds, positions, keys)
    high, low = (random32 >> _U32(16)).astype(_F32), (random32 & _U32(0xFFFF)).astype(_F32)
    uniform = high * _F32(1.52587890625e-05) + (low + _F32(0.5)) * _F32(2.3283064365386963e-10)
    return -np.log(-_log1p_neg(uniform))


def _log1p_neg(value: np.ndarray) -> np.ndarray:
    """log(1 - value) as vLLM computes it: a series below 0.25, the logarithm above."""
    polynomial: Any = _F32(1.0 / 8.0)
    for divisor in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        polynomial = _F32(1.0 / divisor) + value * polynomial
    direct = np.log(np.maximum(_F32(1.0) - value, _F32(5.960464477539063e-08)))
    return np.where(value < _F32(0.25), -value * polynomial, direct)


def _murmur3(seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray, domain: np.uint32 = _U32(0)) -> np.ndarray:
    """MurmurHash3 (32 bits) of the four words (seed low, seed high, position low, key): `[n, vocab_size]` uint32."""
    low = np.int64(0xFFFFFFFF)
    h = np.full(len(seeds), domain, dtype=_U32)
    for word in (seeds & low, (seeds >> 32) & low, positions & low):
        h = _mix(h, word.astype(_U32))
    h = _mix(h[:, None], keys[None, :]) ^ _U32(16)
    h ^= h >> _U32(16)
    h *= _U32(0x85EBCA6B)
    h ^= h >> _U32(13)
    h *= _U32(0xC2B2AE35)
    return h ^ (h >> _U32(16))


def _mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = key * _U32(0xCC9E2D51)
    key = (key << _U32(15)) | (key >> _U32(17))
    h = h ^ (key * _U32(0x1B873593))
    h = (h << _U32(13)) | (h >> _U32(19))
    return h * _U32(5) + _U32(0xE6546B64)
