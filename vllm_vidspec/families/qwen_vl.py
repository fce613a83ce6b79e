"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: merged (T, H, W) patch grids and M-RoPE. Reads config attributes only."""

from collections.abc import Mapping
from typing import Any

from vllm_vidspec.families.base import Field, read_field, token_ids
from vllm_vidspec.families.layouts import GRID, PatchGrids, to_ints
from vllm_vidspec.pruning import TokenGrid

_PACE = Field("tokens per second", ("vision_config.tokens_per_second",))


class QwenVLAdapter(PatchGrids):
    """A generation of Qwen's models. See `FamilyAdapter`."""

    # Target and draft see the same token ids and the same patchified pixels, and share coordinates in M-RoPE.
    shared = (
        *PatchGrids.patches,
        _PACE,
        *token_ids("image", "video", "vision_start", "vision_end"),
    )

    def __init__(self, name: str, model_types: set[str], architectures: set[str]):
        self.name, self.model_types, self.architectures = name, frozenset(model_types), frozenset(architectures)

    def follows_pruned_videos(self, hf_config: Any) -> bool:
        """Return whether this is Qwen2.5-VL: vLLM prunes no videos of Qwen2-VL, and Qwen3-VL's time stamps lie among a
        pruned video's embeddings at places that only the target knows.
        """
        return _pace(hf_config) is not None

    def whole_video(self, data: Mapping[str, Any], hf_config: Any) -> tuple[TokenGrid, float] | None:
        """Return the video's grid and pace as vLLM counts Qwen2.5-VL's: a frame's seconds are cut to an integer."""
        grid, seconds = self.merged(data.get(GRID), hf_config), to_ints(data.get("second_per_grid_ts"))
        pace = _pace(hf_config)
        if grid is None or len(seconds) != 1 or pace is None:
            return None
        return grid, pace * seconds[0]


def _pace(hf_config: Any) -> float | None:
    """Return the rope positions of a second of video; None where they do not follow the clock."""
    return read_field(hf_config, _PACE)


ADAPTERS = (
    QwenVLAdapter("qwen2-vl", {"qwen2_vl"}, {"Qwen2VLForConditionalGeneration"}),
    QwenVLAdapter("qwen2.5-vl", {"qwen2_5_vl"}, {"Qwen2_5_VLForConditionalGeneration"}),
    QwenVLAdapter(
        "qwen3-vl",
        {"qwen3_vl", "qwen3_vl_moe"},
        {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"},
    ),
)
