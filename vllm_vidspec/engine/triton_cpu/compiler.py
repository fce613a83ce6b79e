"""The compiler half of the "cpu" Triton backend: it only has to exist, since the interpreter compiles nothing."""

# A module import: Triton counts every BaseBackend subclass found in this module, bases by name included.
from triton.backends import compiler as _compiler

_REASON = "the cpu backend interprets kernels; it compiles none"


class CPUInterpreterBackend(_compiler.BaseBackend):
    """Backend of target "cpu". Every compilation stage is unreachable."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "vidspec-cpu-interpreter"

    def parse_options(self, options):
        raise RuntimeError(_REASON)

    def add_stages(self, stages, options, language=None):
        raise RuntimeError(_REASON)

    def load_dialects(self, context):
        raise RuntimeError(_REASON)

    def get_module_map(self):
        return {}
