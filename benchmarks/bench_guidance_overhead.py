"""Measure what guidance adds to the target's prefill, in the engine, at 128 to 25,000 video tokens.

python benchmarks/bench_guidance_overhead.py [--pruner specvlm,uv] [--tokens 128,1024,8192,25088] [--rounds 3]

The bundled LLaVA-OneVision target (16 tokens a frame) prefills one video of that many tokens and the usual question, in
one chunk: vision tower and language model. Prefills with and without the listeners take turns in one engine; `share` is
the median of (with - without) / without over the rounds, `inside_share` the time that our own clock saw inside the
listeners. Only the target's forward is timed, not the draft's. The same model at every length: its attention is a small
part of a step, so the share here is an upper bound of the kind, not a prediction for a large model.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

FAMILY = "llava-onevision"
TOKENS_PER_FRAME = 16


def prompt_of(num_video_tokens: int) -> dict[str, Any]:
    """Return a prompt with held-out videos in a row, `num_video_tokens` tokens of them and the newline."""
    num_frames = num_video_tokens // TOKENS_PER_FRAME
    videos = [world.held_out(i).frames for i in range(-(-num_frames // world.NUM_FRAMES))]
    frames = np.concatenate(videos)[:num_frames]
    text = pairs.chat_prompt(FAMILY, pairs.DEFAULT_QUESTION, ["video"])
    return {"prompt": text, "multi_modal_data": {"video": [frames]}}


class Prefill:
    """Times the runner's forward, with the listeners in place or taken out."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.listeners = self.runner.listeners
        self.guarded = self.listeners._guarded
        self.seconds: list[float] = []
        execute = self.runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            output = execute(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens > 8:
                self.seconds.append(time.perf_counter() - begin)
            return output

        self.runner.execute_model = timed

    def run(self, prompt: dict[str, Any], listens: bool) -> tuple[float, float]:
        """Return the seconds of one prefill, and those inside the listeners."""
        from vllm import SamplingParams

        from vllm_vidspec import metrics

        self.listeners._guarded = self.guarded if listens else []
        self.llm.reset_prefix_cache()
        self.seconds.clear()
        path = metrics.path_for(self.llm.llm_engine.vllm_config.instance_id)
        before = metrics.read_metrics(path)["guidance_us"]
        self.llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        return sum(self.seconds), (metrics.read_metrics(path)["guidance_us"] - before) / 1e6


def measure(pruner: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Load one engine and return a row per size."""
    from vllm import LLM

    longest = max(sizes) + 64
    llm = LLM(
        **pairs.llm_kwargs(
            FAMILY,
            "draft",
            pruner=pruner,
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
    prefill, rows = Prefill(llm), []
    for size in sizes:
        prompt = prompt_of(size)
        prefill.run(prompt, listens=True)  # what happens once
        without, with_, inside = [], [], []
        for _ in range(rounds):
            without.append(prefill.run(prompt, listens=False)[0])
            seconds, heard = prefill.run(prompt, listens=True)
            with_.append(seconds)
            inside.append(heard)
        shares = [(b - a) / a for a, b in zip(without, with_, strict=True)]
        rows.append(
            {
                "pruner": pruner,
                "video_tokens": size,
                "prefill_ms": round(1e3 * statistics.median(without), 2),
                "guided_prefill_ms": round(1e3 * statistics.median(with_), 2),
                "inside_ms": round(1e3 * statistics.median(inside), 3),
                "share": round(statistics.median(shares), 4),
                "share_min": round(min(shares), 4),
                "share_max": round(max(shares), 4),
                "inside_share": round(statistics.median(i / a for i, a in zip(inside, without, strict=True)), 4),
                "rounds": rounds,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    llm.llm_engine.engine_core.shutdown()
    return rows


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pruner", default="specvlm,uv")
    parser.add_argument("--tokens", default="128,1024,8192,25088")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    for pruner in options.pruner.split(","):
        rows += measure(pruner, sizes, options.rounds)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
