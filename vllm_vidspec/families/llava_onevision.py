"""LLaVA-OneVision: pooled square frames with one trailing newline, anyres images. Reads config attributes only."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_vidspec.families.base import FamilyAdapter, Field, flat_grid, read_field
from vllm_vidspec.pruning import TokenGrid

_IMAGE_SIZE = Field("frame size in pixels", ("vision_config.image_size",))
_PATCH_SIZE = Field("patch size", ("vision_config.patch_size",))
# Not in the released configs; vLLM falls back to 2 as well.
_POOL_STRIDE = Field("spatial pooling stride", ("spatial_pool_stride",), default=2)

_PIXELS = "pixel_values_videos"


class LlavaOnevisionAdapter(FamilyAdapter):
    """The LLaVA-OneVision family. See `FamilyAdapter`."""

    name = "llava-onevision"
    architectures = frozenset({"LlavaOnevisionForConditionalGeneration"})
    model_types = frozenset({"llava_onevision"})
    # Target and draft see the same token ids and the same resized, normalised and tiled pixels.
    shared = (
        _IMAGE_SIZE,
        _PATCH_SIZE,
        _POOL_STRIDE,
        Field("vision tower type", ("vision_config.model_type",)),
        Field("number of pixel channels", ("vision_config.num_channels",)),
        Field("vision feature select strategy", ("vision_feature_select_strategy",)),
        Field("image token id", ("image_token_id", "image_token_index")),
        Field("video token id", ("video_token_id", "video_token_index")),
        Field("vision aspect ratio", ("vision_aspect_ratio",)),
        Field("image grid pinpoints", ("image_grid_pinpoints",)),
    )

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return F frames of P x P tokens and the `image_newline`, P = ceil(image_size // patch_size / stride).

        Of a video: anyres images, with a newline in every row and a thumbnail, count as one row of tokens.
        """
        side = self._pooled_side(hf_config)
        if modality != "video" or side < 1:
            return flat_grid(num_tokens)
        num_frames, rest = divmod(num_tokens - 1, side * side)
        frames: Any = data.get(_PIXELS)  # [num_frames, channels, height, width]
        given = frames.shape[0] if getattr(frames, "ndim", 0) == 4 else num_frames
        if rest or num_frames < 1 or given != num_frames:
            return flat_grid(num_tokens)
        return TokenGrid(num_frames, side, side, num_trailing=1)

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video: the tower, the projector and the pooling know one frame each. See the base."""
        side, pixels = self._pooled_side(hf_config), data.get(_PIXELS)
        if modality != "video" or side < 1 or not isinstance(pixels, torch.Tensor) or pixels.ndim != 4:
            return None
        return TokenGrid(len(pixels), side, side, num_trailing=1)

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the pixels of some frames `[num_frames, channels, height, width]`. See `FamilyAdapter`."""
        return {_PIXELS: data[_PIXELS][frames.start : frames.stop]}

    @staticmethod
    def _pooled_side(hf_config: Any) -> int:
        sizes = [read_field(hf_config, field) for field in (_IMAGE_SIZE, _PATCH_SIZE, _POOL_STRIDE)]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return 0
        image_size, patch_size, stride = sizes
        return -(-(image_size // patch_size) // stride)
