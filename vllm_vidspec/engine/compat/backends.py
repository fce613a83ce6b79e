"""What vLLM's attention backends say of themselves where its versions differ."""

import inspect
import sys
from typing import Any


def splits_keys(layer: Any, num_rows: int) -> bool:
    """Return whether a layer's backend shares a request's keys out among programs for `num_rows` query rows of it.

    Else one program walks all keys of a query head: at long contexts a verify step then takes several times what a
    decode step does. FlashAttention 2 splits keys for single rows alone; vLLM's Triton kernel names its bound.
    """
    impl, name = layer.impl, layer.get_attn_backend().get_name()
    if name == "FLASH_ATTN":
        return num_rows <= 1 or impl.vllm_flash_attn_version != 2
    if name == "TRITON_ATTN":
        kernel = sys.modules[type(impl).__module__].unified_attention
        return num_rows <= getattr(inspect.getmodule(kernel), "MAX_3D_QUERY_LEN", 1)
    return True
