"""The driver half of the "cpu" Triton backend: names the device and nothing more."""

from triton.backends import driver as _driver

from vllm_vidspec.engine.triton_cpu import ACTIVE


class CPUInterpreterDriver(_driver.DriverBase):
    """Driver of target "cpu", active exactly where no GPU device node exists."""

    @classmethod
    def is_active(cls):
        return ACTIVE

    def map_python_to_cpp_type(self, ty):
        raise RuntimeError("the cpu backend interprets kernels; it launches none")

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench
