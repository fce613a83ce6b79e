"""LLaVA-OneVision and LLaVA-NeXT-Video: pooled square frames and 1-D positions. Reads config attributes only."""

from typing import Any

from vllm_vidspec.families.base import Field, read_field, token_ids
from vllm_vidspec.families.layouts import SquareFrames

_IMAGE_SIZE = Field("frame size in pixels", ("vision_config.image_size",))
_PATCH_SIZE = Field("patch size", ("vision_config.patch_size",))
# Not in the released configs of LLaVA-OneVision; vLLM falls back to 2 as well.
_POOL_STRIDE = Field("spatial pooling stride", ("spatial_pool_stride",), default=2)


class _Pooled(SquareFrames):
    """Frames of P x P tokens, P = ceil(image_size // patch_size / stride)."""

    # Target and draft see the same token ids and the same resized, normalised and tiled pixels.
    shared: tuple[Field, ...] = (
        _IMAGE_SIZE,
        _PATCH_SIZE,
        _POOL_STRIDE,
        Field("vision tower type", ("vision_config.model_type",)),
        Field("number of pixel channels", ("vision_config.num_channels",)),
        Field("vision feature select strategy", ("vision_feature_select_strategy",)),
        *token_ids("image", "video"),
    )

    def side(self, hf_config: Any) -> int:
        """Return P. See `SquareFrames`."""
        sizes = [read_field(hf_config, field) for field in (_IMAGE_SIZE, _PATCH_SIZE, _POOL_STRIDE)]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return 0
        image_size, patch_size, stride = sizes
        return -(-(image_size // patch_size) // stride)


class LlavaOnevisionAdapter(_Pooled):
    """The LLaVA-OneVision family: the `image_newline` ends a video, and each row of an image. See `FamilyAdapter`."""

    name = "llava-onevision"
    architectures = frozenset({"LlavaOnevisionForConditionalGeneration"})
    model_types = frozenset({"llava_onevision"})
    shared = (
        *_Pooled.shared,
        Field("vision aspect ratio", ("vision_aspect_ratio",)),
        Field("image grid pinpoints", ("image_grid_pinpoints",)),
    )
    num_trailing = 1


class LlavaNextVideoAdapter(_Pooled):
    """The LLaVA-NeXT-Video family, of which vLLM takes one video a prompt and no image. See `FamilyAdapter`."""

    name = "llava-next-video"
    architectures = frozenset({"LlavaNextVideoForConditionalGeneration"})
    model_types = frozenset({"llava_next_video"})
    shared = (*_Pooled.shared, Field("spatial pooling mode", ("spatial_pool_mode",)))


ADAPTERS = (LlavaOnevisionAdapter(), LlavaNextVideoAdapter())
