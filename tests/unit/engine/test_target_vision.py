"""What the target's tower has made, handed to the draft: whose it is, how long it is kept, what happens without it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engine.fakes import ALONE
from tests.unit.engine.test_draft_prefill import Line
from tests.unit.engine.test_draft_vision import ROOM, cuttable
from tests.unit.engine.test_frames import SeeingModel, measured, read
from vllm_vidspec.engine.compat.model import observe_encoder
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.hooks.target_vision import TargetVision

SCALE = 2.0  # the map of these tests: the draft's embeddings are twice the target's


class ToldModel(SeeingModel):
    """A draft without a tower of its own: what it encodes comes out of the target's, mapped."""

    has_own_tower = False

    def encode(self, features, frames):
        return [SCALE * made for made in super().encode(features, frames)]


class Target:
    """An encoder that remembers outputs until they are taken from it."""

    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.state = SimpleNamespace(
            encoder_runner=object(),
            encoder_cache=SimpleNamespace(encoder_outputs=self.outputs),
            execute_mm_encoder=self.execute_mm_encoder,
        )
        self.features: dict[str, list[Any]] = {}
        self.vision = TargetVision(self.state, self.outputs, lambda made: SCALE * made.flatten(0, -2), ALONE)

    def execute_mm_encoder(self, scheduled_encoder_inputs):
        for name, places in scheduled_encoder_inputs.items():
            for i in places:
                feature = self.features[name][i]
                self.outputs.setdefault(feature.identifier, feature.shows)

    def encode(self, *features: Any) -> None:
        self.features["r"] = list(features)
        self.state.execute_mm_encoder({"r": range(len(features))})


def line_of(target: Target, cache_bytes: int = ROOM, **knobs: Any) -> Line:
    line = Line(cache_bytes, ToldModel(), **knobs)
    old = line.prefills
    line.prefills = DraftPrefill(
        line.model, old._knobs, line.counted, line.kv, old.vision.cache, ALONE, target.vision, observers=[]
    )
    return line


def shows(seed: int) -> torch.Tensor:
    """Return embeddings of a video: those of two have no number in common."""
    return measured(seed)[1] + seed


def shown_by(target: Target, line: Line, row: int, name: str, seed: int) -> list[tuple[int, int]]:
    token_ids, features = cuttable(shows(seed), name)
    line.add(row, token_ids, features)
    held = read(line, row, len(token_ids))
    line.counted.update(visual_tokens_full=0, visual_tokens_kept=0)
    return held


@pytest.mark.parametrize("cache_bytes", [ROOM, 0])
@pytest.mark.parametrize("kept_by_vllm", [True, False])
def test_the_draft_is_shown_what_the_target_has_made_mapped(cache_bytes, kept_by_vllm):
    """At hand, handed on before vLLM freed it, or encoded again: the same tokens; only the last is a look.

    Catches: another video's embeddings, of the same size, under this one's name; the target's, unmapped.
    """
    target = Target()
    line = line_of(target, cache_bytes, pruner="uniform")
    videos = [cuttable(shows(seed), f"video {seed}") for seed in range(2)]
    for row, (_, features) in enumerate(videos):
        target.vision.add(row, features)
    target.encode(videos[0][1][0], videos[1][1][0])
    if not kept_by_vllm:
        target.outputs.clear()
    for seed in (1, 0):
        wanted = Line(ROOM, ToldModel(), pruner="uniform")
        token_ids, features = videos[seed]
        wanted.add(seed, token_ids, features)
        assert shown_by(target, line, seed, f"video {seed}", seed) == read(wanted, seed, len(token_ids))
    looks = 0 if cache_bytes or kept_by_vllm else 4  # two halves of two videos
    assert len(line.model.frames) == looks
    assert line.counted.get("draft_encoder_hits", 0) == (0 if looks else 2)


def test_nothing_is_kept_for_who_is_not_drafted_for():
    target = Target()
    line = line_of(target)
    _, features = cuttable(measured(0)[1], "video")
    target.encode(features[0])
    assert not line.prefills.vision.cache.num_used_bytes
    target.vision.add(0, features)
    target.vision.remove(0)
    target.outputs.clear()
    target.encode(features[0])
    assert not line.prefills.vision.cache.num_used_bytes and not list(target.vision.active_rows())


def test_what_cannot_be_mapped_is_encoded_again_and_the_target_goes_on():
    """Catches: an exception of ours that ends the target's step; half of a video that stays."""
    target = Target()
    line = line_of(target)
    _, features = cuttable(measured(0)[1], "video")
    target.vision.add(0, features)
    keep, target.vision.keep = target.vision.keep, lambda *_: 1 / 0
    target.encode(features[0])
    target.vision.keep = keep
    target.outputs.clear()
    assert shown_by(target, line, 0, "video", 0) and line.model.frames


def test_outputs_of_another_size_are_not_taken():
    """A video of which the target shows more or fewer tokens than the prompt says."""
    target = Target()
    target.outputs["video"] = torch.zeros(5, 4)
    assert target.vision.find("video", 6, None) is None
    found = target.vision.find("video", 5, torch.tensor([1, 3]))
    assert found is not None and len(found) == 2
    assert target.vision.find("unknown", 5, None) is None


def test_a_target_that_is_shown_nothing_has_no_encoder():
    observe_encoder(SimpleNamespace(), lambda outputs: 1 / 0)
