"""GLM-4.1V, GLM-4.5V and GLM-4.6V, dense and with experts: merged patch grids and M-RoPE. Reads configs only."""

from vllm_vidspec.families.base import token_ids
from vllm_vidspec.families.layouts import PatchGrids


class GlmVAdapter(PatchGrids):
    """The GLM-V family, whose videos are split by frame, each with an image's tokens. See `FamilyAdapter`."""

    name = "glm-v"
    architectures = frozenset(f"{kind}ForConditionalGeneration" for kind in ("Glm4v", "Glm4vMoe", "GlmOcr"))
    model_types = frozenset({"glm4v", "glm4v_moe", "glm_ocr"})
    shared = (
        *PatchGrids.patches,
        *token_ids("image", "image_start", "image_end", "video", "video_start", "video_end"),
    )


ADAPTERS = (GlmVAdapter(),)
