"""candidates: the most probable tokens of every row of logits, and how probable they are, in two launches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.bitonic import largest, merge_groups
from vidspec_kernels.dispatch import Impl, launch, on_host, remember, use_triton
from vidspec_kernels.sampling.noise import (
    BLOCK,
    MAX_CANDIDATES,
    Noise,
    SampleScratch,
    check_logits,
    log_top,
    logits_key,
    noised_scores,
    scores_reference,
)  # fmt: skip

# Keys that the second launch orders at a time.
_LOG_MERGE = 11


@triton.jit
def _key(score, token_id):
    """Return int64 keys in the order of argmax: of the higher score, of equal ones of the lower token; NaN first."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 is no other number
    score = tl.where(score == score, score, float("nan"))  # one NaN, without a sign
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # numbers below 0 the other way round
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def _score_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shift(maximum):
    """Return what is subtracted before the exponential: the maximum, where that is a number."""
    return tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)


@triton.jit(
    do_not_specialize=["salt", "first", "width"],
    do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "pos_ptr"],
)
def _candidates_kernel(
    logits_ptr, logits_stride,  # [n, vocab_size]
    temperature_ptr, seeds_ptr,  # [R]; None: logits are scores
    pos_ptr,  # [n]
    keys_ptr,  # [n, num_blocks, 2 ** LOG_TOP]
    maxima_ptr, sums_ptr,  # [n, num_blocks]; None: not requested
    vocab_size, salt, first, width,
    NOISE: tl.constexpr, APPLY_TEMPERATURE: tl.constexpr, LOG_BLOCK: tl.constexpr, LOG_TOP: tl.constexpr,
):  # fmt: skip
    """The best tokens of a row's block, and what it adds to the row's sum of exponentials."""
    BLOCK: tl.constexpr = 2**LOG_BLOCK
    TOP: tl.constexpr = 2**LOG_TOP
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    if temperature_ptr is None:
        scores = tl.load(logits_ptr + row * logits_stride + token_ids, mask=mask, other=-float("inf")).to(tl.float32)
    else:
        req_idx = (first + row) // width
        scores = noised_scores(
            logits_ptr + row * logits_stride, token_ids, mask, tl.load(temperature_ptr + req_idx),
            tl.load(seeds_ptr + req_idx), tl.load(pos_ptr + row) + salt, NOISE, False, APPLY_TEMPERATURE,
        )  # fmt: skip
    part = row * tl.num_programs(1) + block
    if maxima_ptr is not None:
        maximum = tl.max(scores, axis=0)
        tl.store(maxima_ptr + part, maximum)
        tl.store(sums_ptr + part, tl.sum(tl.exp(scores - _shift(maximum)), axis=0))
    keys = tl.where(mask, _key(scores, token_ids), -(2**63))
    best = tl.reshape(largest(tl.reshape(keys, [2] * LOG_BLOCK), LOG_BLOCK, LOG_BLOCK, LOG_TOP, 1, False), [TOP])
    tl.store(keys_ptr + part * TOP + tl.arange(0, TOP), best)


@triton.jit(
    do_not_specialize=["num_blocks", "num_candidates", "scores_stride", "ids_stride"],
    do_not_specialize_on_alignment=["scores_ptr", "ids_ptr"],
)
def _merge_candidates_kernel(
    keys_ptr,  # [n, num_blocks, 2 ** LOG_TOP]
    maxima_ptr, sums_ptr,  # [n, num_blocks]; None: not requested
    scores_ptr, scores_stride, ids_ptr, ids_stride,  # [n, num_candidates]
    num_blocks, num_candidates,
    BLOCK: tl.constexpr, LOG_MERGE: tl.constexpr, LOG_TOP: tl.constexpr,
):  # fmt: skip
    """The best tokens of a row's blocks."""
    TOP: tl.constexpr = 2**LOG_TOP
    MERGE: tl.constexpr = 2**LOG_MERGE
    row = tl.program_id(0).to(tl.int64)
    num_keys = num_blocks * TOP
    keys_ptr += row * num_keys
    best = tl.full([2] * LOG_TOP, -(2**63), tl.int64)
    for begin in range(0, num_keys, MERGE):
        i = begin + tl.arange(0, MERGE)
        keys = tl.load(keys_ptr + i, mask=i < num_keys, other=-(2**63))
        # Ordered the other way round: the larger of each pair are the largest of both.
        best = tl.maximum(best, largest(tl.reshape(keys, [2] * LOG_MERGE), LOG_MERGE, LOG_MERGE, LOG_TOP, 0, False))
        best = merge_groups(best, LOG_TOP, LOG_TOP, 1)
    keys = tl.reshape(best, [TOP])
    scores = _score_of(keys)
    if maxima_ptr is not None:
        block = tl.arange(0, BLOCK)
        maxima = tl.load(maxima_ptr + row * num_blocks + block, mask=block < num_blocks, other=-float("inf"))
        sums = tl.load(sums_ptr + row * num_blocks + block, mask=block < num_blocks, other=0.0)
        shift = _shift(tl.max(maxima, axis=0))
        scores -= shift + tl.log(tl.sum(sums * tl.exp(_shift(maxima) - shift), axis=0))
    rank = tl.arange(0, TOP)
    ids = 0x7FFFFFFF - (keys & 0x7FFFFFFF)
    tl.store(scores_ptr + row * scores_stride + rank, scores, mask=rank < num_candidates)
    tl.store(ids_ptr + row * ids_stride + rank, ids, mask=rank < num_candidates)


