"""vLLM's entry point into this project: idempotent, runs in every vLLM process, never raises."""

import logging

SUPPORTED_VLLM = "0.32."

logger = logging.getLogger("vllm.vidspec")


def register() -> None:
    """Teach this vLLM process `--speculative-config '{"method": "vidspec", ...}'`.

    vLLM logs and skips a plugin that raises, which would hide a wrong version behind "unknown method"; so the hook is
    installed regardless and complains, in one line, when the method is used.
    """
    from vllm_vidspec.engine import compat, preflight
    from vllm_vidspec.engine.report import server_counters

    compat.install_error_line(server_counters.refusal)
    compat.hook_engine_config(preflight.translate, preflight.finish)
    if preflight.version_problem() is None:
        compat.allow_sampling_parameters()
        compat.keep_media_of_cached_prefixes()
        compat.repair_interpreter_kernels()
        compat.speed_up_interpreter_kernels()
