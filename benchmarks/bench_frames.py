"""Measure what frames sent as images cost and bring a draft, beside the same frames as a video, on the bundled pairs.

    OMP_NUM_THREADS=1 python benchmarks/bench_frames.py [--clips 6] [--frames 64] [--json docs/results/R15-frames.json]

Clients that cannot send a video send its frames as images (lmms-eval up to 64). Three variants of the
same frames, 5-token chains, greedy: the video; its images, joined (`frames_as_video` auto); its images, each with a
budget of its own (never).
A clip is held-out videos of 32 frames, one after another. Vanilla runs beside, so that identical answers are counted.
All are means over the clips.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np

from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs

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
        return [harness.clip_prompt(family, clip) for clip in clips]
    return [pairs.media_prompt(family, pairs.DEFAULT_QUESTION, images=list(clip)) for clip in clips]


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Yield a row for each family and variant, each with an engine of its own, beside vanilla's answers."""
    per_clip = -(-options.frames // world.NUM_FRAMES)
    videos = [world.held_out(i).frames for i in range(options.clips * per_clip)]
    clips = [np.concatenate(videos[i : i + per_clip])[: options.frames] for i in range(0, len(videos), per_clip)]
    limits = {"limit_mm_per_prompt": {"video": 1, "image": options.frames}, "max_num_batched_tokens": 2048}
    for family in options.families:
        prompts = {way: prompts_of(family, way, clips) for way in WAYS}
        with harness.Engine(pairs.llm_kwargs(family, overrides=limits)) as vanilla:
            expected = {
                way: vanilla.answer(prompts[way], max_tokens=options.max_tokens) for way in ("video", "images, joined")
            }
        for way, knobs in WAYS.items():
            spec = {"pruner": "specvlm", "prune_ratio": PRUNE_RATIO, **knobs}
            with harness.pair(family, overrides=limits, **spec) as engine:
                found, gained = engine.measure(engine.answer, prompts[way], max_tokens=options.max_tokens)
                kv_bytes = engine.counters()["draft_kv_bytes_per_token"]
            tokens = gained["text_tokens"] + gained["visual_tokens_kept"]
            wanted = expected.get(way, expected["images, joined"])
            yield {
                "family": family,
                "way": way,
                "target_visual_tokens": gained["visual_tokens_full"] / gained["prompts"],
                "draft_visual_tokens": gained["visual_tokens_kept"] / gained["prompts"],
                "draft_kv_bytes": tokens * kv_bytes / gained["prompts"],
                "acceptance_length": harness.acceptance_length(gained),
                "identical_frac": sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted),
                "output_tokens": sum(map(len, found)),
            }


if __name__ == "__main__":
    harness.command(__doc__, measure, families=list(FAMILIES), clips=6, frames=64, max_tokens=96)
