"""candidates: the ten best tokens of every place of a level and their log-probabilities, from bfloat16 logits."""

from typing import Any

import torch

from benchmarks.kernels.draw import inputs
from benchmarks.kernels.timing import DEVICE, IMPL, Case
from vidspec_kernels import SampleScratch, candidates

AXES: dict[str, list[Any]] = {"temperature": [0.0, 0.8], "num_reqs": [1, 8], "vocab_size": [152_064], "width": [5]}
TINY = {"temperature": [0.0, 0.8], "num_reqs": [3], "vocab_size": [300], "width": [5]}
ROUNDS = 20
NUM_CANDIDATES = 10


def case(temperature: float, num_reqs: int, vocab_size: int, width: int) -> Case:
    num_rows = num_reqs * width
    logits, vectors = inputs(temperature, num_reqs, num_rows, vocab_size)
    arguments: dict[str, Any] = {
        "log_probs": torch.zeros(num_rows, NUM_CANDIDATES, device=DEVICE),
        "ids": torch.zeros(num_rows, NUM_CANDIDATES, dtype=torch.int64, device=DEVICE),
        "scratch": SampleScratch(num_rows, vocab_size, DEVICE, NUM_CANDIDATES),
        "width": width,
    }
    calls = {IMPL: lambda: candidates(logits, *vectors, **arguments, impl=IMPL)}
    return Case(calls, logits.nbytes)
