"""InternVL3 and InternVL3.5 in Hugging Face's layout: a frame is a tile, 1-D positions. Reads configs only."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_vidspec.families.base import Field, read_field, token_ids
from vllm_vidspec.families.layouts import SquareFrames

_IMAGE_SIZE = Field("tile size in pixels", ("vision_config.image_size",))
_PATCH_SIZE = Field("patch size", ("vision_config.patch_size",))
_DOWNSAMPLE = Field("downsample ratio", ("downsample_ratio",))


class InternVLAdapter(SquareFrames):
    """The InternVL family, whose images are tiles and a thumbnail, side by side. See `FamilyAdapter`."""

    name = "internvl"
    architectures = frozenset({"InternVLForConditionalGeneration"})
    model_types = frozenset({"internvl"})
    vision_heads = Field("vision heads", ())  # vLLM's ranks have a whole tower each
    shared = (
        _IMAGE_SIZE,
        _PATCH_SIZE,
        _DOWNSAMPLE,
        Field("number of pixel channels", ("vision_config.num_channels",)),
        Field("tokens of a tile", ("image_seq_length",)),
        *token_ids("image"),
    )

    def side(self, hf_config: Any) -> int:
        """Return image_size // patch_size * downsample_ratio. See `SquareFrames`."""
        sizes = [read_field(hf_config, field) for field in (_IMAGE_SIZE, _PATCH_SIZE)]
        image_size, patch_size = (size[0] if isinstance(size, list) and size else size for size in sizes)
        ratio = read_field(hf_config, _DOWNSAMPLE)
        if not all(isinstance(value, int | float) and value > 0 for value in (image_size, patch_size, ratio)):
            return 0
        return int(image_size // patch_size * ratio)

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the pixels of some frames, and their number. See `FamilyAdapter`."""
        return super().some_frames(data, frames) | {"video_num_patches": torch.tensor(len(frames))}


ADAPTERS = (InternVLAdapter(),)
