"""vLLM's CPU worker with our model runner.

Imported on the CPU engine only: importing vLLM's CPU worker replaces torch.cuda's streams, events and copies.
"""

import time

from vllm.logger import init_logger
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vidspec_kernels.dispatch import load_loops
from vllm_vidspec.engine.compat.cpu import cpu_model_runner, keep_caches_readable
from vllm_vidspec.engine.runner import VidSpecModelRunner
from vllm_vidspec.engine.stages import EarlierStage, is_last
from vllm_vidspec.engine.worker import VidSpecWorker, leaves_refusal

logger = init_logger("vllm.vidspec")


class VidSpecCPUModelRunner(VidSpecModelRunner, CPUModelRunner):
    """Our runner over vLLM's for the CPU."""


class EarlierCPUStage(EarlierStage, CPUModelRunner):
    """The same of a pipeline stage before the last."""


class VidSpecCPUWorker(VidSpecWorker, CPUWorker):
    """CPU worker on Model Runner V2: vLLM's kernels run by Triton's interpreter or a twin, ours as compiled loops."""

    @leaves_refusal
    def init_device(self):
        keep_caches_readable()
        with cpu_model_runner(lambda *args: (VidSpecCPUModelRunner if is_last() else EarlierCPUStage)(*args)):
            super().init_device()

    def compile_or_warm_up_model(self):
        begin = time.perf_counter()
        load_loops()
        logger.info("vidspec: CPU kernels compiled in %.1f s", time.perf_counter() - begin)
        return super().compile_or_warm_up_model()
