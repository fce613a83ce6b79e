"""A video's frames sent as images: the draft is shown what it would be shown of the video, for every pruner."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import watching
from tests.unit.engine.fakes import HIDDEN
from tests.unit.engine.test_draft_prefill import Line, NotingModel, item
from vllm_vidspec.names import PRUNERS
from vllm_vidspec.pruning import PruneInputs, TokenGrid, budget, get_pruner

FRAMES, GRID = 8, TokenGrid(8, 4, 6)  # 24 tokens a frame: the tower's budget of 100 is four frames
SIZE = GRID.tokens_per_frame
GUIDED = ("specvlm", "specvlm:stride", "attention", "uv")
TEXT = 5  # an id; no embedding's first column is an integer


class SeeingModel(NotingModel):
    """A Qwen draft whose tower makes, of the frames that it is to look at, what a feature says they show."""

    hf_config = SimpleNamespace(
        model_type="qwen2_5_vl",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        vision_config=SimpleNamespace(spatial_merge_size=2),
    )

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[range | None] = []  # of each look, in order

    def encode(self, features, frames):
        super().encode(features, frames)
        self.frames += frames
        pairs = [(one.shows, some or range(len(one.shows))) for one, some in zip(features, frames, strict=True)]
        made = [shows[some.start * SIZE : some.stop * SIZE] for shows, some in pairs]
        assert frames == [None] or sum(map(len, made)) <= max(SIZE, self.max_encoder_tokens)
        return made


def measured(seed: int = 0, num_frames: int = FRAMES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores `[m]` and embeddings `[m, HIDDEN]` of all frames; the first column numbers the tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_frames * SIZE, generator=generator) ** 4
    embeddings = torch.randn(num_frames * SIZE, HIDDEN, generator=generator)
    embeddings[:, 0] = (torch.arange(num_frames * SIZE) + 0.5) / 1000
    return scores, embeddings


def shown(modality: str, name: str, offset: int, embeddings: torch.Tensor) -> Any:
    """Return the feature of one image, or of a video, that shows these embeddings `[m, HIDDEN]`."""
    thw = torch.tensor([len(embeddings) // SIZE, 2 * GRID.height, 2 * GRID.width])
    pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
    return item(modality, name, offset, embeddings, **{pixels: None, f"{modality}_grid_thw": thw})


def as_images(embeddings: torch.Tensor, start: int = 3) -> tuple[list[int], list[Any]]:
    """Return ids and features of a prompt of one image a frame, two tokens of text between them."""
    offsets = [start + i * (SIZE + 2) for i in range(len(embeddings) // SIZE)]
    parts = zip(offsets, embeddings.split(SIZE), strict=True)
    features = [shown("image", f"frame {i}", offset, part) for i, (offset, part) in enumerate(parts)]
    return [TEXT] * (offsets[-1] + SIZE + 4), features


def as_video(embeddings: torch.Tensor) -> tuple[list[int], list[Any]]:
    return [TEXT] * (3 + len(embeddings) + 4), [shown("video", "video", 3, embeddings)]


def read(line: Line, row: int, num_tokens: int) -> list[tuple[int, int]]:
    """Let a request be read, over as many steps as it takes; return number and position of its visual tokens."""
    for number in range(20):
        if line.step({row: num_tokens + 1 + number}).ready:
            num_kept = num_tokens - line.counted["visual_tokens_full"] + line.counted["visual_tokens_kept"]
            held = line.kv_of(row, num_kept)
            assert [value for value, _ in held].count(TEXT) == num_tokens - line.counted["visual_tokens_full"]
            return [(int(value * 1000), position) for value, position in held if value != TEXT]
    raise AssertionError("it is never ready")


@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("pruner", PRUNERS)
def test_frames_keep_what_the_video_would(pruner, ratio):
    """8 images, encoded in two steps at least, and the video of them. Catches: scores and embeddings of a run joined in
    reverse; a choice from each image's own, or before the last is there; kept indices counted from another image."""
    scores, embeddings = measured()
    knobs = {"pruner": pruner, "prune_ratio": ratio, "image_prune_ratio": 0.2}
    found = []
    for make, sizes in ((as_images, SIZE), (as_video, len(scores))):
        line = Line(model=SeeingModel(), **knobs)
        token_ids, features = make(embeddings)
        guide = list(scores.split(sizes)) if pruner in GUIDED else None
        assert line.add(0, token_ids, features, guide)
        kept = read(line, 0, len(token_ids))
        starts = [feature.mm_position.offset for feature in features]
        assert [position for _, position in kept] == [starts[i // sizes] + i % sizes for i, _ in kept]
        found.append([i for i, _ in kept])
        expected = len(scores) if pruner == "none" else budget(len(scores), ratio)
        assert (line.counted["visual_tokens_full"], line.counted["visual_tokens_kept"]) == (len(scores), expected)
    chosen = get_pruner(pruner)(PruneInputs(GRID, expected, scores, embeddings, lambda_r=0.4))
    assert found[0] == found[1] == chosen.tolist()


def test_an_image_that_keeps_nothing_is_looked_at_only_to_compare():
    """Of 8 frames 19 tokens stay: `frame` takes them from one, `fastvid` from two or three, but must see all."""
    _, embeddings = measured()
    for pruner, looks in (("frame", 1), ("fastvid", FRAMES)):
        line = Line(model=SeeingModel(), pruner=pruner)
        line.prefills._knobs.retune({"prune_ratio": 0.9})
        token_ids, features = as_images(embeddings)
        assert line.add(0, token_ids, features)
        assert len(read(line, 0, len(token_ids))) == 19
        assert sum(map(len, line.model.encoded)) == looks
        assert line.counted["draft_encoder_misses"] == looks


@pytest.mark.parametrize("pruner", ["attention", "fastvid"])
def test_equal_frames_are_looked_at_once_and_kept_apart(pruner):
    """A still scene: all 8 images are one by content, looked at once, and found again in the next turn."""
    scores, embeddings = measured()
    still = embeddings[:SIZE].repeat(FRAMES, 1)
    line = Line(cache_bytes=2**16, model=SeeingModel(), pruner=pruner, prune_ratio=0.9)
    token_ids, features = as_images(still)
    for feature in features:
        feature.identifier = feature.mm_hash = "still"
    guide = list(scores.split(SIZE)) if pruner == "attention" else None
    assert line.add(0, token_ids, features, guide)
    kept = read(line, 0, len(token_ids))
    inputs = PruneInputs(GRID, 19, scores, still)
    chosen = get_pruner(pruner)(inputs).tolist()
    starts = [feature.mm_position.offset for feature in features]
    assert kept == [(i % SIZE, starts[i // SIZE] + i % SIZE) for i in chosen]
    assert line.model.encoded == [["still"]]
    assert line.add(1, token_ids, features, guide)
    line.counted.update(visual_tokens_full=FRAMES * SIZE, visual_tokens_kept=19)  # of this request
    assert read(line, 1, len(token_ids)) == kept and line.model.encoded == [["still"]]


@pytest.mark.parametrize("pruner", ["attention", "fastvid"])
def test_a_run_beside_a_video_and_a_lone_image(pruner):
    """Much text between them: three budgets, each choice from its own measurements, one record of three."""
    scores, embeddings = measured(1, num_frames=4 + 1 + FRAMES)
    sizes = [4 * SIZE, SIZE, FRAMES * SIZE]
    video, image, run = embeddings.split(sizes)
    features = [shown("video", "video", 2, video), shown("image", "image", 200, image)]
    token_ids, frames = as_images(run, start=300)
    knobs = {"prune_ratio": 0.9, "image_prune_ratio": 0.5}
    line = Line(model=SeeingModel(), pruner=pruner, **knobs)
    guide = list(scores.split([*sizes[:2], *[SIZE] * FRAMES])) if pruner == "attention" else None
    watching.prompts_of(line.prefills.observers, True)
    assert line.add(0, token_ids, features + frames, guide)
    kept = [number for number, _ in read(line, 0, len(token_ids))]
    grids = [TokenGrid(4, 4, 6), TokenGrid(1, 4, 6), GRID]
    expected = []
    for grid, num_keep, score, embeds in zip(
        grids, (9, 12, 19), scores.split(sizes), embeddings.split(sizes), strict=True
    ):
        expected.append(get_pruner(pruner)(PruneInputs(grid, num_keep, score, embeds)))
    assert kept == torch.cat([part + start for part, start in zip(expected, (0, 96, 120), strict=True)]).tolist()
    (record,) = watching.prompts_of(line.prefills.observers, False)
    assert list(record["grids"]) == grids
    assert all(torch.equal(*pair) for pair in zip(record["kept_indices"], expected, strict=True))
    name, whole = ("scores", scores) if pruner == "attention" else ("embeddings", embeddings)
    assert [len(part) for part in record[name]] == sizes and torch.equal(torch.cat(record[name]), whole)
    assert record["embeddings" if name == "scores" else "scores"] is None
