"""HyperCLOVA X SEED with Qwen2.5-VL's vision tower: merged patch grids and 1-D positions. Reads configs only."""

from vllm_vidspec.families.base import token_ids
from vllm_vidspec.families.layouts import PatchGrids


class HyperClovaXAdapter(PatchGrids):
    """The HyperCLOVA X SEED family, of vLLM's second version. See `FamilyAdapter`."""

    name = "hyperclovax"
    architectures = frozenset({"HCXVisionV2ForCausalLM"})
    model_types = frozenset({"hyperclovax_vision_v2"})
    shared = (*PatchGrids.patches, *token_ids("image", "video"))


ADAPTERS = (HyperClovaXAdapter(),)
