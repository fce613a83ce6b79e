"""Measure what relevance adds to a decode step, in the engine, at 128 to 25,000 video tokens.

python benchmarks/bench_relevance_overhead.py [--tokens 128,1024,8192,25088] [--rounds 5]

The bundled LLaVA-OneVision pair answers about one video of that many tokens, 10 drafts a step. Strict requests and
loose ones with lambda 0 and no shift take turns in one engine: the tokens, and so the steps, are the same, but the
latter measure relevance and walk by rules. A step is the target's forward, verification and the next drafts; `share` is
the median over the rounds of (with - without) / without, `inside_share` the time inside the relevance calls alone. The
model is tiny and its hidden states are 4 bytes an element: for what is to be read per step see `store_bytes`, beside
which a large target reads tens of gigabytes of weights.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_guidance_overhead import FAMILY, prompt_of

from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

NUM_DRAFTS = 10
MAX_TOKENS = 64


class Steps:
    """Times the runner's decode steps."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.seconds: list[float] = []
        execute, sample = runner.execute_model, runner.sample_tokens

        def timed_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.is_decode = 1 < scheduler_output.total_num_scheduled_tokens <= NUM_DRAFTS + 1
            self.begin = time.perf_counter()
            return execute(scheduler_output, *args, **kwargs)

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if self.is_decode:
                self.seconds.append(time.perf_counter() - self.begin)
            return output

        runner.execute_model, runner.sample_tokens = timed_execute, timed_sample

    def run(self, prompt: dict[str, Any], scorer: str) -> tuple[float, float]:
        """Return the median seconds of a decode step, and the mean inside the relevance calls."""
        from vllm import SamplingParams

        from vllm_vidspec import metrics

        self.seconds.clear()
        path = metrics.path_for(self.llm.llm_engine.vllm_config.instance_id)
        before = metrics.read_metrics(path)["relevance_us"]
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0, extra_args={"vidspec_scorer": scorer}
        )
        self.llm.generate([prompt], sampling, use_tqdm=False)
        inside = (metrics.read_metrics(path)["relevance_us"] - before) / 1e6
        return statistics.median(self.seconds), inside / len(self.seconds)


def measure(size: int, rounds: int) -> dict[str, Any]:
    """Load one engine and return the row of one size."""
    from vllm import LLM

    longest = size + 64 + MAX_TOKENS
    llm = LLM(
        **pairs.llm_kwargs(
            FAMILY,
            "draft",
            scorer="loose",
            lambda_loose=0.0,
            position_shift=False,
            num_speculative_tokens=NUM_DRAFTS,
            relevance_bytes=2**27,
            overrides={
                "max_model_len": longest,
                "max_num_batched_tokens": longest,
                "max_num_seqs": 1,
                "hf_overrides": {"text_config": {"max_position_embeddings": longest}},
                "limit_mm_per_prompt": {"video": 1, "image": 0},
                "kv_cache_memory_bytes": 2**30,
            },
        )
    )
    steps, prompt = Steps(llm), prompt_of(size)
    steps.run(prompt, "loose")  # what happens once
    without, with_, inside = [], [], []
    for _ in range(rounds):
        without.append(steps.run(prompt, "strict")[0])
        seconds, heard = steps.run(prompt, "loose")
        with_.append(seconds)
        inside.append(heard)
    shares = [(b - a) / a for a, b in zip(without, with_, strict=True)]
    visual = steps.llm.llm_engine.model_executor.driver_worker.worker.model_runner.parts.visual
    row = {
        "video_tokens": size,
        "step_ms": round(1e3 * statistics.median(without), 2),
        "loose_step_ms": round(1e3 * statistics.median(with_), 2),
        "inside_ms": round(1e3 * statistics.median(inside), 3),
        "share": round(statistics.median(shares), 4),
        "share_min": round(min(shares), 4),
        "share_max": round(max(shares), 4),
        "inside_share": round(statistics.median(i / a for i, a in zip(inside, without, strict=True)), 4),
        "store_bytes": size * visual.store.pool.shape[2] * visual.store.pool.element_size(),
        "rounds": rounds,
    }
    print(json.dumps(row), flush=True)
    llm.llm_engine.engine_core.shutdown()
    return row


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,1024,8192,25088")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(int(size), options.rounds) for size in options.tokens.split(",")]
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
