"""MiniCPM-V 2.6, 4.0 and 4.5: as many queries a frame, which have no place in it. Reads configs only."""

from collections.abc import Mapping
from typing import Any

from vllm_vidspec.families.base import FamilyAdapter, Field, flat_grid, read_field
from vllm_vidspec.pruning import TokenGrid

_QUERIES = Field("queries of an image", ("query_num",))
_PIXELS, _SIZES = "video_pixel_values", "video_tgt_sizes"


class MiniCPMVAdapter(FamilyAdapter):
    """The MiniCPM-V family with full attention, whose code needs `--trust-remote-code`. See `FamilyAdapter`."""

    name = "minicpm-v"
    architectures = frozenset({"MiniCPMV"})
    model_types = frozenset({"minicpmv"})
    shared = (
        _QUERIES,
        Field("version", ("version",)),
        Field("image size in pixels", ("image_size",)),
        Field("patch size", ("vision_config.patch_size",)),
        Field("slices of an image", ("slice_config.max_slice_nums",)),
    )

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return a row of queries for each frame; an image, which may be cut, is one row. See `FamilyAdapter`."""
        grid = self.frames(modality, data, hf_config)
        return grid if grid is not None and grid.num_tokens == num_tokens else flat_grid(num_tokens)

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video: the tower and its resampler know one frame each. See `FamilyAdapter`."""
        queries, pixels = read_field(hf_config, _QUERIES), data.get(_PIXELS)
        if modality != "video" or not queries or not isinstance(pixels, list) or not pixels:
            return None
        return TokenGrid(len(pixels), 1, queries)

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the patches of some frames, and how many a side they have. See `FamilyAdapter`."""
        return {key: data[key][frames.start : frames.stop] for key in (_PIXELS, _SIZES)}


ADAPTERS = (MiniCPMVAdapter(),)
