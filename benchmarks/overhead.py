"""What the benchmarks of an overhead share: a prompt of a given length, an engine that takes it whole, turns, rows."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_vidspec import metrics
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


class Engine:
    """An engine for one request of at most `longest` tokens, all of them in one step."""

    def __init__(self, longest: int, **spec: Any) -> None:
        from vllm import LLM

        overrides = {
            "max_model_len": longest,
            "max_num_batched_tokens": longest,
            "max_num_seqs": 1,
            "hf_overrides": {"text_config": {"max_position_embeddings": longest}},
            "limit_mm_per_prompt": {"video": 1, "image": 0},
            "kv_cache_memory_bytes": 2**30,
        }
        self.llm = LLM(**pairs.llm_kwargs(FAMILY, "draft", overrides=overrides, **spec))
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def seconds_inside(self, counter: str, prompt: dict[str, Any], **sampling: Any) -> float:
        """Answer a prompt greedily; return what a counter of microseconds gained meanwhile, in seconds."""
        from vllm import SamplingParams

        path = metrics.path_for(self.llm.llm_engine.vllm_config.instance_id)
        before = metrics.read_metrics(path)[counter]
        self.llm.generate([prompt], SamplingParams(temperature=0, **sampling), use_tqdm=False)
        return (metrics.read_metrics(path)[counter] - before) / 1e6

    def close(self) -> None:
        """Take the engine down."""
        self.llm.llm_engine.engine_core.shutdown()


def in_turns(run: Callable[[bool], tuple[float, float]], rounds: int, name: str, name_with: str) -> dict[str, Any]:
    """Run without and with what is measured, in turns, and return medians and shares.

    Args:
        run: Whether with it -> seconds, and those inside it.
        rounds: Of both.
        name: Of the time without, and `name_with` of that with it.
    """
    run(True)  # what happens once
    without, with_, inside = [], [], []
    for _ in range(rounds):
        without.append(run(False)[0])
        seconds, heard = run(True)
        with_.append(seconds)
        inside.append(heard)
    shares = [(b - a) / a for a, b in zip(without, with_, strict=True)]
    return {
        name: round(1e3 * statistics.median(without), 2),
        name_with: round(1e3 * statistics.median(with_), 2),
        "inside_ms": round(1e3 * statistics.median(inside), 3),
        "share": round(statistics.median(shares), 4),
        "share_min": round(min(shares), 4),
        "share_max": round(max(shares), 4),
        "inside_share": round(statistics.median(i / a for i, a in zip(inside, without, strict=True)), 4),
        "rounds": rounds,
    }


def main(
    doc: str | None,
    measure: Callable[[argparse.Namespace, list[int]], Iterable[dict[str, Any]]],
    rounds: int,
    **defaults: str,
) -> int:
    """Run a benchmark: its rows as they come, and all of them with provenance into `--json`.

    Args:
        doc: Of the benchmark.
        measure: Options and sizes -> rows.
        rounds: By default.
        defaults: Of its own options.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--tokens", default="128,1024,8192,25088")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for row in measure(options, [int(size) for size in options.tokens.split(",")]):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return 0
