"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: merged patch grids and M-RoPE, as Qwen's VL models. Reads configs only.

vLLM runs the thinker alone, so all of interest is in `thinker_config`. A prompt with sound, a video's own as well
(`use_audio_in_video`), runs without speculation, counted as `unsupported` (`pruning/prompt.py`): a draft does not hear.
"""

from vllm_vidspec.families.base import Field
from vllm_vidspec.families.layouts import PatchGrids


def _of_thinker(label: str, *paths: str) -> Field:
    return Field(label, tuple(f"thinker_config.{path}" for path in paths))


class QwenOmniAdapter(PatchGrids):
    """A generation of Qwen's Omni models. See `FamilyAdapter`."""

    merge = _of_thinker("spatial merge size", "vision_config.spatial_merge_size")
    vision_heads = _of_thinker("vision heads", "vision_config.num_heads")
    deepstack = _of_thinker("deepstack layers", "vision_config.deepstack_visual_indexes")._replace(default=())
    shared = (
        _of_thinker("patch size", "vision_config.patch_size"),
        merge,
        _of_thinker("temporal patch size", "vision_config.temporal_patch_size"),
        _of_thinker("number of pixel channels", "vision_config.in_channels", "vision_config.in_chans"),
        # What vLLM multiplies a video's seconds by: the one in Qwen2.5-Omni, the other in Qwen3-Omni.
        _of_thinker("tokens per second", "vision_config.tokens_per_second")._replace(default=25),
        _of_thinker("positions per second", "position_id_per_seconds"),
        _of_thinker("image token id", "image_token_id", "image_token_index"),
        _of_thinker("video token id", "video_token_id", "video_token_index"),
        _of_thinker("audio token id", "audio_token_id", "audio_token_index"),
    )

    def __init__(self, name: str, model_type: str, architectures: set[str]):
        self.name, self.model_types, self.architectures = name, frozenset({model_type}), frozenset(architectures)


ADAPTERS = (
    # The released configs name the one, vLLM's registry both.
    QwenOmniAdapter("qwen2.5-omni", "qwen2_5_omni", {"Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"}),
    QwenOmniAdapter("qwen3-omni", "qwen3_omni_moe", {"Qwen3OmniMoeForConditionalGeneration"}),
)
