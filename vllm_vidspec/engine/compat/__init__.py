"""Every patch of vLLM, and nothing else: each is idempotent, checks what it relies on and says why it exists.

`config` and `api` are put on by the plugin and by the start-up checks, `cpu` by the CPU engine alone; what is here is
put on a loaded target.
"""

from vllm_vidspec.engine.compat.contract import expect_parameters
from vllm_vidspec.engine.compat.model import (
    adjust_positions,
    expose_hidden_states,
    intercept_attention,
    keep_shared_noise,
    observe_attention,
    without_kv_connector,
)

__all__ = [
    "adjust_positions",
    "expect_parameters",
    "expose_hidden_states",
    "intercept_attention",
    "keep_shared_noise",
    "observe_attention",
    "without_kv_connector",
]
