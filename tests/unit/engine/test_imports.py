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

def report():
    print([a is b for a, b in zip(before, look())].count(False))
    of_cpus = ("vllm.v1.worker.cpu", "vllm_vidspec.engine.cpu", "vidspec_kernels.compiled")
    print(sorted(name for name in sys.modules if name.startswith(of_cpus)))

before = look()
import vllm_vidspec.engine.worker
report()
import vllm_vidspec.engine.cpu.worker
report()
"""


def test_the_gpu_worker_leaves_torch_untouched_and_the_cpus_code_unread():
    """The CPU worker, imported after it, shows that the look sees it: it replaces all eight.

    Catches: a package, a module or a patch of the CPU engine's in a process that has a GPU.
    """
    result = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    replaced, loaded, replaced_after, loaded_after = result.stdout.splitlines()[-4:]
    assert (replaced, loaded) == ("0", "[]")
    assert replaced_after == "8"
    assert "'vllm_vidspec.engine.cpu', " in loaded_after and "'vllm_vidspec.engine.cpu.worker'" in loaded_after
