"""What `draw` and `candidates` share: the noise that a caller brings, scores of a block of logits, scratch memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that one program looks at.
BLOCK = 1024
MAX_CANDIDATES = 64
_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Noise:
    """Noise that makes the argmax of logits / temperature + noise a sample: a function of seed, position and token."""

    # Jitted, (scores [BLOCK] float32, token ids [BLOCK], seed, position, use_fp64 constexpr) -> the scores with their
    # noise, float64 on request.
    function: Any
    # The same in numpy: (seeds [n] int64, positions [n] int64, token ids [V] uint32, use_fp64) -> noise [n, V].
    reference: Callable[[np.ndarray, np.ndarray, np.ndarray, bool], np.ndarray]
    salt: int = 0  # Added to positions
    use_fp64: bool = False  # Whether `draw` compares in float64


class SampleScratch:
    """Partial results of `draw` and `candidates`; calls that follow each other may share it.

    Args:
        max_rows: Most rows of logits of a call.
        vocab_size: Logits of a row.
        device: Where it lives.
        num_candidates: Most candidates of a row; 0: for `draw` alone.
        use_fp64: See `Noise`.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, num_candidates: int = 0, use_fp64: bool = False
    ):
        assert num_candidates <= MAX_CANDIDATES, f"at most {MAX_CANDIDATES} candidates, got {num_candidates}"
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, device
        self.num_candidates, self.use_fp64, self.num_blocks = num_candidates, use_fp64, triton.cdiv(vocab_size, BLOCK)
        shape = (max_rows, self.num_blocks)
        self.best = torch.empty(shape, dtype=torch.float64 if use_fp64 else torch.float32, device=device)
        self.best_ids = torch.empty(shape, dtype=torch.int64, device=device)
        # [max_rows, num_blocks] each block's maximum and the sum of its exponentials, and its best keys
        self.maxima = torch.empty(shape if num_candidates else (0, 0), dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.maxima)
        self.plans: dict[Any, Any] = {}  # of launches that write these (see `dispatch.launch`)
        self.ready: dict[Any, Any] = {}  # calls of `candidates` and `draw` (see `dispatch.remember`)
        self.keys = torch.empty(*self.maxima.shape, 2 ** log_top(num_candidates), dtype=torch.int64, device=device)

    def as_meta(self) -> "SampleScratch":
        return SampleScratch(
            self.max_rows, self.vocab_size, torch.device("meta"), self.num_candidates, self.use_fp64
        )  # fmt: skip


def log_top(num_candidates: int) -> int:
    """Return the logarithm of how many keys a block keeps for so many candidates."""
    return max(num_candidates - 1, 1).bit_length()


def logits_key(logits: Tensor, apply_temperature: bool) -> tuple[Any, ...]:
    """Return what the variant of a kernel that reads logits depends on, beside its scratch memory and noise."""
    return logits.dtype, logits.stride(0), logits.data_ptr() % 16, apply_temperature


@triton.jit
def noised_scores(
    logits_ptr, token_ids, mask, temperature, seed, pos,
    NOISE: tl.constexpr, USE_FP64: tl.constexpr, APPLY_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Return logits / temperature + noise of a block of tokens, the logits where the temperature is 0; -inf outside.

    In the order of vLLM's sampler, so that the same function of noise gives the same bits.
    """
    scores = tl.load(logits_ptr + token_ids, mask=mask, other=-float("inf")).to(tl.float32)
    if APPLY_TEMPERATURE and temperature != 0.0:
        scores = scores / temperature
    if USE_FP64:
        scores = scores.to(tl.float64)
    if temperature != 0.0:
        scores = NOISE(scores, token_ids, seed, pos, USE_FP64)
    return scores


def check_logits(logits: Tensor, scratch: SampleScratch) -> None:
    """Assert that logits `[n, V]` are what the kernels read, and that the scratch memory is theirs."""
    assert logits.dtype in _LOGITS_DTYPES and logits.ndim == 2, f"logits: {logits.dtype} {list(logits.shape)}"
    assert logits.stride(1) == 1 or logits.shape[1] <= 1, "logits: expected unit stride in a row"
    assert scratch.vocab_size == logits.shape[1] and scratch.device.type == logits.device.type, "scratch: other logits"
    assert logits.shape[0] <= scratch.max_rows, f"scratch: {logits.shape[0]} rows, room for {scratch.max_rows}"


def scores_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, noise: Noise, apply_temperature: bool,
    req_idx: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return which rows of logits `[n, V]` have noise, and those rows' scores: the specification of `noised_scores`.

    Args:
        logits: float [n, V].
        temperature: float32 by request.
        seeds: int64 by request.
        pos: int64 [>= n].
        noise: What is added.
        apply_temperature: Whether the logits are still to be divided by the temperature.
        req_idx: [n] request of each row; None: each is one.
    """
    requests = slice(0, len(logits)) if req_idx is None else req_idx
    temperatures = temperature.cpu().numpy()[requests]
    noisy = np.flatnonzero(temperatures)
    if not len(noisy):
        return noisy, np.empty((0, logits.shape[1]), dtype=np.float32)
    rows = logits if len(noisy) == len(logits) else logits[torch.from_numpy(noisy).to(logits.device)]
    scores = rows.float().cpu().numpy()
    if apply_temperature:
        scores = scores / temperatures[noisy, None]
    token_ids = np.arange(logits.shape[1], dtype=np.uint32)
    positions = pos.cpu().numpy()[noisy] + noise.salt
    added = noise.reference(seeds.cpu().numpy()[requests][noisy], positions, token_ids, noise.use_fp64)
    return noisy, scores + added
