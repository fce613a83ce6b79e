"""The compiler half of the "cpu" Triton backend: it only has to exist, since the interpreter compiles nothing."""

# A module import: Triton counts every BaseBackend subclass found in this module, bases by name included.
from triton.backends import compiler as _compiler


class CPUInterpreterBackend(_compiler.BaseBackend):
    """Backend of target "cpu". Every compilation stage is unreachable."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "vidspec-cpu-interpreter"

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("the cpu backend interprets kernels; it compiles none")

    parse_options = add_stages = load_dialects = _refuse

    def get_module_map(self):
        return {}
