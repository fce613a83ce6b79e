"""Vectorised numpy twins of vLLM Triton kernels that the interpreter runs one program at a time. CPU engine only.

Each twin is bit-equal to the interpreted kernel (tests compare them), so it changes the CPU engine's speed and nothing
else: the interpreter computes with numpy too.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_F32 = np.float32
_U32 = np.uint32
DRAFT_NOISE_SALT = 1 << 30


class Twin:
    """Stands in for a Triton kernel: `kernel[grid](...)` calls a function of the grid and the kernel's tensors once.

    Args:
        run: Serves the whole grid; strides, sizes and compile-time constants are left out of its arguments.
    """

    def __init__(self, run: Callable[..., None]):
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher for a grid."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **_constants: Any) -> None:
        self._run(grid, *(arg for arg in args if isinstance(arg, torch.Tensor)))


class GumbelTwin(Twin):
    """Twin of `vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel`.

    Args:
        interpreted: The kernel, which still serves what this project never asks for: fp64 noise, the logits cache.
    """

    def __init__(self, interpreted: Any):
        self._interpreted = interpreted

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        # Out: `[num_tokens, num_blocks]` int64 and float32; tokens are `[num_tokens]`, requests `[max_num_reqs]`.
        local_argmax, _, local_max, _, cache, *_, logits, _, idx_mapping, seeds, pos, temperature, vocab_size = args
        if cache is not None or constants["USE_FP64"] or constants["APPLY_TEMPERATURE"]:
            self._interpreted[grid](*args, **constants)
            return
        rows, block_size = idx_mapping.numpy(), constants["BLOCK_SIZE"]
        values = logits.float().numpy().copy()  # [num_tokens, vocab_size]
        noisy = (rows >= 0) & (temperature.numpy()[rows] != 0.0)
        if noisy.any():
            keys = np.arange(vocab_size, dtype=_U32)
            positions = pos.numpy()[noisy] + (DRAFT_NOISE_SALT if constants["IS_DRAFTING"] else 0)
            values[noisy] += gumbel_noise(seeds.numpy()[rows[noisy]], positions, keys)
        for block in range(local_argmax.shape[1]):
            part = values[:, block * block_size : (block + 1) * block_size]
            best = part.argmax(axis=1)
            local_argmax.numpy()[:, block] = block * block_size + best
            local_max.numpy()[:, block] = np.take_along_axis(part, best[:, None], axis=1)[:, 0]


def penalties(
    _grid,
    logits,  # [num_tokens, vocab_size] float32, in place
    expanded_idx_mapping,  # [num_tokens]
    token_ids,  # [num_tokens]
    expanded_local_pos,  # [num_tokens]
    repetition_penalty,  # [max_num_reqs] float32
    frequency_penalty,
    presence_penalty,
    prompt_bin_mask,  # [max_num_reqs, ceil(vocab_size / 32)] int32
    output_bin_counts,  # [max_num_reqs, vocab_size] int32
) -> None:
    """Twin of `vllm.v1.worker.gpu.sample.penalties._penalties_kernel`, all rows at once.

    Why: trees verify some thirty rows a request, and the interpreter takes milliseconds for each.
    """
    reqs, vocab_size = expanded_idx_mapping.numpy(), logits.shape[1]
    repetition, frequency, presence = (
        penalty.numpy()[reqs].astype(_F32) for penalty in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    rows = np.flatnonzero((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0))
    if not len(rows):
        return
    reqs, repetition = reqs[rows], repetition[rows, None]
    frequency, presence = frequency[rows, None], presence[rows, None]
    counts = output_bin_counts.numpy()[reqs].copy()  # [n, vocab_size]
    local_pos = expanded_local_pos.numpy()[rows]
    owner = np.repeat(np.arange(len(rows)), local_pos)
    before = np.arange(len(owner)) - np.repeat(np.cumsum(local_pos) - local_pos, local_pos)
    drafted = token_ids.numpy()[np.repeat(rows - local_pos, local_pos) + before + 1]
    known = (drafted >= 0) & (drafted < vocab_size)
    np.add.at(counts, (owner[known], drafted[known]), 1)
    seen = counts > 0
    values = logits.numpy()[rows].astype(_F32)
    bits = (prompt_bin_mask.numpy()[reqs][:, :, None] >> np.arange(32, dtype=np.int32)) & 1
    in_prompt = bits.reshape(len(rows), -1)[:, :vocab_size].astype(bool)
    scale = np.where(in_prompt | seen, repetition, _F32(1.0))
    scaled = values * np.where(values > 0, _F32(1.0) / scale, scale)
    values = np.where(repetition != 1.0, scaled, values)
    values = values - frequency * counts.astype(_F32)
    logits.numpy()[rows] = values - presence * seen.astype(_F32)


def bad_words(
    grid: tuple[int, int],  # logits rows, most words of a request
    logits,  # [num_tokens, vocab_size] float, in place
    expanded_idx_mapping,  # [num_tokens]
    bad_word_token_ids,  # [max_num_reqs, n]
    bad_word_offsets,  # [max_num_reqs, max words + 1]
    num_bad_words,  # [max_num_reqs]
    all_token_ids,  # [max_num_reqs, max_model_len]
    prompt_len,  # [max_num_reqs]
    total_len,  # [max_num_reqs]
    input_ids,  # [num_tokens]
    expanded_local_pos,  # [num_tokens]
) -> None:
    """Twin of `vllm.v1.worker.gpu.sample.bad_words._bad_words_kernel`, all rows at once."""
    reqs, local_pos = expanded_idx_mapping.numpy(), expanded_local_pos.numpy()
    ids, committed, fed = bad_word_token_ids.numpy(), all_token_ids.numpy(), input_ids.numpy()
    first_row = np.arange(len(reqs)) - local_pos  # of the request
    prompt = prompt_len.numpy()[reqs]
    num_output = total_len.numpy()[reqs] - prompt  # [num_tokens] committed output tokens
    length = num_output + local_pos
    for word in range(grid[1]):
        start, end = bad_word_offsets.numpy()[reqs, word], bad_word_offsets.numpy()[reqs, word + 1]
        prefix = end - start - 1
        match = (word < num_bad_words.numpy()[reqs]) & (prefix <= length)
        for i in range(int(prefix[match].max(initial=0))):
            rows = np.flatnonzero(match & (i < prefix))
            place = (length - prefix + i)[rows]  # in the output
            drafted = place - num_output[rows]
            is_drafted = drafted >= 0
            # Each place is looked up in one of the two texts only: in the other it may lie past the end.
            actual = np.empty(len(rows), dtype=np.int64)
            there, here = rows[~is_drafted], rows[is_drafted]
            actual[~is_drafted] = committed[reqs[there], prompt[there] + place[~is_drafted]]
            actual[is_drafted] = fed[first_row[here] + drafted[is_drafted] + 1]
            match[rows] &= ids[reqs[rows], start[rows] + i] == actual
        rows = np.flatnonzero(match)
        logits.numpy()[rows, ids[reqs[rows], end[rows] - 1]] = -np.inf


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray, use_fp64: bool = False) -> np.ndarray:
    """Return vLLM's stateless Gumbel noise.

    Args:
        seeds: `[n]` int64 request seeds.
        positions: `[n]` int64 positions of the input tokens.
        keys: `[vocab_size]` uint32 token ids.
        use_fp64: Whether to make it of 53 random bits.

    Returns:
        `[n, vocab_size]` float32, or float64.
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
