"""What may be imported where: vLLM's CPU worker replaces torch.cuda's streams, events and copies."""

import subprocess
import sys

_LOOK = """
import sys, torch
import vllm.utils.torch_utils as torch_utils
import vllm.v1.worker.gpu_worker

def look():
    cuda = [getattr(torch.cuda, name) for name in ("Event", "Stream", "current_stream", "stream")]
    accelerator = [torch.accelerator.synchronize, torch.accelerator.get_memory_info]
    return [*cuda, *accelerator, torch.Tensor.pin_memory, torch_utils.async_tensor_h2d]

before = look()
import {module}
print([a is b for a, b in zip(before, look())].count(False))
of_cpus = ("vllm.v1.worker.cpu", "vllm_vidspec.engine.cpu", "vidspec_kernels.cpu")
print(sorted(name for name in sys.modules if name.startswith(of_cpus)))
"""


def _import(module: str) -> tuple[int, str]:
    result = subprocess.run([sys.executable, "-c", _LOOK.format(module=module)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    replaced, loaded = result.stdout.splitlines()[-2:]
    return int(replaced), loaded


def test_gpu_worker_leaves_torch_untouched_and_the_cpus_code_unread():
    """Catches: a package, a module or a patch of the CPU engine's in a process that has a GPU."""
    assert _import("vllm_vidspec.engine.worker") == (0, "[]")


def test_cpu_worker_is_what_replaces_it():
    """The look above sees it: the CPU worker's import replaces all eight."""
    replaced, loaded = _import("vllm_vidspec.engine.cpu.worker")
    assert replaced == 8 and "'vllm_vidspec.engine.cpu', " in loaded and "'vllm_vidspec.engine.cpu.worker'" in loaded
