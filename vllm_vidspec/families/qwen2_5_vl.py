"""Qwen2.5-VL: merged (T, H, W) patch grids and M-RoPE. Reads config attributes only."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_vidspec.families.base import FamilyAdapter, Field, flat_grid, read_field
from vllm_vidspec.pruning import TokenGrid

_MERGE = Field("spatial merge size", ("vision_config.spatial_merge_size",))


class Qwen2_5_VLAdapter(FamilyAdapter):
    """The Qwen2.5-VL family. See `FamilyAdapter`."""

    name = "qwen2.5-vl"
    architectures = frozenset({"Qwen2_5_VLForConditionalGeneration"})
    model_types = frozenset({"qwen2_5_vl"})
    # Target and draft see the same token ids and the same patchified pixels, and share coordinates in M-RoPE.
    shared = (
        Field("patch size", ("vision_config.patch_size",)),
        _MERGE,
        Field("temporal patch size", ("vision_config.temporal_patch_size",)),
        Field("number of pixel channels", ("vision_config.in_channels", "vision_config.in_chans")),
        Field("tokens per second", ("vision_config.tokens_per_second",)),
        Field("image token id", ("image_token_id",)),
        Field("video token id", ("video_token_id",)),
        Field("vision start token id", ("vision_start_token_id",)),
        Field("vision end token id", ("vision_end_token_id",)),
    )

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return (T, H / merge, W / merge) from the item's `<modality>_grid_thw`. See `FamilyAdapter`."""
        thw = _to_ints(data.get(f"{modality}_grid_thw"))
        merge = read_field(hf_config, _MERGE)
        if len(thw) != 3 or min(thw) < 1 or not merge:
            return flat_grid(num_tokens)
        grid = TokenGrid(thw[0], thw[1] // merge, thw[2] // merge)
        return grid if grid.num_tokens == num_tokens else flat_grid(num_tokens)


def _to_ints(value: Any) -> list[int]:
    """Return the entries of a tensor, array or sequence, of shape [3] or [1, 3], as integers, or [] for any other."""
    try:
        return [int(entry) for entry in torch.as_tensor(value).flatten()]
    except (TypeError, ValueError, RuntimeError):
        return []
