"""LLaVA-OneVision: pooled square frames with one trailing newline, anyres images; reads config attributes only."""

from collections.abc import Mapping
from typing import Any

from vllm_vidspec.families.base import Field, differences, flat_grid, read_field
from vllm_vidspec.pruning import TokenGrid

_IMAGE_SIZE = Field("frame size in pixels", ("vision_config.image_size",))
_PATCH_SIZE = Field("patch size", ("vision_config.patch_size",))
# Not in the released configs; vLLM falls back to 2 as well.
_POOL_STRIDE = Field("spatial pooling stride", ("spatial_pool_stride",), default=2)

# Target and draft see the same token ids and the same resized, normalised and tiled pixels.
_SHARED = (
    Field("vocabulary size", ("text_config.vocab_size", "vocab_size")),
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


class LlavaOnevisionAdapter:
    """The LLaVA-OneVision family; see `FamilyAdapter`."""

    name = "llava-onevision"
    architectures = frozenset({"LlavaOnevisionForConditionalGeneration"})
    model_types = frozenset({"llava_onevision"})

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return F frames of P x P tokens plus the `image_newline` for a video; see `FamilyAdapter`.

        P = ceil(side / stride), side = image_size // patch_size (27 patches -> 14). Anyres images interleave a
        newline with every row and concatenate a thumbnail: they count as one row of tokens.
        """
        side = self._pooled_side(hf_config)
        if modality != "video" or side < 1:
            return flat_grid(num_tokens)
        num_frames, rest = divmod(num_tokens - 1, side * side)
        frames: Any = data.get("pixel_values_videos")  # [num_frames, channels, height, width]
        given = frames.shape[0] if getattr(frames, "ndim", 0) == 4 else num_frames
        if rest or num_frames < 1 or given != num_frames:
            return flat_grid(num_tokens)
        return TokenGrid(num_frames, side, side, num_trailing=1)

    def check_pair(self, target_hf: Any, draft_hf: Any) -> list[str]:
        """Return every property in which the two configs must agree and do not."""
        return differences(target_hf, draft_hf, _SHARED)

    @staticmethod
    def _pooled_side(hf_config: Any) -> int:
        image_size, patch_size, stride = (
            read_field(hf_config, field) for field in (_IMAGE_SIZE, _PATCH_SIZE, _POOL_STRIDE)
        )
        if not (isinstance(image_size, int) and isinstance(patch_size, int) and isinstance(stride, int)):
            return 0
        if min(image_size, patch_size, stride) < 1:
            return 0
        return -(-(image_size // patch_size) // stride)
