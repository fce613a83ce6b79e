"""Long videos are encoded some frames a step: nothing comes of it but other steps, and nothing is left of an abort."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.test_draft_prefill import ENCODER_BUDGET, Line
from tests.unit.engine.test_frames import FRAMES, GUIDED, SIZE, TEXT, SeeingModel, as_images, as_video, measured, read
from vllm_vidspec.engine.draft.messages import PrefillMessage
from vllm_vidspec.engine.draft.vision import Part
from vllm_vidspec.pruning import budget

# A step's budget of 100 tokens is four frames of 24: a video of 8 takes two steps.
HALVES = [range(4), range(4, 8)]
ROOM, NO_ROOM = 2**16, 0  # bytes for embeddings: of several videos, of none


def cuttable(embeddings: torch.Tensor, name: str = "video") -> tuple[list[int], list[Any]]:
    """Return ids and features of a prompt of one video, with pixels where its grid says."""
    token_ids, features = as_video(embeddings)
    features[0].identifier = features[0].mm_hash = name
    patches = 4 * len(embeddings)  # of 2 x 2 that are merged
    features[0].data["pixel_values_videos"] = SimpleNamespace(data=torch.zeros(patches, 1))
    return token_ids, features


def line_of(cache_bytes: int = ROOM, **knobs: Any) -> Line:
    return Line(cache_bytes, SeeingModel(), **knobs)


def shown_of(pruner: str, cache_bytes: int) -> tuple[list[range | None], list[tuple[int, int]]]:
    """Return how a video of two steps was looked at, and number and position of the tokens that the draft holds."""
    scores, embeddings = measured()
    line = line_of(cache_bytes, pruner=pruner)
    token_ids, features = cuttable(embeddings)
    assert line.add(0, token_ids, features, [scores] if pruner in GUIDED else None)
    return line.model.frames, read(line, 0, len(token_ids))


@pytest.mark.parametrize("cache_bytes", [ROOM, NO_ROOM])
@pytest.mark.parametrize("pruner", ["specvlm", "uniform", "fastvid", "dycoke", "none"])
def test_frames_of_several_steps_are_what_the_whole_would_be(pruner, cache_bytes, monkeypatch):
    """In the cache and beside one that has no room: the same tokens are kept, in order, at their places."""
    looks, kept = shown_of(pruner, cache_bytes)
    assert looks == HALVES
    monkeypatch.setattr(SeeingModel, "max_encoder_tokens", 10_000)
    assert shown_of(pruner, cache_bytes) == ([None], kept)


def test_two_requests_with_one_video_are_one_look():
    """The second comes when the first half is there; both are shown the same; a third finds it."""
    scores, embeddings = measured()
    line = line_of(pruner="attention", prune_ratio=0.9)
    token_ids, features = cuttable(embeddings)
    length = len(token_ids) + 1
    line.add(0, token_ids, features, [scores])
    line.step({0: length})
    line.add(1, token_ids, features, [scores])
    ready = []
    for i in range(4):
        ready += line.step({row: length + i for row in (0, 1) if row not in ready}).ready
    line.add(2, token_ids, features, [scores])
    ready += line.step({2: length}).ready
    assert ready == [0, 1, 2] and line.model.frames == HALVES
    num_kept = len(token_ids) - FRAMES * SIZE + budget(FRAMES * SIZE, 0.9)
    assert line.kv_of(0, num_kept) == line.kv_of(1, num_kept) == line.kv_of(2, num_kept)
    assert (line.counted["draft_encoder_misses"], line.counted["draft_encoder_hits"]) == (1, 2)


def test_embeddings_that_made_way_are_made_again():
    """A cache of one video, and memory that is lost in the middle. Catches: halves of which one is another's."""
    _, embeddings = measured()
    line = line_of()
    token_ids, features = cuttable(embeddings)
    line.add(0, token_ids, features)
    line.step({0: len(token_ids) + 1})
    line.prefills.vision.cache.clear()
    kept = read(line, 0, len(token_ids))
    assert line.model.frames == [HALVES[0], *HALVES]
    assert kept == shown_of("uniform", ROOM)[1]


def test_who_looks_ahead_goes_on_where_it_was():
    """A drafter encodes half of a video before its scores are known, and the rest once it begins, or nothing."""
    scores, embeddings = measured()
    line = line_of(pruner="attention")
    token_ids, features = cuttable(embeddings)
    message = PrefillMessage("r0", 0, token_ids, features)
    assert line.prefills.encode_ahead(message) and line.model.frames == HALVES[:1]
    assert line.add(0, token_ids, features, [scores])
    assert len(read(line, 0, len(token_ids))) == budget(FRAMES * SIZE, 0.5)
    assert line.model.frames == HALVES
    other, features = cuttable(embeddings, "other")
    cache = line.prefills.vision.cache
    before = cache.num_used_bytes
    assert line.prefills.encode_ahead(PrefillMessage("r1", 1, other, features)) and cache.num_used_bytes > before
    line.prefills.remove(1)
    assert cache.num_used_bytes == before and not cache.unfinished()
    roomless = line_of(NO_ROOM)
    assert not roomless.prefills.encode_ahead(message) and not roomless.model.frames


def test_what_cannot_be_cut_is_encoded_whole_and_counted(monkeypatch):
    """An image, and a video whose pixels are not where its grid says; of frames beyond the budget one a step."""
    _, embeddings = measured(num_frames=6)
    line = line_of()
    token_ids, features = as_images(embeddings[: 5 * SIZE])
    image = features[0]
    image.shows = embeddings[: 5 * SIZE]
    image.mm_position.length = 5 * SIZE
    image.data["image_grid_thw"] = SimpleNamespace(data=torch.tensor([1, 8, 60]))
    for row, some in enumerate(([image], as_video(embeddings)[1])):
        line.add(row, token_ids + [TEXT] * 100, some)
        read(line, row, len(token_ids) + 100)
        line.counted.update(visual_tokens_full=0, visual_tokens_kept=0)
    assert line.counted["draft_encoder_oversized"] == 2 and line.counted["draft_encoder_misses"] == 2
    monkeypatch.setattr(SeeingModel, "max_encoder_tokens", SIZE - 1)
    small = line_of()
    token_ids, features = cuttable(embeddings)
    small.add(0, token_ids, features)
    read(small, 0, len(token_ids))
    assert small.model.frames == [range(i, i + 1) for i in range(6)]
    assert small.counted["draft_encoder_oversized"] == 6


def test_a_video_that_the_target_has_pruned_is_cut_by_its_own_frames():
    """Of 8 frames the target kept the first, some of the fourth and the seventh: others are passed over."""
    _, embeddings = measured()
    seen = torch.cat((torch.arange(SIZE), torch.arange(3 * SIZE + 5, 3 * SIZE + 9), torch.arange(6 * SIZE, 7 * SIZE)))
    line = line_of(NO_ROOM)
    _, features = cuttable(embeddings)
    item = SimpleNamespace(feature=features[0], seen=seen, num_tokens=len(seen), name="video")
    parts: list[Part] = []
    while not parts or not parts[-1].is_last:
        parts.append(line.prefills.vision._next_part(item, parts[-1].end if parts else 0, ENCODER_BUDGET))
    assert [part.frames for part in parts] == [range(4), range(6, 8)]
    found = line.prefills.vision._run_tower(parts[:1]) + line.prefills.vision._run_tower(parts[1:])
    assert torch.equal(torch.cat(found), embeddings[seen])
    assert np.all([part.num_encoded <= ENCODER_BUDGET for part in parts])
