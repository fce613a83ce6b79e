"""Two ways to lay out a video that families share: merged patches on a grid, and square frames. Reads configs only."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_vidspec.families.base import FamilyAdapter, Field, flat_grid, read_field
from vllm_vidspec.pruning import TokenGrid

PIXELS, GRID = "pixel_values_videos", "video_grid_thw"


class PatchGrids(FamilyAdapter):
    """Images and videos are (T, H, W) grids of patches; the tower attends within a frame, and merges squares of it."""

    merge = Field("spatial merge size", ("vision_config.spatial_merge_size",))
    # By what pixels become patches, and these tokens.
    patches = (
        Field("patch size", ("vision_config.patch_size",)),
        merge,
        Field("temporal patch size", ("vision_config.temporal_patch_size",)),
        Field("number of pixel channels", ("vision_config.in_channels", "vision_config.in_chans")),
    )

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return (T, H / merge, W / merge) from the item's `<modality>_grid_thw`. See `FamilyAdapter`."""
        grid = self.merged(data.get(f"{modality}_grid_thw"), hf_config)
        return grid if grid is not None and grid.num_tokens == num_tokens else flat_grid(num_tokens)

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video whose patches `[T * H * W, patch_dim]` are all there. See `FamilyAdapter`."""
        grid, pixels = self.merged(data.get(GRID), hf_config), data.get(PIXELS)
        if modality != "video" or grid is None or not isinstance(pixels, torch.Tensor):
            return None
        is_whole = pixels.ndim == 2 and len(pixels) == int(torch.as_tensor(data[GRID]).prod())
        return grid if is_whole else None

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the patches of some frames `[num_patches, patch_dim]`, and their grid. See `FamilyAdapter`."""
        grid = data[GRID].clone()  # [3]
        size = int(grid[1] * grid[2])
        grid[0] = len(frames)
        return {PIXELS: data[PIXELS][frames.start * size : frames.stop * size], GRID: grid}

    def merged(self, grid_thw: Any, hf_config: Any) -> TokenGrid | None:
        """Return the grid of tokens of a grid of patches `[3]`; None where it is none."""
        thw, merge = to_ints(grid_thw), read_field(hf_config, self.merge)
        if len(thw) != 3 or min(thw) < 1 or not merge:
            return None
        return TokenGrid(thw[0], thw[1] // merge, thw[2] // merge)


class SquareFrames(FamilyAdapter):
    """Videos are frames `[num_frames, channels, height, width]` of `side` x `side` tokens; the tower knows one each."""

    num_trailing = 0  # tokens that follow the last

    def side(self, hf_config: Any) -> int:
        """Return the tokens of a frame's row and column, 0 where the config does not tell."""
        raise NotImplementedError

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return the grid of a video; an image, which may be a thumbnail and tiles, is one row. See `FamilyAdapter`."""
        side = self.side(hf_config)
        if modality != "video" or side < 1:
            return flat_grid(num_tokens)
        num_frames, rest = divmod(num_tokens - self.num_trailing, side * side)
        pixels: Any = data.get(PIXELS)
        given = pixels.shape[0] if getattr(pixels, "ndim", 0) == 4 else num_frames
        if rest or num_frames < 1 or given != num_frames:
            return flat_grid(num_tokens)
        return TokenGrid(num_frames, side, side, self.num_trailing)

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video whose frames are all there. See `FamilyAdapter`."""
        side, pixels = self.side(hf_config), data.get(PIXELS)
        if modality != "video" or side < 1 or not isinstance(pixels, torch.Tensor) or pixels.ndim != 4:
            return None
        return TokenGrid(len(pixels), side, side, self.num_trailing)

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the pixels of some frames `[num_frames, channels, height, width]`. See `FamilyAdapter`."""
        return {PIXELS: data[PIXELS][frames.start : frames.stop]}


def to_ints(value: Any) -> list[int]:
    """Return the entries of a tensor, array or sequence, of shape [3] or [1, 3], as integers, or [] for any other."""
    try:
        return [int(entry) for entry in torch.as_tensor(value).flatten()]
    except (TypeError, ValueError, RuntimeError):
        return []
