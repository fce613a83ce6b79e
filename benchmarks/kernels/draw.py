"""draw: one token of every request from bfloat16 logits, greedy or with noise of vLLM's weight."""

from typing import Any

import torch

from benchmarks.kernels.launches import sampling
from benchmarks.kernels.timing import DEVICE, IMPL, Case
from vidspec_kernels import SampleScratch, draw

AXES: dict[str, list[Any]] = {"temperature": [0.0, 0.8], "num_reqs": [1, 8], "vocab_size": [152_064]}
TINY = {"temperature": [0.0, 0.8], "num_reqs": [3], "vocab_size": [300]}
ROUNDS = 50


def inputs(temperature: float, num_reqs: int, num_rows: int, vocab_size: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return logits, and what they are sampled with."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(DEVICE, torch.bfloat16)
    heat = torch.full((num_reqs,), temperature, device=DEVICE)
    seeds, pos = (torch.randint(0, 2**40, (size,), generator=generator).to(DEVICE) for size in (num_reqs, num_rows))
    return logits, (heat, seeds, pos, sampling())


def case(temperature: float, num_reqs: int, vocab_size: int) -> Case:
    logits, vectors = inputs(temperature, num_reqs, num_reqs, vocab_size)
    arguments: dict[str, Any] = {
        "out_tokens": torch.zeros(num_reqs, 5, dtype=torch.int64, device=DEVICE),
        "out_ids": torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE),
        "scratch": SampleScratch(num_reqs, vocab_size, DEVICE),
    }
    calls = {IMPL: lambda: draw(logits, *vectors, level=1, **arguments, impl=IMPL)}
    return Case(calls, logits.nbytes)
