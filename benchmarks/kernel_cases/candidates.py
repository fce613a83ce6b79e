"""candidates: the ten best tokens of every place of a level and their log-probabilities, from bfloat16 logits."""

from typing import Any

import torch
from bench_kernels import DEVICE, Case, against_reference
from compile_cases import sampling

from vidspec_kernels import SampleScratch, candidates

AXES: dict[str, list[Any]] = {"temperature": [0.0, 0.8], "num_reqs": [1, 8], "vocab_size": [152_064], "width": [5]}
TINY = {"temperature": [0.0, 0.8], "num_reqs": [3], "vocab_size": [300], "width": [5]}
ROUNDS = 20
NUM_CANDIDATES = 10


def case(temperature: float, num_reqs: int, vocab_size: int, width: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    num_rows = num_reqs * width
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(DEVICE, torch.bfloat16)
    heat = torch.full((num_reqs,), temperature, device=DEVICE)
    seeds, pos = (torch.randint(0, 2**40, (size,), generator=generator).to(DEVICE) for size in (num_reqs, num_rows))
    vectors = (heat, seeds, pos, sampling())
    arguments: dict[str, Any] = {
        "log_probs": torch.zeros(num_rows, NUM_CANDIDATES, device=DEVICE),
        "ids": torch.zeros(num_rows, NUM_CANDIDATES, dtype=torch.int64, device=DEVICE),
        "scratch": SampleScratch(num_rows, vocab_size, DEVICE, NUM_CANDIDATES),
        "width": width,
    }
    return Case(
        against_reference(lambda impl: lambda: candidates(logits, *vectors, **arguments, impl=impl)),
        logits.numel() * logits.element_size(),
    )
