"""Pixels that are copied to the device once for both towers: what is kept, for how long, and how much of it."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.multimodal import inputs
from vllm.platforms import current_platform

from tests.unit.engine.fakes import CPU, Counts
from tests.unit.engine.test_draft_vision import HALVES, cuttable, line_of
from tests.unit.engine.test_frames import FRAMES, SIZE, measured, read
from vllm_vidspec.engine.hooks.pixels import SharedPixels

PATCHES = 4 * FRAMES * SIZE
ITEM_BYTES = 4 * PATCHES


class Target:
    """Its encoder says what it is about to encode, and remembers what it is given."""

    def __init__(self, num_bytes: int):
        if current_platform.is_cpu():
            import vllm.v1.worker.cpu.shm  # noqa: F401  # buffers that need no pinned memory, as in every CPU engine
        self.features: dict[str, list[Any]] = {}
        encoder = SimpleNamespace(prepare_mm_inputs=self.prepare_mm_inputs)
        self.counted = Counts()
        self.pixels = SharedPixels(SimpleNamespace(encoder_runner=encoder), CPU, self.counted)  # type: ignore[arg-type]
        self.pixels.num_bytes = num_bytes
        self._encoder = encoder

    def prepare_mm_inputs(self, scheduled_encoder_inputs):
        chosen = [self.features[name][i] for name, places in scheduled_encoder_inputs.items() for i in places]
        return [one.identifier for one in chosen], [(one.modality, one.data) for one in chosen]

    def encode(self, *features: Any) -> list[Any]:
        """Return the processor outputs that the encoder is given for these."""
        self.features["r"] = list(features)
        identifiers, items = self._encoder.prepare_mm_inputs({"r": range(len(features))})
        assert identifiers == [feature.identifier for feature in features]
        return [item for _, item in items]


def video(name: str = "video") -> tuple[list[int], Any]:
    """Return ids and the feature of a prompt of one video, its data as vLLM's processor makes them."""
    token_ids, (feature,) = cuttable(measured()[1], name)
    flat, grid = inputs.MultiModalFlatField(slices=[slice(None)]), inputs.MultiModalBatchedField(keep_on_cpu=True)
    feature.data = inputs.MultiModalKwargsItem(
        {
            "pixel_values_videos": inputs.MultiModalFieldElem(data=torch.rand(PATCHES, 1), field=flat),
            "video_grid_thw": inputs.MultiModalFieldElem(data=feature.data["video_grid_thw"].data, field=grid),
        }
    )
    return token_ids, feature


def are_copies(target: Target, *features: Any) -> list[bool]:
    """Return which of the features' items the target's encoder is given copies of."""
    given = zip(target.encode(*features), features, strict=True)
    return [item["pixel_values_videos"] is not feature.data["pixel_values_videos"] for item, feature in given]


def test_no_more_is_kept_than_there_is_room_for():
    """Of two videos the second is copied, counted once; two in one encoder call are both kept, or neither."""
    target, line = Target(ITEM_BYTES + 1), line_of()
    (first, second) = (video(name)[1] for name in ("first", "second"))
    target.pixels.add(0, [first, second])
    assert are_copies(target, first, second) == [False, False] and not target.pixels.num_used_bytes
    assert are_copies(target, first) == [True] and are_copies(target, second) == [False]
    assert are_copies(target, second, first) == [False, False]
    assert target.pixels.num_used_bytes == ITEM_BYTES
    line.prefills.vision._pixels = target.pixels
    target.pixels._device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    for row, feature in enumerate((first, second)):
        assert line.add(row, video()[0], [feature])
        line.counted.update(visual_tokens_full=FRAMES * SIZE, visual_tokens_kept=FRAMES * SIZE // 2)
        read(line, row, len(video()[0]))
    assert target.counted == {"draft_pixel_copies": 1} and line.model.frames == HALVES * 2


def test_nobody_keeps_what_nobody_waits_for():
    """A request without drafts, data that a processor has put elsewhere, a device that has no room."""
    target, (_, feature) = Target(10 * ITEM_BYTES), video()
    target.encode(feature)
    _, empty = video("kept on the host")
    empty.data = inputs.MultiModalKwargsItem({"video_grid_thw": empty.data["video_grid_thw"]})
    target.pixels.add(2, [empty])
    target.encode(empty)
    assert not target.pixels.num_used_bytes
    feature.data["pixel_values_videos"].data = torch.zeros(1, device="meta")  # that a processor has put elsewhere
    assert target.encode(feature)[0]["pixel_values_videos"].data.is_meta
    target.pixels._device = "nowhere"  # type: ignore[assignment]
    assert target.encode(video("unlucky")[1])[0]["pixel_values_videos"].data.is_cpu
    SharedPixels(SimpleNamespace(), CPU, Counts())  # a target that is shown nothing has no encoder
