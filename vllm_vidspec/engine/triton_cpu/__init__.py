"""A Triton backend named "cpu": with it Model Runner V2 runs on a machine without a GPU, in Triton's interpreter.

It is no part of `engine/cpu`, which a machine with a GPU never imports: Triton finds its backends by their entry points
(group `triton.backends`) and imports all of them on every machine, while `import triton` is under way. So it may import
neither torch, triton nor vLLM, and reads file names only. Where a GPU is present it stays inactive and sets nothing.
"""

import os

from vllm_vidspec.devices import has_gpu

ACTIVE = not has_gpu()
if ACTIVE:
    # Must be set before triton.language.standard is jitted, hence here.
    os.environ.setdefault("TRITON_INTERPRET", "1")
