"""Vectorised numpy twins of vLLM's Triton kernels for logits, and its noise. CPU engine only.

Triton's interpreter runs one program at a time, some milliseconds each. Each twin is bit-equal to the interpreted
kernel, which computes with numpy, too (tests compare them). `penalties` here is the twin of vLLM's `_penalties_kernel`,
and so on; rows are `[num_tokens]`, tables `[max_num_reqs]`.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_F32 = np.float32
_U32 = np.uint32
DRAFT_NOISE_SALT = 1 << 30
_SUM_BLOCK, _RANK_BLOCK = 1024, 8192  # of vLLM's kernels: how a float32 sum is added up, a row padded


class Twin:
    """Stands in for a Triton kernel: `kernel[grid](...)` calls a function once, for the whole grid.

    It takes the grid, and `k`, the kernel's arguments by name (`*_ptr` without the ending) with arrays for tensors, and
    `logits`, as float32. Where it returns False, and for bfloat16, which numpy lacks, the interpreted kernel runs.
    """

    def __init__(self, run: Callable[..., bool | None], interpreted: Any):
        self._run, self._interpreted, self._reads = run, interpreted, reads(run)
        taken = inspect.signature(interpreted.fn).parameters
        self._names = [name.removesuffix("_ptr") for name in taken]
        self._defaults = {name: it.default for name, it in taken.items() if it.default is not it.empty}
        self._takes_logits = "logits" in inspect.signature(run).parameters

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        given = self._defaults | dict(zip(self._names, args, strict=False)) | constants
        values = {name: given[name] for name in self._reads}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        if all(tensor.dtype != torch.bfloat16 for tensor in tensors.values()):
            k = SimpleNamespace(**values | {name: tensor.numpy() for name, tensor in tensors.items()})
            logits = (given["logits"].float().numpy(),) if self._takes_logits else ()
            if self._run(grid, k, *logits) is not False:
                return
        self._interpreted[grid](*args, **constants)


def reads(run: Callable) -> list[str]:
    return sorted(set(re.findall(r"\bk\.(\w+)", inspect.getsource(run))))


def gumbel_sample(grid, k, logits) -> bool:
    """Find the best noised token of each block of each row: `local_argmax`, `local_max` `[num_tokens, num_blocks]`."""
    if k.logits_cache is not None or k.USE_FP64 or k.APPLY_TEMPERATURE:  # this project never asks for it
        return False
    rows, values = k.expanded_idx_mapping, logits.copy()  # [num_tokens, vocab_size]
    noisy = (rows >= 0) & (k.temp[rows] != 0.0)
    if noisy.any():
        positions = k.pos[noisy] + (DRAFT_NOISE_SALT if k.IS_DRAFTING else 0)
        values[noisy] += gumbel_noise(k.seeds[rows[noisy]], positions, np.arange(k.vocab_size, dtype=_U32))
    for block in range(k.local_argmax.shape[1]):
        part = values[:, block * k.BLOCK_SIZE : (block + 1) * k.BLOCK_SIZE]
        best = part.argmax(axis=1)
        k.local_argmax[:, block] = block * k.BLOCK_SIZE + best
        k.local_max[:, block] = np.take_along_axis(part, best[:, None], axis=1)[:, 0]
    return True


def temperature(grid, k) -> None:
    heat = k.temperature[k.expanded_idx_mapping[: grid[0]]]
    rows = np.flatnonzero((heat != 0.0) & (heat != 1.0))
    k.logits[rows] /= heat[rows, None]


def min_p(grid, k) -> None:
    share = k.min_p[k.expanded_idx_mapping[: grid[0]]]
    rows = np.flatnonzero(share != 0.0)
    values = k.logits[rows]
    values[values < values.max(axis=1, keepdims=True) + np.log(share[rows, None])] = -np.inf
    k.logits[rows] = values


def bias(grid, k) -> bool:
    """Allow, bias and ban tokens, listed `[max_num_reqs, most]`; rows are looked at one by one where asked for."""
    if k.CHECK_ALL_MASKED_ROWS:
        return False
    reqs = k.expanded_idx_mapping[: grid[0]]
    for row in np.flatnonzero(k.num_allowed_token_ids[reqs]):
        allowed = k.allowed_token_ids[reqs[row], : k.num_allowed_token_ids[reqs[row]]]
        kept = k.logits[row, allowed]
        k.logits[row] = -np.inf
        k.logits[row, allowed] = kept
    for row in np.flatnonzero(k.num_logit_bias[reqs]):
        count = k.num_logit_bias[reqs[row]]
        k.logits[row, k.bias_token_ids[reqs[row], :count]] += k.bias[reqs[row], :count]
    for row in np.flatnonzero((k.num_stop_token_ids[reqs] > 0) & (k.pos[: grid[0]] + 1 < k.min_lens[reqs])):
        k.logits[row, k.stop_token_ids[reqs[row], : k.num_stop_token_ids[reqs[row]]]] = -np.inf
    return True


def penalties(grid, k) -> None:
    """Penalise all rows at once, by int32 `prompt_bin_mask` `[max_num_reqs, vocab_size / 32]` and counts by token."""
    reqs, vocab_size = k.expanded_idx_mapping, k.logits.shape[1]
    asked = (k.repetition_penalty, k.frequency_penalty, k.presence_penalty)
    repetition, frequency, presence = (penalty[reqs].astype(_F32) for penalty in asked)
    rows = np.flatnonzero((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0))
    if not len(rows):
        return
    reqs, repetition = reqs[rows], repetition[rows, None]
    frequency, presence = frequency[rows, None], presence[rows, None]
    counts = k.output_bin_counts[reqs].copy()  # [n, vocab_size]
    local_pos = k.expanded_local_pos[rows]
    owner = np.repeat(np.arange(len(rows)), local_pos)
    before = np.arange(len(owner)) - np.repeat(np.cumsum(local_pos) - local_pos, local_pos)
    drafted = k.token_ids[np.repeat(rows - local_pos, local_pos) + before + 1]
    known = (drafted >= 0) & (drafted < vocab_size)
    np.add.at(counts, (owner[known], drafted[known]), 1)
    seen = counts > 0
    values = k.logits[rows].astype(_F32)
    bits = (k.prompt_bin_mask[reqs][:, :, None] >> np.arange(32, dtype=np.int32)) & 1
    in_prompt = bits.reshape(len(rows), -1)[:, :vocab_size].astype(bool)
    scale = np.where(in_prompt | seen, repetition, _F32(1.0))
    scaled = values * np.where(values > 0, _F32(1.0) / scale, scale)
    values = np.where(repetition != 1.0, scaled, values)
    values = values - frequency * counts.astype(_F32)
    k.logits[rows] = values - presence * seen.astype(_F32)


def bad_words(grid, k) -> None:
    """Ban the last token of each word whose beginning a row's text ends with. The grid: rows, most words of one."""
    reqs, local_pos, ids = k.expanded_idx_mapping, k.expanded_local_pos, k.bad_word_token_ids
    first_row = np.arange(len(reqs)) - local_pos  # of the request
    prompt = k.prompt_len[reqs]
    num_output = k.total_len[reqs] - prompt  # [num_tokens] committed output tokens
    length = num_output + local_pos
    for word in range(grid[1]):
        start, end = k.bad_word_offsets[reqs, word], k.bad_word_offsets[reqs, word + 1]
        prefix = end - start - 1
        match = (word < k.num_bad_words[reqs]) & (prefix <= length)
        for i in range(int(prefix[match].max(initial=0))):
            rows = np.flatnonzero(match & (i < prefix))
            place = (length - prefix + i)[rows]  # in the output
            drafted = place - num_output[rows]
            is_drafted = drafted >= 0
            # Each place is looked up in one of the two texts only: in the other it may lie past the end.
            actual = np.empty(len(rows), dtype=np.int64)
            there, here = rows[~is_drafted], rows[is_drafted]
            actual[~is_drafted] = k.all_token_ids[reqs[there], prompt[there] + place[~is_drafted]]
            actual[is_drafted] = k.input_ids[first_row[here] + drafted[is_drafted] + 1]
            match[rows] &= ids[reqs[rows], start[rows] + i] == actual
        rows = np.flatnonzero(match)
        k.logits[rows, ids[reqs[rows], end[rows] - 1]] = -np.inf


def topk_log_softmax(grid, k, logits) -> None:
    """Write the log-probabilities of `[num_tokens, n]` tokens."""
    values = logits
    top = values.max(axis=1, keepdims=True)
    total = np.zeros(len(values), _F32)
    for first in range(0, values.shape[1], _SUM_BLOCK):
        part = values[:, first : first + _SUM_BLOCK]
        weights = np.zeros((len(values), _SUM_BLOCK), _F32)
        np.exp(part - top, out=weights[:, : part.shape[1]])
        total += weights.sum(axis=1)
    k.output[:] = np.take_along_axis(values, k.topk_ids, axis=1) - top - np.log(total)[:, None]


def ranks(grid, k, logits) -> None:
    own = np.take_along_axis(logits, k.token_ids[:, None], axis=1)
    # A row is padded with -inf, which counts beside a token that has no less.
    padding = -logits.shape[1] % _RANK_BLOCK
    k.output[:] = (logits >= own).sum(axis=1) + padding * (own[:, 0] == -np.inf)


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, keys: np.ndarray, use_fp64: bool = False) -> np.ndarray:
    """Return vLLM's Gumbel noise `[n, vocab_size]` by `[n]` int64 seeds and positions, and uint32 token ids `keys`."""
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
