"""Measure what frames sent as images cost and bring a draft, beside the same frames as a video, on the bundled pairs.

    OMP_NUM_THREADS=1 python benchmarks/bench_frames.py [--clips 6] [--frames 64] [--json docs/results/R15-frames.json]

Clients that cannot send a video send its frames as images (lmms-eval up to 64). Three ways, chains of 5, greedy, the
same frames: the video; its images, joined (`frames_as_video` auto); its images, each with a budget of its own (never).
A clip is held-out videos of 32 frames, one after another. Vanilla runs beside, so that identical answers are counted.
All are means over the clips.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

from vllm_vidspec import metrics
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

PRUNE_RATIO = 0.9
# Families whose processor makes of an image as many tokens as of a frame; LLaVA-OneVision tiles images.
FAMILIES = ("qwen2.5-vl", "qwen3-vl")
WAYS: dict[str, dict[str, Any]] = {
    "video": {},
    "images, joined": {"frames_as_video": "auto"},
    "images, each alone": {"frames_as_video": "never"},
}


def prompts_of(family: str, way: str, clips: list[np.ndarray]) -> list[dict[str, Any]]:
    """Return a prompt for each clip, `[num_frames, height, width, 3]` uint8."""
    if way == "video":
        return [whole_video(family, clip) for clip in clips]
    return [pairs.media_prompt(family, pairs.DEFAULT_QUESTION, images=list(clip)) for clip in clips]


def whole_video(family: str, clip: np.ndarray) -> dict[str, Any]:
    """Return a prompt of a clip with all of its frames: the tools' own sampling would leave some out."""
    times = {"fps": pairs.FRAME_RATE, "total_num_frames": len(clip), "duration": len(clip) / pairs.FRAME_RATE}
    times |= {"frames_indices": list(range(len(clip))), "video_backend": "opencv", "do_sample_frames": False}
    text = pairs.chat_prompt(family, pairs.DEFAULT_QUESTION, ["video"])
    return {"prompt": text, "multi_modal_data": {"video": [(clip, times)]}}


def measure(family: str, clips: list[np.ndarray], max_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each way: an engine each, and vanilla's beside it."""
    from vllm import LLM, SamplingParams

    limits = {"limit_mm_per_prompt": {"video": 1, "image": len(clips[0])}, "max_num_batched_tokens": 2048}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def answers(llm: Any, way: str) -> list[list[int]]:
        outputs = llm.generate(prompts_of(family, way, clips), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    vanilla = LLM(**pairs.llm_kwargs(family, overrides=limits))
    expected = {way: answers(vanilla, way) for way in ("video", "images, joined")}
    vanilla.llm_engine.engine_core.shutdown()
    rows = []
    for way, knobs in WAYS.items():
        spec = {"pruner": "specvlm", "prune_ratio": PRUNE_RATIO, **knobs}
        llm = LLM(**pairs.llm_kwargs(family, "draft", overrides=limits, **spec))
        path = metrics.path_for(llm.llm_engine.vllm_config.instance_id)
        before = metrics.read_metrics(path)
        found = answers(llm, way)
        now = metrics.read_metrics(path)
        llm.llm_engine.engine_core.shutdown()
        rows.append(row_of(family, way, found, expected["video" if way == "video" else "images, joined"], before, now))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def row_of(
    family: str, way: str, found: list, expected: list, before: dict[str, float], now: dict[str, float]
) -> dict[str, Any]:
    """Return what a way came to, from the counters before and after."""
    gained = metrics.difference(before, now)
    tokens = gained["text_tokens"] + gained["visual_tokens_kept"]
    return {
        "family": family,
        "way": way,
        "target_visual_tokens": gained["visual_tokens_full"] / gained["prompts"],
        "draft_visual_tokens": gained["visual_tokens_kept"] / gained["prompts"],
        "draft_kv_bytes": tokens * now["draft_kv_bytes_per_token"] / gained["prompts"],
        "acceptance_length": round(1 + gained["accepted_tokens"] / gained["drafts"], 3),
        "identical_frac": sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected),
        "output_tokens": sum(map(len, found)),
    }


def main() -> int:
    """Run the ways of every family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--clips", type=int, default=6)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    per_clip = -(-options.frames // world.NUM_FRAMES)
    videos = [world.held_out(i).frames for i in range(options.clips * per_clip)]
    parts = [videos[i : i + per_clip] for i in range(0, len(videos), per_clip)]
    clips = [np.concatenate(part)[: options.frames] for part in parts]
    rows = [row for family in options.families for row in measure(family, clips, options.max_tokens)]
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
