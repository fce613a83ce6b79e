"""A video's frames sent as images, through a running engine: answers are vanilla's, budgets and choices a video's."""

from typing import Any

import pytest
import torch

from tests.engine import harness
from tests.engine.harness import NO_CACHE, QWEN
from vllm_vidspec.pruning import PruneInputs, TokenGrid, budget, get_pruner
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

FRAMES = 16
LIMITS = {"limit_mm_per_prompt": {"video": 1, "image": FRAMES}, **NO_CACHE}
PER_FRAME = world.GRID_SIZE**2
RATIO, IMAGE_RATIO = 0.9, 0.8


def clips() -> list[Any]:
    """Return 16 frames of each of two held-out videos."""
    return [frames[::2] for frames in harness.shown(2)]


def as_images() -> list[tuple[dict, dict]]:
    prompts = [pairs.media_prompt(QWEN, pairs.DEFAULT_QUESTION, images=list(frames)) for frames in clips()]
    return list(zip(prompts, ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}), strict=True))


def as_videos() -> list[tuple[dict, dict]]:
    return [(pairs.video_prompt(QWEN, frames), {"temperature": 0.0}) for frames in clips()]


@pytest.fixture(scope="module")
def vanilla():
    """Vanilla vLLM's answers to the images and to the videos."""
    with harness.engine(QWEN, overrides=LIMITS) as engine:
        return engine.generate(as_images()), engine.generate(as_videos())


@pytest.mark.parametrize("pruner", ["specvlm", "fastvid", pytest.param("uniform", marks=pytest.mark.slow)])
def test_frames_are_pruned_as_the_video_they_are(vanilla, pruner):
    """Two prompts of 16 images in one batch, two videos, then the images one by one (`never`), in one engine.

    Catches: answers that change with what the draft sees, a budget by image, scores or embeddings of images that are
    joined in another order, a run whose images the tower never finishes, a knob that needs a new engine.
    """
    with harness.engine(
        QWEN, "draft", pruner=pruner, prune_ratio=RATIO, image_prune_ratio=IMAGE_RATIO, overrides=LIMITS
    ) as engine:
        with engine.watched() as records:
            images, of_images = engine.measured(as_images())
        videos, of_videos = engine.measured(as_videos())
        with engine.retuned(frames_as_video="never"):
            alone, of_alone = engine.measured(as_images())
        again, of_again = engine.measured(as_images())
        prune = engine.config.prune
    for got, expected in ((images, vanilla[0]), (videos, vanilla[1]), (alone, vanilla[0]), (again, vanilla[0])):
        harness.assert_same_answers(expected, got)
    full = FRAMES * PER_FRAME
    for counted, num_tokens, kept in (
        (of_images, full, budget(full, RATIO)),
        (of_videos, full // 2, budget(full // 2, RATIO)),  # two frames of a video are one of its grid
        (of_alone, full, FRAMES * budget(PER_FRAME, IMAGE_RATIO)),
        (of_again, full, budget(full, RATIO)),
    ):
        assert counted["prompts"] == 2 and counted["draft_tokens"] > 0 and not harness.skipped(counted)
        assert (counted["visual_tokens_full"], counted["visual_tokens_kept"]) == (2 * num_tokens, 2 * kept)
        assert counted["guided_prompts"] == (2 if pruner == "specvlm" else 0)
    grid = TokenGrid(FRAMES, world.GRID_SIZE, world.GRID_SIZE)
    assert [record["grids"] for record in records] == [(grid,)] * 2
    for record in records:
        scores, embeddings = (record[name] and record[name][0] for name in ("scores", "embeddings"))
        inputs = PruneInputs(grid, budget(full, RATIO), scores, embeddings, prune.lambda_r, prune.seed)
        assert torch.equal(record["kept_indices"][0], get_pruner(pruner)(inputs))
