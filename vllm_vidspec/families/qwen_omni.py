"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: merged patch grids and M-RoPE, as Qwen's VL models. Reads configs only.

vLLM runs the thinker alone, so all of interest is in `thinker_config`. A prompt with sound, a video's own as well
(`use_audio_in_video`), runs without speculation, counted as `unsupported` (`pruning/prompt.py`): a draft does not hear.
"""

from vllm_vidspec.families.base import Field, token_ids
from vllm_vidspec.families.layouts import PatchGrids


def _of_thinker(field: Field) -> Field:
    return field._replace(paths=tuple(f"thinker_config.{path}" for path in field.paths))


class QwenOmniAdapter(PatchGrids):
    """A generation of Qwen's Omni models. See `FamilyAdapter`."""

    merge = _of_thinker(PatchGrids.merge)
    vision_heads = _of_thinker(PatchGrids.vision_heads)
    deepstack = _of_thinker(PatchGrids.deepstack)
    _shared = (
        *PatchGrids.patches,
        # What vLLM multiplies a video's seconds by: the one in Qwen2.5-Omni, the other in Qwen3-Omni.
        Field("tokens per second", ("vision_config.tokens_per_second",), default=25),
        Field("positions per second", ("position_id_per_seconds",)),
        *token_ids("image", "video", "audio"),
    )
    shared = tuple(map(_of_thinker, _shared))

    def __init__(self, name: str, model_type: str, architectures: set[str]):
        self.name, self.model_types, self.architectures = name, frozenset({model_type}), frozenset(architectures)


ADAPTERS = (
    # The released configs name the one, vLLM's registry both.
    QwenOmniAdapter("qwen2.5-omni", "qwen2_5_omni", {"Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"}),
    QwenOmniAdapter("qwen3-omni", "qwen3_omni_moe", {"Qwen3OmniMoeForConditionalGeneration"}),
)