def candidates(
    logits: Tensor, temperature: Tensor | None = None, seeds: Tensor | None = None, pos: Tensor | None = None,
    noise: Noise | None = None, *, log_probs: Tensor, ids: Tensor, scratch: SampleScratch, width: int = 1,
    first: int = 0, with_log_probs: bool = True, apply_temperature: bool = True, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Write the most probable tokens of each row, best first.

    Scores are logits, or logits / temperature + noise of a request with a temperature: given the noise, which the
    target shares, the runner-up is the token that the target most likely draws instead, and a softmax over the scores
    says how likely. Rank 0 is what `draw` draws and what an argmax takes: of equal scores the lowest token. Further
    ranks descend; of equal scores the lower token comes first.

    Args:
        logits: float32, bfloat16 or float16 [n, V], unit stride in its rows; row i belongs to batch row
            (first + i) // width.
        temperature: float32 [R] by batch row; None: logits are scores, and so are seeds, pos and noise.
        seeds: int64 [R] by batch row.
        pos: int64 [>= n], logical position of each row's input token, which keys the noise.
        noise: What is added.
        log_probs: Out, float32 [>= n, C], unit stride in its rows, C <= 64: log-softmax of the scores over all V
            tokens, or the scores.
        ids: Out, int64 [>= n, C], unit stride in its rows, distinct in a row.
        scratch: Memory of the launches.
        width: Rows of logits of each request.
        first: Row of logits that these begin with.
        with_log_probs: Without, `log_probs` gets the scores and the softmax is spared.
        apply_temperature: Whether the logits are still to be divided by the temperature.
    """
    tensors = (temperature, seeds, pos, noise, log_probs, ids)
    numbers = (width, first, with_log_probs, apply_temperature, impl)
    sizes = (logits.shape, logits.stride(), logits.dtype, logits.device)
    call = ("candidates", *sizes, *numbers, *map(id, tensors))
    known = scratch.ready.get(call) or remember(
        scratch.ready, call, _bind(logits, *tensors, scratch, *numbers), tensors
    )  # fmt: skip
    known[0](logits)


def _bind(
    logits: Tensor, temperature: Tensor | None, seeds: Tensor | None, pos: Tensor | None, noise: Noise | None,
    log_probs: Tensor, ids: Tensor, scratch: SampleScratch, width: int, first: int, with_log_probs: bool,
    apply_temperature: bool, impl: Impl,
) -> Callable[[Tensor], None]:  # fmt: skip
    """Check a call, and return what runs it on any logits of the same shape."""
    device, (num_rows, vocab_size), num_candidates = logits.device, logits.shape, ids.shape[1]
    check_logits(logits, scratch)
    check(device, log_probs=(log_probs, torch.float32, num_rows, [num_candidates]), ids=(ids, torch.int64, num_rows, 0))
    assert 1 <= num_candidates <= min(vocab_size, MAX_CANDIDATES), f"ids: {num_candidates} of {vocab_size}"
    assert log_top(num_candidates) <= log_top(scratch.num_candidates), f"scratch: for {scratch.num_candidates}"
    given = [tensor is not None for tensor in (temperature, seeds, pos, noise)]
    assert all(given) or not any(given), "temperature, seeds, pos, noise: all or none"
    num_reqs = (first + num_rows + width - 1) // width
    check(
        device, temperature=(temperature, torch.float32, num_reqs), seeds=(seeds, torch.int64, num_reqs),
        pos=(pos, torch.int64, num_rows),
    )  # fmt: skip
    if num_rows == 0:
        return lambda logits: None
    if not use_triton(impl, device):
        return on_host(impl, device, "bind_candidates")(
            temperature, seeds, pos, noise, log_probs=log_probs, ids=ids, width=width, first=first,
            with_log_probs=with_log_probs, apply_temperature=apply_temperature,
        )  # fmt: skip
    maxima, sums = (scratch.maxima, scratch.sums) if with_log_probs else (None, None)
    num_blocks, log_kept = scratch.num_blocks, log_top(num_candidates)
    function, salt = (None, 0) if noise is None else (noise.function, noise.salt)
    key = (with_log_probs, log_kept)
    constants = {
        "NOISE": function, "APPLY_TEMPERATURE": apply_temperature, "LOG_BLOCK": BLOCK.bit_length() - 1,
        "LOG_TOP": log_kept,
    }  # fmt: skip
    log_keys = (triton.next_power_of_2(num_blocks) << log_kept).bit_length() - 1
    merge_args = (
        scratch.keys, maxima, sums, log_probs, log_probs.stride(0), ids, ids.stride(0), num_blocks, num_candidates
    )  # fmt: skip
    merge_constants = {
        "BLOCK": triton.next_power_of_2(num_blocks), "LOG_MERGE": min(log_keys, _LOG_MERGE),
        "LOG_TOP": log_kept,
    }  # fmt: skip

    def run(logits: Tensor) -> None:
        args: tuple[Any, ...] = (
            logits, logits.stride(0), temperature, seeds, pos, scratch.keys, maxima, sums, scratch.vocab_size, salt,
            first, width,
        )  # fmt: skip
        launch(
            _candidates_kernel, (num_rows, num_blocks), device, args, constants, scratch.plans,
            (*key, *logits_key(logits, apply_temperature), noise),
        )  # fmt: skip
        launch(_merge_candidates_kernel, (num_rows,), device, merge_args, merge_constants, scratch.plans, key)

    return run


def candidates_reference(
    logits: Tensor, temperature: Tensor | None = None, seeds: Tensor | None = None, pos: Tensor | None = None,
    noise: Noise | None = None, *, log_probs: Tensor, ids: Tensor, width: int = 1, first: int = 0,
    with_log_probs: bool = True, apply_temperature: bool = True,
) -> None:  # fmt: skip
    """Do what `candidates` does, in torch: the specification. Same arguments; noise is made on the host."""
    num_rows = logits.shape[0]
    scores = candidate_scores(logits, temperature, seeds, pos, noise, width, first, apply_temperature)
    values, chosen = scores.topk(ids.shape[1], dim=-1)
    best = scores.argmax(dim=-1, keepdim=True)  # [n, 1]
    # The two change places; where top-k missed the best, the token it had put first goes. Tied values: none to swap.
    chosen = torch.where(chosen == best, chosen[:, :1], chosen)
    chosen[:, :1] = best
    ids[:num_rows] = chosen
    log_probs[:num_rows] = values - scores.logsumexp(dim=-1, keepdim=True) if with_log_probs else values


def candidate_scores(
    logits: Tensor, temperature: Tensor | None, seeds: Tensor | None, pos: Tensor | None, noise: Noise | None,
    width: int, first: int, apply_temperature: bool,
) -> Tensor:  # fmt: skip
    """Return the scores float32 [n, V] of `candidates_reference`'s arguments; the logits where none has noise."""
    num_rows, scores = logits.shape[0], logits.float()
    if temperature is not None and seeds is not None and pos is not None and noise is not None:
        req_idx = np.arange(first, first + num_rows) // width
        noisy, noised = scores_reference(logits, temperature, seeds, pos, noise, apply_temperature, req_idx)
        if len(noisy) == num_rows:
            scores = torch.from_numpy(noised).to(scores)
        elif len(noisy):
            index = torch.from_numpy(noisy).to(scores.device)
            scores = scores.index_copy(0, index, torch.from_numpy(noised).to(scores))
    return scores
