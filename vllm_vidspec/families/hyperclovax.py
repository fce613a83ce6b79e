"""HyperCLOVA X SEED with Qwen2.5-VL's vision tower: merged patch grids and 1-D positions. Reads configs only."""

from vllm_vidspec.families.base import Field
from vllm_vidspec.families.layouts import PatchGrids


class HyperClovaXAdapter(PatchGrids):
    """The HyperCLOVA X SEED family, of vLLM's second version. See `FamilyAdapter`."""

    name = "hyperclovax"
    architectures = frozenset({"HCXVisionV2ForCausalLM"})
    model_types = frozenset({"hyperclovax_vision_v2"})
    shared = (
        *PatchGrids.patches,
        Field("image token id", ("image_token_id",)),
        Field("video token id", ("video_token_id",)),
    )


ADAPTERS = (HyperClovaXAdapter(),)
