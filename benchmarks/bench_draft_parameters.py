"""Measure what drafts lose by ignoring a sampling parameter that the target applies, on the bundled pairs.

    OMP_NUM_THREADS=1 python benchmarks/bench_draft_parameters.py [--videos 24] [--max-tokens 80] [--cases top-p]

A draft under a temperature and noise alone is one CUDA graph; one whose logits vLLM processes (penalties, top-k, top-p,
min-p) is a graph a level, with launches between. So a parameter should be processed where drafts stand more often for
it, and no further. Both ways take turns in one engine (chains of 5, uniform pruning to a tenth): the mean number of
tokens a verify step, processed and ignored. The text is the target's either way.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_vidspec import metrics
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

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


def needs_always(self: CoupledSampler, rows_np: Any) -> bool:
    """Process whatever vLLM flags."""
    return bool(self._sampler.needs_logits_processing[rows_np].any())


def measure(family: str, num_videos: int, max_tokens: int, cases: str = "") -> list[dict[str, Any]]:
    """Return a row for each case, of one engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(**pairs.llm_kwargs(family, "draft", pruner="uniform", prune_ratio=0.9, num_speculative_tokens=5))
    path = metrics.path_for(llm.llm_engine.vllm_config.instance_id)
    prompts = [pairs.video_prompt(family, world.held_out(i).frames) for i in range(num_videos)]
    rows = []
    for name, case in CASES.items():
        if not re.search(cases, name):
            continue
        row: dict[str, Any] = {"family": family, "case": name}
        for way, needs in (("processed", needs_always), ("ignored", lambda self, rows_np: False)):
            before = metrics.read_metrics(path)
            params = [SamplingParams(seed=i, max_tokens=max_tokens, **case) for i in range(num_videos)]
            with mock.patch.object(CoupledSampler, "needs_processors", needs):
                llm.generate(prompts, params, use_tqdm=False)
            gained = metrics.difference(before, metrics.read_metrics(path))
            row[way] = round(1 + gained["accepted_tokens"] / gained["drafts"], 3)
        row["lost"] = round(1 - row["ignored"] / row["processed"], 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    llm.llm_engine.engine_core.shutdown()
    return rows


def main() -> int:
    """Run the cases on both families."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--cases", default="", help="a regular expression")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = (options.videos, options.max_tokens, options.cases)
    rows = [row for family in pairs.FAMILIES for row in measure(family, *asked)]
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
