"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: merged (T, H, W) patch grids and M-RoPE. Reads config attributes only."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_vidspec.families.base import FamilyAdapter, Field, flat_grid, read_field
from vllm_vidspec.pruning import TokenGrid

_MERGE = Field("spatial merge size", ("vision_config.spatial_merge_size",))
_PACE = Field("tokens per second", ("vision_config.tokens_per_second",))
_PIXELS, _GRID = "pixel_values_videos", "video_grid_thw"
_DEEPSTACK = Field("deepstack layers", ("vision_config.deepstack_visual_indexes",), default=())


class QwenVLAdapter(FamilyAdapter):
    """A generation of Qwen's models. See `FamilyAdapter`.

    Qwen3-VL writes each frame's time as text between the frames of a video; that text is not the item's embeddings.
    """

    # Target and draft see the same token ids and the same patchified pixels, and share coordinates in M-RoPE.
    shared = (
        Field("patch size", ("vision_config.patch_size",)),
        _MERGE,
        Field("temporal patch size", ("vision_config.temporal_patch_size",)),
        Field("number of pixel channels", ("vision_config.in_channels", "vision_config.in_chans")),
        _PACE,
        Field("image token id", ("image_token_id",)),
        Field("video token id", ("video_token_id",)),
        Field("vision start token id", ("vision_start_token_id",)),
        Field("vision end token id", ("vision_end_token_id",)),
    )

    def __init__(self, name: str, model_types: set[str], architectures: set[str]):
        self.name, self.model_types, self.architectures = name, frozenset(model_types), frozenset(architectures)

    def num_media_levels(self, hf_config: Any) -> int:
        """Return 1, and one more for each layer that Qwen3-VL's tower feeds (deepstack). See `FamilyAdapter`."""
        return 1 + len(read_field(hf_config, _DEEPSTACK))

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return (T, H / merge, W / merge) from the item's `<modality>_grid_thw`. See `FamilyAdapter`."""
        thw = _to_ints(data.get(f"{modality}_grid_thw"))
        merge = read_field(hf_config, _MERGE)
        if len(thw) != 3 or min(thw) < 1 or not merge:
            return flat_grid(num_tokens)
        grid = TokenGrid(thw[0], thw[1] // merge, thw[2] // merge)
        return grid if grid.num_tokens == num_tokens else flat_grid(num_tokens)

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video: attention, its windows and positions stay within a frame of the grid."""
        thw, pixels, merge = _to_ints(data.get(_GRID)), data.get(_PIXELS), read_field(hf_config, _MERGE)
        if modality != "video" or len(thw) != 3 or min(thw) < 1 or not merge or not isinstance(pixels, torch.Tensor):
            return None
        num_frames, height, width = thw
        if pixels.ndim != 2 or len(pixels) != num_frames * height * width:
            return None
        return TokenGrid(num_frames, height // merge, width // merge)

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the patches of some frames `[num_patches, patch_dim]`, and their grid. See `FamilyAdapter`."""
        grid = data[_GRID].clone()  # [3]
        size = int(grid[1] * grid[2])
        grid[0] = len(frames)
        return {_PIXELS: data[_PIXELS][frames.start * size : frames.stop * size], _GRID: grid}

    def follows_pruned_videos(self, hf_config: Any) -> bool:
        """Return whether this is Qwen2.5-VL: vLLM prunes no videos of Qwen2-VL, and Qwen3-VL's time stamps lie among a
        pruned video's embeddings at places that only the target knows.
        """
        return _pace(hf_config) is not None

    def whole_video(self, data: Mapping[str, Any], hf_config: Any) -> tuple[TokenGrid, float] | None:
        """Return the video's grid and pace as vLLM counts Qwen2.5-VL's: a frame's seconds are cut to an integer."""
        thw, seconds = _to_ints(data.get(_GRID)), _to_ints(data.get("second_per_grid_ts"))
        pace = _pace(hf_config)
        if len(thw) != 3 or len(seconds) != 1 or pace is None:
            return None
        merge = read_field(hf_config, _MERGE)
        return TokenGrid(thw[0], thw[1] // merge, thw[2] // merge), pace * seconds[0]


def _pace(hf_config: Any) -> float | None:
    """Return the rope positions of a second of video; None where they do not follow the clock."""
    return read_field(hf_config, _PACE)


def _to_ints(value: Any) -> list[int]:
    """Return the entries of a tensor, array or sequence, of shape [3] or [1, 3], as integers, or [] for any other."""
    try:
        return [int(entry) for entry in torch.as_tensor(value).flatten()]
    except (TypeError, ValueError, RuntimeError):
        return []
