"""Measure what drafts lose by ignoring a sampling parameter that the target applies, on the bundled pairs.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_draft_parameters [--videos 24] [--max-tokens 80] [--cases top-p]

A draft under a temperature and noise alone is one CUDA graph; one whose logits vLLM processes (penalties, top-k, top-p,
min-p) is a graph a level, with launches between. So a parameter should be processed where that raises acceptance,
and not otherwise. Both variants take turns in one engine (chains of 5, uniform pruning to a tenth): the mean number of
tokens a verify step, processed and ignored. The text is the target's in both.
"""

import argparse
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks import harness
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.tools import pairs

CASES: dict[str, dict[str, float]] = {
    "T 0": {"temperature": 0.0},
    "T 0, repetition 1.05": {"temperature": 0.0, "repetition_penalty": 1.05},
    "T 0, repetition 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "T 0, repetition 1.2": {"temperature": 0.0, "repetition_penalty": 1.2},
    "T 0.7, repetition 1.05": {"temperature": 0.7, "repetition_penalty": 1.05},
    "T 1, presence 0.6, frequency 0.4": {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "T 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "T 0.7, top-p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "T 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "T 1, top-k 1": {"temperature": 1.0, "top_k": 1},
    "T 0.7, top-k 20": {"temperature": 0.7, "top_k": 20},
    "T 1, top-k 5": {"temperature": 1.0, "top_k": 5},
    "T 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def always(self: CoupledSampler, rows_np: Any) -> bool:
    """Process whatever vLLM flags."""
    return bool(self._sampler.needs_logits_processing[rows_np].any())


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    from vllm import SamplingParams

    for family in pairs.FAMILIES:
        with harness.pair(family, pruner="uniform", prune_ratio=0.9, num_speculative_tokens=5) as engine:
            prompts = harness.videos(family, range(options.videos))
            for name in filter(re.compile(options.cases).search, CASES):
                row: harness.Row = {"family": family, "case": name}
                for way, needs in (("processed", always), ("ignored", lambda self, rows_np: False)):
                    params = [
                        SamplingParams(seed=i, max_tokens=options.max_tokens, **CASES[name])
                        for i in range(options.videos)
                    ]
                    with mock.patch.object(CoupledSampler, "needs_processors", needs):
                        _, gained = engine.measure(engine.llm.generate, prompts, params, use_tqdm=False)
                    row[way] = round(1 + gained["accepted_tokens"] / gained["drafts"], 3)
                yield row | {"lost": round(1 - row["ignored"] / row["processed"], 4)}


if __name__ == "__main__":
    harness.command(__doc__, measure, videos=24, max_tokens=80, cases="")
