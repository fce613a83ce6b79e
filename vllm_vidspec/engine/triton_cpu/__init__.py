"""A Triton backend named "cpu": with it vLLM's Model Runner V2 runs on a machine without a GPU, in Triton's
interpreter.

Imported while `import triton` is under way (entry-point group `triton.backends`): it may import neither torch, triton
nor vLLM, and looks at device nodes only. Where a GPU is present it stays inactive and sets nothing.
"""

import os

_GPU_DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd")

ACTIVE = not any(os.path.exists(node) for node in _GPU_DEVICE_NODES)
if ACTIVE:
    # Must be set before triton.language.standard is jitted, hence here.
    os.environ.setdefault("TRITON_INTERPRET", "1")
