"""What vLLM's attention backends say of themselves where its versions differ."""

import inspect
import sys
from typing import Any

UNBOUNDED = 1 << 30


def max_split_rows(layer: Any) -> int:
    """Return up to how many query rows of a request a layer's backend shares the request's keys out among programs.

    Beyond, one program walks all keys of a query head: at long contexts a verify step then takes several times what a
    decode step does. FlashAttention 2 splits keys for single rows alone; vLLM's Triton kernel names its bound.
    """
    impl, name = layer.impl, layer.get_attn_backend().get_name()
    if name == "FLASH_ATTN":
        return 1 if impl.vllm_flash_attn_version == 2 else UNBOUNDED
    if name == "TRITON_ATTN":
        kernel = sys.modules[type(impl).__module__].unified_attention
        return getattr(inspect.getmodule(kernel), "MAX_3D_QUERY_LEN", 1)
    return UNBOUNDED


def splits_keys(layer: Any, num_rows: int) -> bool:
    """Return whether a layer's backend does so for `num_rows` query rows of a request; see `max_split_rows`."""
    return num_rows <= max_split_rows(layer)
