"""draw: the next token of every chain, from logits to persistent buffers, in two launches."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check
from vidspec_kernels.dispatch import Impl, launch, on_host, remember, use_triton
from vidspec_kernels.sampling.noise import (
    BLOCK,
    Noise,
    SampleScratch,
    check_logits,
    logits_key,
    noised_scores,
    scores_reference,
)  # fmt: skip


@triton.jit(do_not_specialize=["salt"], do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "pos_ptr"])
def _draw_kernel(
    logits_ptr, logits_stride,  # [n, vocab_size]
    temperature_ptr, seeds_ptr, pos_ptr,  # [n]
    best_ptr, best_ids_ptr,  # [n, num_blocks]
    vocab_size, salt,
    NOISE: tl.constexpr, USE_FP64: tl.constexpr, APPLY_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of a row's block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = noised_scores(
        logits_ptr + row * logits_stride, token_ids, token_ids < vocab_size, tl.load(temperature_ptr + row),
        tl.load(seeds_ptr + row), tl.load(pos_ptr + row) + salt, NOISE, USE_FP64, APPLY_TEMPERATURE,
    )  # fmt: skip
    # As in torch's argmax NaN is best; a reduction over it might end in the padding behind the vocabulary.
    best, place = tl.max(tl.where(scores == scores, scores, float("inf")), axis=0, return_indices=True)
    out = row * tl.num_programs(1) + block
    tl.store(best_ptr + out, best)
    tl.store(best_ids_ptr + out, (block * BLOCK + place).to(tl.int64))


@triton.jit(
    do_not_specialize=["num_blocks", "level", "tokens_stride"],
    do_not_specialize_on_alignment=["tokens_ptr", "ids_ptr", "level_ptr"],
)
def _choose_draw_kernel(
    best_ptr, best_ids_ptr,  # [n, num_blocks]
    tokens_ptr, tokens_stride,  # [n, num_levels]
    ids_ptr,  # [n]
    level_ptr,  # [1]; None: `level` is the number
    num_blocks, level,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a row's blocks; of equal ones the first, as in a block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_blocks + block, mask=block < num_blocks, other=-float("inf"))
    _, place = tl.max(best, axis=0, return_indices=True)
    token = tl.load(best_ids_ptr + row * num_blocks + place)
    if level_ptr is not None:
        level = tl.load(level_ptr)
    tl.store(tokens_ptr + row * tokens_stride + level, token)
    tl.store(ids_ptr + row, token.to(tl.int32))


def draw(
    logits: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, noise: Noise, *, level: int | Tensor,
    out_tokens: Tensor, out_ids: Tensor, scratch: SampleScratch, apply_temperature: bool = True, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Draw the token that has the highest logit / temperature + noise; of equal ones the lowest.

    With vLLM's own noise it is what vLLM's `gumbel_sample` draws. A row of temperature 0 has its highest logit, without
    noise. NaN counts as the highest of all.

    Args:
        logits: float32, bfloat16 or float16 [n, V], unit stride in its rows.
        temperature: float32 [>= n].
        seeds: int64 [>= n].
        pos: int64 [>= n], logical position of the input token, which keys the noise.
        noise: What is added.
        level: Column of `out_tokens` to write, 0 after the roots; or int32 [1] on the device.
        out_tokens: Out, int64 [>= n, num_levels], unit stride in its rows.
        out_ids: Out, int32 [>= n], the same tokens, which the next forward embeds.
        scratch: Memory of the launches.
        apply_temperature: Whether the logits are still to be divided by the temperature.
    """
    tensors = (temperature, seeds, pos, noise, out_tokens, out_ids)
    sizes = (logits.shape, logits.stride(), logits.dtype, logits.device)
    column = id(level) if isinstance(level, Tensor) else level
    call = ("draw", *sizes, column, apply_temperature, impl, *map(id, tensors))
    known = scratch.ready.get(call) or remember(
        scratch.ready, call, _bind(logits, *tensors, level, scratch, apply_temperature, impl), (level, *tensors)
    )  # fmt: skip
    known[0](logits)


def _bind(
    logits: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, noise: Noise, out_tokens: Tensor, out_ids: Tensor,
    level: int | Tensor, scratch: SampleScratch, apply_temperature: bool, impl: Impl,
) -> Callable[[Tensor], None]:  # fmt: skip
    """Check a call, and return what runs it on any logits of the same shape."""
    device, num_rows = logits.device, logits.shape[0]
    check_logits(logits, scratch)
    level_ptr, level_value = (level, 0) if isinstance(level, Tensor) else (None, level)
    check(
        device, temperature=(temperature, torch.float32, num_rows), seeds=(seeds, torch.int64, num_rows),
        pos=(pos, torch.int64, num_rows), out_ids=(out_ids, torch.int32, num_rows), level=(level_ptr, torch.int32, 1),
        out_tokens=(out_tokens, torch.int64, num_rows, 1),
    )  # fmt: skip
    assert 0 <= level_value < out_tokens.shape[1], f"level {level_value} of {out_tokens.shape[1]}"
    assert scratch.use_fp64 == noise.use_fp64, "scratch: of another precision"
    if num_rows == 0:
        return lambda logits: None
    if not use_triton(impl, device):
        return on_host(impl, device, "bind_draw")(
            temperature, seeds, pos, noise,
            level=level, out_tokens=out_tokens, out_ids=out_ids, apply_temperature=apply_temperature,
        )  # fmt: skip
    num_blocks = scratch.num_blocks
    constants = {
        "NOISE": noise.function, "USE_FP64": noise.use_fp64, "APPLY_TEMPERATURE": apply_temperature, "BLOCK": BLOCK
    }  # fmt: skip
    chosen_args = (
        scratch.best, scratch.best_ids, out_tokens, out_tokens.stride(0), out_ids, level_ptr, num_blocks, level_value
    )  # fmt: skip
    chosen_constants = {"BLOCK": triton.next_power_of_2(num_blocks)}

    def run(logits: Tensor) -> None:
        args: tuple[Any, ...] = (
            logits, logits.stride(0), temperature, seeds, pos, scratch.best, scratch.best_ids, logits.shape[1],
            noise.salt,
        )  # fmt: skip
        key = (*logits_key(logits, apply_temperature), noise)
        launch(_draw_kernel, (num_rows, num_blocks), device, args, constants, scratch.plans, key)
        launch(
            _choose_draw_kernel, (num_rows,), device, chosen_args, chosen_constants, scratch.plans, level_ptr is None
        )  # fmt: skip

    return run


def draw_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, noise: Noise, *, level: int | Tensor,
    out_tokens: Tensor, out_ids: Tensor, apply_temperature: bool = True,
) -> None:  # fmt: skip
    """Do what `draw` does, in numpy and torch: the specification. Same arguments.

    Logits with noise are read back from a GPU.
    """
    noisy, scores = scores_reference(logits, temperature, seeds, pos, noise, apply_temperature)
    num_rows = logits.shape[0]
    # Of a greedy row the argmax as it is: no copy in another precision.
    tokens = logits.argmax(dim=1) if len(noisy) < num_rows else torch.empty_like(pos[:num_rows])
    if len(noisy):
        tokens[torch.from_numpy(noisy).to(tokens.device)] = torch.from_numpy(scores.argmax(axis=1)).to(tokens.device)
    out_tokens[:num_rows, int(level)] = tokens
    out_ids[:num_rows] = tokens
